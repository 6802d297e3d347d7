"""The progress line on stderr: drawn in place on a terminal, a plain line every few seconds elsewhere.

The caller may report after every step; all but a few calls a second cost one clock reading.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from jfbatch.report.lasting import silence
from jfbatch.report.statistics import RunStatistics

_TERMINAL_INTERVAL = 0.2  # seconds between two drawings
_PLAIN_INTERVAL = 5.0  # seconds between two lines in a log


def progress_text(statistics: RunStatistics) -> str:
    """Rows done, failed and in total, rows/s, tokens/s, the share jumped and the time left, on one line."""
    total = "?" if statistics.rows_total is None else f"{statistics.rows_total:,}"
    parts = [f"{statistics.rows_done:,}/{total} rows"]
    if statistics.rows_failed:
        parts.append(f"{statistics.rows_failed:,} failed")
    parts += [
        f"{statistics.rows_per_second:.2f} rows/s",
        f"{statistics.tokens_per_second:.0f} tokens/s",
        f"{statistics.jumped_share:.0%} jumped",
    ]
    if statistics.seconds_left is not None:
        parts.append(f"{format_seconds(statistics.seconds_left)} left")
    return " · ".join(parts)


def format_seconds(seconds: float) -> str:
    """'4.2 s', '3:05' or '2:00:00'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LastingConsole(Console):
    """A console whose reader may go: rich would end the program, in the middle of a run."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        silence(cast(TextIO, self.file))


class Progress:
    """Shows how a run gets on; a context manager. Writes to `stream` (stderr), never to stdout."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet = quiet
        self._clock = clock
        self._console = LastingConsole(
            file=stream if stream is not None else sys.stderr, highlight=False, soft_wrap=True
        )
        self._on_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._interval = _TERMINAL_INTERVAL if self._on_terminal else _PLAIN_INTERVAL
        self._next = clock() + (0.0 if self._on_terminal else self._interval)
        self._bar: RichProgress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Progress:
        if self._on_terminal and not self._quiet:
            # Drawn by update() alone: no refresh thread runs beside the engine.
            self._bar = RichProgress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("starting", total=None)
            self._bar.start()
            self._bar.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def is_due(self) -> bool:
        """Whether update() would show anything now; ask first where making the statistics costs something."""
        return not self._quiet and self._clock() >= self._next

    def update(self, statistics: RunStatistics) -> None:
        """Show the statistics, if it is time to."""
        if not self.is_due():
            return
        self._next = self._clock() + self._interval
        if self._bar is None:
            self._console.print(progress_text(statistics), markup=False)
            return
        self._bar.update(
            self._task,
            completed=statistics.rows_done,
            total=statistics.rows_total,
            description=progress_text(statistics),
        )
        self._bar.refresh()

    def end(self, statistics: RunStatistics) -> None:
        """Take note of the statistics a run ends with; a line has nothing to show of them."""

    def say(self, text: str) -> None:
        """Print one line above the progress line, such as a warning or the model that is loading."""
        if not self._quiet:
            self._console.print(text, markup=False)
