"""Several processes at one run: real ones, on the CPU, with the tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jfbatch.cluster.devices import devices_of, processors_of, shards_for
from jfbatch.config import RunConfig
from jfbatch.errors import UsageError
from jfbatch.report.statistics import RunStatistics, summed
from jfbatch.rows.shard import Shard
from tests.run_command import ROOT, Job, wait_until, write_lines
from tests.soak.kill_loop import COMPARED, prepare

ROWS = 240


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job in one process."""
    job = Job(tmp_path_factory.mktemp("alone"), tiny_model, tmp_path_factory.mktemp("cache"))
    assert len(job.run(None, *prepare(job, ROWS))) == ROWS
    return job


@pytest.fixture
def job(alone: Job, tmp_path: Path) -> Job:
    return Job(tmp_path, alone.model, alone.cache)


def start(job: Job, *flags: str) -> subprocess.Popen[str]:
    return job.process(*prepare(job, ROWS), "--devices", "cpu:2", *flags)


def shards(job: Job) -> dict[str, int]:
    """How many parts each shard has."""
    base = job.directory / "table.parquet.shards"
    return {path.name: len(list(path.glob("part-*"))) for path in base.glob("*")} if base.is_dir() else {}


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children()
    return [child for child in found if "jfbatch.cluster.worker" in " ".join(child.cmdline())]


def same_table(job: Job, alone: Job) -> bool:
    equal: bool = job.table().select(COMPARED).equals(alone.table().select(COMPARED))
    return equal


# -- which devices ------------------------------------------------------------------------------------------


def test_devices_are_numbers_all_of_them_or_processes_on_the_cpu() -> None:
    assert devices_of("cpu:3", lambda: 0) == ["cpu"] * 3
    assert devices_of("all", lambda: 2) == ["cuda:0", "cuda:1"]
    assert devices_of("2,0", lambda: 3) == ["cuda:2", "cuda:0"]


