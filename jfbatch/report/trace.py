"""`--profile`: where a run's time went, as a Chrome trace (Perfetto reads it too) and as a table.

`Trace.span` is a context manager per piece of work; spans of one thread nest. A kind's own time is
its spans' time less that of the spans inside them, so that the kinds of a thread add up to it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.table import Table

from jfbatch.errors import OutputError
from jfbatch.report.progress import LastingConsole

MOST_EVENTS = 2_000_000  # kept for the file, some 200 MB of JSON; the table counts those after them as well


@dataclass
class Kind:
    """What the spans of one name took: `own` without the spans inside them. Seconds."""

    calls: int = 0
    own: float = 0.0
    whole: float = 0.0


@dataclass
class Lane:
    """One thread's spans: (name, start, seconds) of those that ended, and the open ones' inner times."""

    number: int
    name: str
    most_events: int
    events: list[tuple[str, float, float]] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    inner: list[float] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """Seconds inside spans."""
        return sum(kind.own for kind in self.kinds.values())

    def count(self, name: str, start: float, seconds: float, contained: float = 0.0) -> None:
        """A span has ended, which contained others of so many seconds."""
        if self.inner:
            self.inner[-1] += seconds
        total = self.kinds.setdefault(name, Kind())
        total.calls += 1
        total.whole += seconds
        total.own += seconds - contained
        if len(self.events) < self.most_events:
            self.events.append((name, start, seconds))


class _Span:
    """One piece of work being timed."""

    __slots__ = ("_lane", "_name", "_start", "_trace")

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    def __enter__(self) -> None:
        self._lane = self._trace._lane()
        self._lane.inner.append(0.0)
        self._start = time.perf_counter()

    def contain(self, parts: Mapping[str, float]) -> None:
        """Count parts of the open span, measured elsewhere in seconds, as if one had followed the other."""
        start = self._start
        for name, seconds in parts.items():
            self._lane.count(name, start, seconds)
            start += seconds

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._start
        self._lane.count(self._name, self._start, seconds, self._lane.inner.pop())


class Trace:
    """Collects spans of any number of threads; `most_events` of each are kept for the file."""

    def __init__(self, most_events: int = MOST_EVENTS) -> None:
        self.most_events = most_events
        self.started = time.perf_counter()
        self.lanes: list[Lane] = []
        self._local = threading.local()
        self._lock = threading.Lock()

    def span(self, name: str) -> _Span:
        """A context manager that times what is done inside it."""
        return _Span(self, name)

    def _lane(self) -> Lane:
        lane: Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            with self._lock:
                lane = Lane(len(self.lanes), threading.current_thread().name, self.most_events)
                self.lanes.append(lane)
            self._local.lane = lane
        return lane

    def write(self, path: Path) -> None:
        """Write the trace in Chrome's JSON format, times in microseconds. Raises OutputError."""
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                file.writelines(_lines(self._chrome_events()))
                file.write("]}\n")
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None

    def _chrome_events(self) -> Iterator[dict[str, object]]:
        process = os.getpid()
        for lane in list(self.lanes):
            place = {"pid": process, "tid": lane.number}
            yield {"name": "thread_name", "ph": "M", **place, "args": {"name": lane.name}}
            for name, start, seconds in lane.events:
                since = (start - self.started) * 1e6
                yield {
                    "name": name,
                    "ph": "X",
                    **place,
                    "ts": round(since, 3),
                    "dur": round(seconds * 1e6, 3),
                }
            left_out = sum(kind.calls for kind in lane.kinds.values()) - len(lane.events)
            if left_out > 0:
                yield {"name": f"{left_out} later spans left out", "ph": "i", "s": "t", **place, "ts": since}


def _lines(events: Iterator[dict[str, object]]) -> Iterator[str]:
    for number, event in enumerate(events):
        yield (",\n" if number else "") + json.dumps(event)


class Profile:
    """A trace that is written to `path` and printed when the block ends, however it ends."""

    def __init__(self, path: Path, stream: TextIO | None = None) -> None:
        self._path = path
        self._stream = stream
        self._trace = Trace()

    def __enter__(self) -> Trace:
        return self._trace

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_table(self._trace, self._stream)
        self._trace.write(self._path)


@dataclass(frozen=True)
class Share:
    """A line of the table: a kind's own seconds and what share of its whole they are."""

    name: str
    calls: int
    seconds: float
    share: float


def shares(lane: Lane, elapsed: float) -> list[Share]:
    """A thread's kinds, what took longest first, then what no span covers: their shares add up to 1."""
    ordered = sorted(lane.kinds.items(), key=lambda item: -item[1].own)
    lines = [Share(name, kind.calls, kind.own, kind.own / elapsed) for name, kind in ordered]
    rest = max(elapsed - lane.busy, 0.0)
    return [*lines, Share("(outside all spans)", 0, rest, rest / elapsed)]


def outside_the_forward_pass(trace: Trace) -> float | None:
    """The share of the steps' time that is not the forward pass; None where no step was run."""
    steps = [lane.kinds["step"].whole for lane in trace.lanes if "step" in lane.kinds]
    passes = [lane.kinds["forward"].whole for lane in trace.lanes if "forward" in lane.kinds]
    return 1 - sum(passes) / sum(steps) if sum(steps) else None


def print_table(trace: Trace, stream: TextIO | None = None) -> None:
    """Print, per thread, each kind's calls, own seconds and share of the time since the trace began."""
    console = LastingConsole(
        file=stream if stream is not None else sys.stderr, highlight=False, soft_wrap=True
    )
    elapsed = time.perf_counter() - trace.started
    for lane in sorted(trace.lanes, key=lambda lane: -lane.busy):
        table = Table(box=None, pad_edge=False, title=f"{lane.name}: {elapsed:.2f} s", title_justify="left")
        table.add_column("what")
        for column in ("times", "own seconds", "share"):
            table.add_column(column, justify="right")
        for line in shares(lane, elapsed):
            times = f"{line.calls:,}" if line.calls else ""
            table.add_row(line.name, times, f"{line.seconds:.3f}", f"{line.share:.1%}")
        console.print(table)
    if (outside := outside_the_forward_pass(trace)) is not None:
        console.print(f"of the steps' time, {outside:.1%} is not the forward pass")
