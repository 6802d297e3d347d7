"""SIGTERM and SIGINT stop a run in good order; SIGUSR1 asks how it gets on.

The first stop signal ends the run after the step in progress, with what is finished committed; a
second SIGINT ends the process at once. A run that cannot stop within its grace is ended by force:
parts appear by rename, so no file is ever torn.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


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
        self.received = number
        self._timer = threading.Timer(self._grace, self._end_by_force, (128 + number,))
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
