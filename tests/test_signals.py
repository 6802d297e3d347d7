"""Stop signals to a process that does not stop by itself: grace and a second SIGINT end it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize("stubborn", [60], indirect=True)
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


@pytest.mark.parametrize("stubborn", [60], indirect=True)
def test_sigusr1_prints_a_status_line_and_changes_nothing(stubborn: subprocess.Popen[str]) -> None:
    stubborn.send_signal(signal.SIGUSR1)
    assert stubborn.stderr is not None and stubborn.stderr.readline() == "3 of 7 rows\n"
    assert stubborn.poll() is None
