"""Stop signals to a process that does not stop by itself: grace and a second SIGINT end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run_command import ROOT, Job, wait_until, write_lines

STUBBORN = """
import sys, time
from jfbatch.signals import Signals
with Signals(float(sys.argv[1]), lambda: "3 of 7 rows") as signals:
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.fixture
def stubborn(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that handles signals with the grace of the parameter and never ends by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(request.param)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("stubborn", [0.5], indirect=True)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_when_its_grace_is_over_the_process_ends(
    stubborn: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    started = time.monotonic()
    stubborn.send_signal(number)
    assert stubborn.wait(timeout=30) == code
    assert time.monotonic() - started >= 0.5


@pytest.mark.parametrize("stubborn", [60, "inf"], indirect=True)
def test_a_second_sigint_ends_the_process_at_once_and_a_second_sigterm_does_not(
    stubborn: subprocess.Popen[str],
) -> None:
    stubborn.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    stubborn.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        stubborn.wait(timeout=0.3)
    stubborn.send_signal(signal.SIGINT)
    assert stubborn.wait(timeout=30) == 130
    assert stubborn.stderr is not None and stubborn.stderr.read() == ""


@pytest.mark.parametrize("stubborn", [60], indirect=True)
def test_sigusr1_prints_a_status_line_and_changes_nothing(stubborn: subprocess.Popen[str]) -> None:
    stubborn.send_signal(signal.SIGUSR1)
    assert stubborn.stderr is not None and stubborn.stderr.readline() == "3 of 7 rows\n"
    assert stubborn.poll() is None


def catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("requeues", [False, True])
def test_a_signal_in_the_first_moments_ends_a_run_in_good_order(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, requeues: bool
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            echo "$@" >> {tmp_path}/asked
            echo JobState=RUNNING
            """
        )
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    job = Job(tmp_path, tiny_model, tmp_path / "cache")
    write_lines(job.input, [{"prompt": "a"}])
    process = job.process("--regex", "[ab]", *(["--requeue"] if requeues else []))
    try:
        wait_until(lambda: catches(process, signal.SIGUSR1))
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, stderr
    told = stderr.splitlines()
    assert told[0] == "starting"
    assert told[1].startswith("stopped: 0 rows are committed") and "the same command continues" in told[1]
    assert (tmp_path / "asked").exists() == requeues
    if requeues:
        assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 17"
    assert not job.output.exists() and not job.parts.exists()


def test_a_signal_that_no_run_takes_ends_the_process_after_a_while() -> None:
    script = """
        import os, signal, time
        from jfbatch import signals
        signals._LOADING_SECONDS = 0.3
        signals.keep_early_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (143, "")
    assert "the same command starts again" in done.stderr


@pytest.mark.parametrize("rows_before", [0, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_waits_for_its_input_stops_soon(
    tmp_path: Path, tiny_model: Path, number: signal.Signals, code: int, rows_before: int
) -> None:
    job = Job(tmp_path, tiny_model, tmp_path / "cache")
    command = [sys.executable, "-m", "jfbatch", "run", "-", *job.arguments("--choice", "a,b")[2:]]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write('{"prompt": "p"}\n' * rows_before)
            process.stdin.flush()
            wait_until(lambda: (job.parts / "settings.json").exists())
            time.sleep(0.5)
            started = time.monotonic()
            process.send_signal(number)
            told = process.stderr.read()
            assert process.wait(timeout=60) == code, told
        finally:
            process.kill()
    assert time.monotonic() - started < 15
    assert "the same command continues" in told and "Traceback" not in told
