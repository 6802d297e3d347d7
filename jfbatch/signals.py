"""SIGTERM and SIGINT stop a run in good order; SIGUSR1 asks how it gets on.

The first stop signal ends the run after the step in progress, with what is finished committed; a
second SIGINT ends the process at once. A run that cannot stop within its grace is ended by force:
parts appear by rename, so no file is ever torn. A signal that comes while the program is only being
loaded is kept for the run. (So this module imports next to nothing.)
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_LOADING_SECONDS = 25.0  # how long a stop signal waits for a run to begin


class KeptStop:
    """A handler that keeps SIGTERM for the Signals of a run to come; it ends the process if none comes."""

    def __init__(self) -> None:
        self.received_at: float | None = None
        self._timer: threading.Timer | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.received_at is None:
            self.received_at = time.monotonic()
            self._timer = threading.Timer(_LOADING_SECONDS, self._end, (128 + number,))
            self._timer.daemon = True
            self._timer.start()

    def hand_over(self) -> float | None:
        """How many seconds ago the signal came, None if it has not; what follows is the caller's."""
        if self._timer is not None:
            self._timer.cancel()
        return None if self.received_at is None else time.monotonic() - self.received_at

    def _end(self, code: int) -> None:
        os.write(2, b"stopped before the first row: the same command starts again\n")
        os._exit(code)


def _on_early_status_signal(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"starting\n")


def keep_early_signals() -> dict[int, Any]:
    """From now on, SIGTERM is kept for a run to come and SIGUSR1 harmless; the handlers before, by signal.

    Only where nobody handles them yet, and in the main thread.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGTERM, KeptStop()), (signal.SIGUSR1, _on_early_status_signal)):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, handler)
    return before


@contextmanager
def early_signals_kept() -> Iterator[None]:
    """`keep_early_signals` inside; what was before after it."""
    before = keep_early_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Signals:
    """Handles the process's signals inside a `with` block, in the main thread only."""

    def __init__(
        self, grace: float, status_line: Callable[[], str], forced_end: Callable[[int], None] | None = None
    ) -> None:
        """`forced_end` is called with the exit code right before an end by force."""
        self._forced_end = forced_end
        self.received: int | None = None
        self._grace = grace
        self._status_line = status_line
        self._stop: Callable[[], None] | None = None
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """130 after SIGINT, 143 after SIGTERM."""
        return None if self.received is None else 128 + self.received

    def on_stop(self, stop: Callable[[], None]) -> None:
        """What a stop signal calls; at once if there was one already."""
        self._stop = stop
        if self.received is not None:
            stop()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_stop_signal)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_status_signal)
            kept = self._before[signal.SIGTERM]
            if isinstance(kept, KeptStop) and (ago := kept.hand_over()) is not None:
                self._stop_within(self._grace - ago, signal.SIGTERM)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_stop_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self._stop_within(self._grace, number)

    def _stop_within(self, seconds: float, number: int) -> None:
        self.received = number
        seconds = min(max(seconds, 0), threading.TIMEOUT_MAX)
        self._timer = threading.Timer(seconds, self._end_by_force, (128 + number,))
        self._timer.daemon = True
        self._timer.start()
        if self._stop is not None:
            self._stop()

    def _end_by_force(self, code: int) -> None:
        try:
            if self._forced_end is not None:
                self._forced_end(code)
        finally:
            os._exit(code)

    def _on_status_signal(self, _number: int, _frame: FrameType | None) -> None:
        # Not through sys.stderr: the signal may have come in the middle of a write to it.
        os.write(2, f"{self._status_line()}\n".encode())
