"""What the KV storage may take by default: the tightest of free RAM and control group limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jfbatch.engine import memory
from jfbatch.engine.memory import CPU_SHARE, FALLBACK, LEAST, spare_memory

CPU = torch.device("cpu")
GIB = 1 << 30


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 GiB free and no limits."""
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    write(tmp_path, "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {16 * GIB >> 10} kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    return tmp_path


def group(system: Path, place: str, limit: str, used: int, cached: int = 0) -> None:
    write(system, f"sys/fs/cgroup/{place}/memory.max", f"{limit}\n")
    write(system, f"sys/fs/cgroup/{place}/memory.current", f"{used}\n")
    write(system, f"sys/fs/cgroup/{place}/memory.stat", f"anon 5\ninactive_file {cached}\n")


def test_half_of_the_free_memory(system: Path) -> None:
    assert spare_memory(CPU) == 16 * GIB * CPU_SHARE


def test_the_limit_of_an_enclosing_group_counts(system: Path) -> None:
    group(system, "job/step", "max", 3 * GIB)
    group(system, "job", str(8 * GIB), 6 * GIB, cached=2 * GIB)
    assert spare_memory(CPU) == 4 * GIB * CPU_SHARE


def test_a_limit_above_what_is_free_changes_nothing(system: Path) -> None:
    group(system, "job", str(500 * GIB), 0)
    assert spare_memory(CPU) == 16 * GIB * CPU_SHARE


def test_groups_of_the_first_version_count_too(system: Path) -> None:
    write(system, "proc/self/cgroup", "5:cpu:/x\n4:memory:/slurm/job_7\n")
    directory = "sys/fs/cgroup/memory/slurm/job_7"
    write(system, f"{directory}/memory.limit_in_bytes", str(2 * GIB))
    write(system, f"{directory}/memory.usage_in_bytes", str(GIB))
    write(system, f"{directory}/memory.stat", "cache 0")
    assert spare_memory(CPU) == GIB * CPU_SHARE


def test_a_full_group_still_leaves_room_for_a_row(system: Path) -> None:
    group(system, "job/step", str(GIB), 2 * GIB)
    assert spare_memory(CPU) == LEAST


def test_a_system_that_says_nothing_gets_a_fixed_amount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    assert spare_memory(CPU) == FALLBACK


def test_this_machine_says_what_is_free() -> None:
    assert LEAST <= spare_memory(CPU) < 1 << 50
