"""Real processes, stopped by signals or killed: what is finished stays, and the same command continues."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.run_command import Job, wait_until
from tests.soak.kill_loop import COMPARED, compare, kill_after, prepare

pytestmark = pytest.mark.slow

ROWS = 90
RANDOM_KILLS = 6


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job, finished without interruption."""
    job = Job(tmp_path_factory.mktemp("reference"), tiny_model, tmp_path_factory.mktemp("cache"))
    prepare(job, ROWS)
    assert len(job.run(None, *flags(job))) == ROWS
    return job


def flags(job: Job) -> list[str]:
    return prepare(job, ROWS)


@pytest.fixture
def job(reference: Job, tmp_path: Path) -> Job:
    return Job(tmp_path, reference.model, reference.cache)


def parts(job: Job) -> int:
    return len(list(job.parts.glob("*.parquet"))) if job.parts.is_dir() else 0


def assert_continues_to_the_same_table(job: Job, reference: Job, at_least_kept: int) -> None:
    summary = job.directory / "summary.json"
    job.run(None, *flags(job), "--summary-json", str(summary))
    assert json.loads(summary.read_text())["statistics"]["rows_kept"] >= at_least_kept
    assert job.table().select(COMPARED).equals(reference.table().select(COMPARED))
    assert sorted(path.name for path in job.directory.iterdir()) == [
        "rows.jsonl",
        "schema.json",
        "summary.json",
        "table.parquet",
        "table.parquet.journal",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_signal_commits_what_is_finished_and_says_how_to_continue(
    job: Job, reference: Job, number: signal.Signals, code: int
) -> None:
    process = job.process(*flags(job))
    try:
        wait_until(lambda: parts(job) >= 2 or process.poll() is not None)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert any("rows/s" in line and "tokens/s" in line for line in stderr.splitlines())  # SIGUSR1's answer
    last = stderr.splitlines()[-1]
    assert "the same command continues" in last and str(job.output) in last
    assert not job.output.exists()
    assert parts(job) >= 2
    assert_continues_to_the_same_table(job, reference, at_least_kept=6)


@pytest.mark.parametrize("moment", [1, 9])
def test_a_killed_run_loses_only_what_was_not_committed(job: Job, reference: Job, moment: int) -> None:
    process = job.process(*flags(job))
    try:
        wait_until(lambda: parts(job) >= moment or process.poll() is not None)
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert_continues_to_the_same_table(job, reference, at_least_kept=3 * moment)


def test_killed_at_random_moments_and_continued_it_gives_the_same_table(job: Job, reference: Job) -> None:
    chance = random.Random(20)
    kills = starts = 0
    longest = 8.0  # seconds; adapted to the machine: a start that gets to its end was given too many
    while kills < RANDOM_KILLS and starts < 3 * RANDOM_KILLS:
        starts += 1
        if kill_after(job, flags(job), chance.uniform(0.2, longest)):
            kills += 1
            longest *= 1.0 if parts(job) else 1.3
        else:
            compare(job.table(), reference.table())
            shutil.rmtree(job.directory)
            job.directory.mkdir()
            longest *= 0.8
    assert kills == RANDOM_KILLS
    assert_continues_to_the_same_table(job, reference, at_least_kept=0)


def test_a_signal_before_the_model_is_loaded_ends_the_run_as_well(job: Job, reference: Job) -> None:
    process = job.process(*flags(job))
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("loading ")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, stderr
    assert "the same command continues" in stderr
    assert_continues_to_the_same_table(job, reference, at_least_kept=0)