@pytest.mark.parametrize(
    ("text", "gpus", "said"),
    [("all", 0, "cpu:N"), ("0,3", 2, "no device 3; there are 0 to 1"), ("1,1", 2, "twice")],
)
def test_devices_that_are_not_there_are_named(text: str, gpus: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        devices_of(text, lambda: gpus)


@pytest.mark.parametrize("text", ["gpu", "0,", "cpu", "cpu:0", "-1", ""])
def test_devices_in_another_spelling_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be all"):
        RunConfig(devices=text)


def test_each_process_on_the_cpu_has_processors_of_its_own() -> None:
    there = sorted(os.sched_getaffinity(0))
    assert processors_of(0, 1) == there
    assert processors_of(0, len(there) + 1) == []
    apart = [processors_of(place, len(there)) for place in range(len(there))]
    assert sorted(number for numbers in apart for number in numbers) == there


def test_a_shard_on_several_devices_is_cut_once_more(tmp_path: Path) -> None:
    config = RunConfig(output=tmp_path / "t.parquet")
    assert shards_for(config, Shard(2, 3), 2) == (Shard(2, 6), Shard(5, 6))
    assert shards_for(config, Shard(1, 1), 4) == tuple(Shard(number, 4) for number in range(1, 5))


def test_statistics_of_several_add_up() -> None:
    first = RunStatistics(rows_total=5, status_counts={"ok": 3}, sampled_tokens=7, rows_kept=1)
    second = RunStatistics(rows_total=6, status_counts={"ok": 1, "failed": 2}, sampled_tokens=1)
    both = summed([first, second], 2.0)
    assert (both.rows_total, both.rows_done, both.rows_failed, both.sampled_tokens) == (11, 6, 2, 8)
    assert both.rows_per_second == 2.5
    assert summed([first, RunStatistics()], 1.0).rows_total is None


def test_failures_of_earlier_starts_are_told_apart() -> None:
    worker = RunStatistics(status_counts={"failed": 5, "ok": 1}, rows_kept=4, rows_failed_before=3)
    both = summed([worker, worker], 1.0)
    assert (both.rows_failed, both.rows_failed_now) == (10, 4)


# -- runs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_give_the_table_of_one(job: Job, alone: Job) -> None:
    summary = job.directory / "summary.json"
    process = start(job, "--summary-json", str(summary))
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert same_table(job, alone)
    told = json.loads(summary.read_text())
    assert sum(told["rows"].values()) == told["statistics"]["rows_total"] == ROWS
    assert told["statistics"]["sampled_tokens"] > 0
    assert stderr.count("loading ") == 1  # one display for all
    assert "jfbatch merge" not in stderr  # it merges itself
    assert re.search(rf"^rows +{ROWS}: \d+ ok", stderr, re.MULTILINE)
    assert not (job.directory / "table.parquet.shards").exists()
    # Again, on one device less: there is nothing left to do.
    before = job.output.stat().st_mtime_ns
    process = job.process(*prepare(job, ROWS), "--devices", "cpu:1", "-q")
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 0 and job.output.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_other_goes_on(job: Job, alone: Job) -> None:
    process = start(job)
    try:
        wait_until(
            lambda: (len(shards(job)) == 2 and all(shards(job).values())) or process.poll() is not None
        )
        workers(process)[0].kill()
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "died (signal 9): it is started again, and continues" in stderr
    assert same_table(job, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_handed_on_and_other_devices_continue(
    job: Job, alone: Job, number: signal.Signals, code: int
) -> None:
    process = start(job)
    try:
        wait_until(lambda: sum(shards(job).values()) >= 2 or process.poll() is not None)
        children = workers(process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert "the same command continues" in stderr.splitlines()[-1]
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not job.output.exists() and sum(shards(job).values()) >= 2
    if number == signal.SIGINT:
        return  # from here on all is the same
    # One device instead of two takes both shards, one after the other.
    process = job.process(*prepare(job, ROWS), "--devices", "cpu:1")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "kept from an earlier start" in stderr
    assert same_table(job, alone)


@pytest.mark.slow
def test_workers_do_not_outlive_their_parent(job: Job) -> None:
    process = start(job)
    try:
        wait_until(lambda: sum(shards(job).values()) >= 1 or process.poll() is not None)
        children = workers(process)
        assert children
    finally:
        process.kill()
        process.communicate(timeout=30)
    wait_until(
        lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    )


@pytest.mark.slow
def test_a_mistake_that_all_workers_meet_is_told_once(job: Job, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    process = start(job, "--model", str(broken))
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert sum(line.startswith("jfbatch: ") for line in stderr.splitlines()) == 1
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_worker_that_dies_twice_ends_the_run_and_loses_nothing(job: Job, tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.mkdir()
    # Python runs this at the start of every process: workers of shard 2 die as if killed for memory.
    (hook / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'jfbatch.cluster.worker' in sys.orig_argv:\n"
        "    import jfbatch.job as job\n"
        "    original = job.run\n"
        "    def run(config, *rest, **more):\n"
        "        if config.shard == '2/2':\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return original(config, *rest, **more)\n"
        "    job.run = run\n"
    )
    arguments = job.arguments(*prepare(job, ROWS), "--devices", "cpu:2")
    done = subprocess.run(
        [sys.executable, "-m", "jfbatch", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{hook}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "shard 2/2 on cpu died (signal 9), the second time: the others go on" in done.stderr
    assert "the same command continues" in done.stderr.splitlines()[-1]
    assert (job.directory / "table.parquet.shards" / "1-of-2" / "done.json").exists()


@pytest.mark.slow
def test_failed_rows_of_earlier_starts_do_not_stop_a_run(alone: Job, tmp_path: Path) -> None:
    job = Job(tmp_path, alone.model, alone.cache)
    bad = [{"id": n, "prompt": 7} for n in range(6)]
    write_lines(job.input, bad)
    flags = ["--regex", "[ab]{3}", "--devices", "cpu:2", "-q"]
    process = job.process(*flags)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    write_lines(job.input, [*bad, {"id": "good", "prompt": "a"}])
    process = job.process(*flags, "--max-failures", "4")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert [row["status"] for row in job.rows()] == ["invalid_input"] * 6 + ["ok"]
    assert not (tmp_path / "table.parquet.shards").exists()
    write_lines(job.input, [*bad, {"id": "new", "prompt": 8}, {"id": "newer", "prompt": 9}])
    process = job.process(*flags, "--max-failures", "2")  # reached by the last rows: all is done
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert len(job.rows()) == 8
