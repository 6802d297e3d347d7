"""One model over two processes: gloo on the CPU, the tiny model, the whole program."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfbatch.engine.runner import Segment
from jfbatch.engine.tensor_parallel import decode, encode
from tests.run_command import Job, wait_until
from tests.soak.kill_loop import COMPARED, prepare

ROWS = 40

ids = st.lists(st.integers(0, 100_000), max_size=8)
segments = st.builds(
    Segment, st.integers(0, 99), st.integers(0, 9999), ids, st.lists(st.integers(0, 7)), st.integers(0, 9999)
)


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job on one device."""
    job = Job(tmp_path_factory.mktemp("alone"), tiny_model, tmp_path_factory.mktemp("cache"))
    assert len(job.run(None, *prepare(job, ROWS))) == ROWS
    return job


@pytest.fixture
def job(alone: Job, tmp_path: Path) -> Job:
    return Job(tmp_path, alone.model, alone.cache)


@given(st.lists(segments, max_size=5))
def test_a_step_survives_its_way_as_numbers(step: Sequence[Segment]) -> None:
    assert decode(encode(step)) == step


@pytest.mark.slow
def test_two_processes_say_what_one_says(job: Job, alone: Job) -> None:
    process = job.process(*prepare(job, ROWS), "--tensor-parallel", "2")
    try:
        wait_until(lambda: bool(followers(process.pid)) or process.poll() is not None)
        children = followers(process.pid)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert len(children) == 1 and not children[0].is_running()
    assert job.table().select(COMPARED).equals(alone.table().select(COMPARED))
    # With everything done there is nothing to load, and no process to start.
    before = job.output.stat().st_mtime_ns
    process = job.process(*prepare(job, ROWS), "--tensor-parallel", "2", "-q")
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0 and job.output.stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["leader, in good order", "all, in good order", "leader", "follower"])
def test_whichever_process_ends_the_other_does_not_wait_and_the_rest_continues(
    job: Job, alone: Job, victim: str
) -> None:
    process = job.process(*prepare(job, ROWS), "--tensor-parallel", "2")
    try:
        wait_until(lambda: any(job.parts.glob("part-*")) or process.poll() is not None)
        (child,) = followers(process.pid)
        if victim == "follower":
            child.kill()
        else:
            if victim.startswith("all"):  # as Slurm does at a preemption
                child.send_signal(signal.SIGTERM)
                time.sleep(0.2)
            process.send_signal(signal.SIGKILL if victim == "leader" else signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == {"follower": 2, "leader": -9}.get(victim, 143), stderr
    assert "Traceback" not in stderr or victim == "leader"
    if victim == "follower":
        assert "the same command continues" in stderr
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    # One device goes on where two stopped.
    job.run(None, *prepare(job, ROWS))
    assert job.table().select(COMPARED).equals(alone.table().select(COMPARED))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tensor-parallel", "4"], "key value heads: 2 cannot be cut in 4"),
        (["--tensor-parallel", "2", "--devices", "cpu:2"], "either --devices"),
    ],
)
def test_what_cannot_be_cut_is_refused(job: Job, flags: list[str], said: str) -> None:
    process = job.process(*prepare(job, ROWS), *flags)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def followers(process: int) -> list[psutil.Process]:
    children = psutil.Process(process).children()
    return [child for child in children if "jfbatch.engine.follower" in " ".join(child.cmdline())]
