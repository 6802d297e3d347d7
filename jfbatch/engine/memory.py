"""How much memory the KV storage may take where nobody says: what the device has free, less a reserve.

On a CPU the tightest of free RAM and the limits of this process's control groups counts, so that a job
under Slurm or in a container stays within what it was given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

CPU_SHARE = 0.5  # of free RAM: the pool's headroom, a step's activations and the results want some too
CUDA_SHARE = 0.8  # of free device memory: activations and the logits of a prefill are not small
FALLBACK = 4 << 30  # where the system does not say
LEAST = 64 << 20

_SYSTEM = Path("/")

# How torch and oneDNN say on a CPU that an allocation failed; the last says no more than that.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "could not create a primitive")


def spare_memory(device: torch.device) -> int:
    """Bytes of KV storage that fit the device besides what it holds now; ask once the model is loaded."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(int((free + cached) * CUDA_SHARE), LEAST)
    limits = list(_free_of_the_cpu(_SYSTEM))
    if not limits:
        logger.warning("the system does not say how much memory is free: the KV cache may take 4 GiB")
        return FALLBACK
    return max(int(min(limits) * CPU_SHARE), LEAST)


def _free_of_the_cpu(root: Path) -> Iterator[int]:
    """Free bytes by every account there is, Linux's /proc and /sys being under `root`."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _number, controllers, place = line.split(":", 2)
        if not controllers:
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = base / place.lstrip("/")
        for directory in (group, *group.parents):  # a limit holds for all groups below it
            if (free := _free_of_a_group(directory, limit, used)) is not None:
                yield free
            if directory == base:
                break


def _free_of_a_group(directory: Path, limit: str, used: str) -> int | None:
    """Bytes left of a control group's limit, cached files counting as free; None if it has none."""
    try:
        most = (directory / limit).read_text().strip()
        now = int((directory / used).read_text())
        statistics = (directory / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    if not most.isdigit():  # "max"
        return None
    fields = dict(zip(statistics[::2], statistics[1::2], strict=False))
    cache = sum(int(fields.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(int(most) - max(now - cache, 0), 0)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says, on whatever device, that an allocation failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)
