"""How long steps take: until they are computed, not until they are launched.

A CPU has computed a step when the call returns. CUDA is only told what to do: events before and after the
step's kernels are on the device's own clock, and they are read when they have happened, which is no
later than when the step's tokens have been fetched. So nobody ever waits for a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment in the work of a device."""

    def record(self) -> None:
        """It is when the device has done what it was told until now."""
        ...

    def happened(self) -> bool:
        """Whether it has been."""
        ...

    def wait(self) -> None:
        """Return when it has been."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """From an earlier mark of the same kind; both have been."""
        ...


class HostMark:
    """A Mark where nothing runs beside the host."""

    def record(self) -> None:
        """See Mark."""
        self._time = time.perf_counter()

    def happened(self) -> bool:
        """See Mark."""
        return True

    def wait(self) -> None:
        """See Mark."""

    def seconds_since(self, earlier: HostMark) -> float:
        """See Mark."""
        return self._time - earlier._time


class CudaMark:
    """A Mark on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """See Mark."""
        self._event.record(torch.cuda.current_stream(self._device))

    def happened(self) -> bool:
        """See Mark."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See Mark."""
        self._event.synchronize()

    def seconds_since(self, earlier: CudaMark) -> float:
        """See Mark."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


def marks_of(device: torch.device) -> Callable[[], Mark]:
    """What makes the marks of a device."""
    return (lambda: CudaMark(device)) if device.type == "cuda" else HostMark


class StepTimes:
    """Tells the times of steps once they are known, in the order of the steps. new_mark: makes a Mark."""

    def __init__(self, new_mark: Callable[[], Mark]) -> None:
        self._new_mark = new_mark
        self._untold: deque[tuple[Mark, Mark, Callable[[float], None]]] = deque()

    @contextmanager
    def measured(self) -> Iterator[tuple[Mark, Mark]]:
        """The marks around what is launched inside."""
        marks = self._new_mark(), self._new_mark()
        marks[0].record()
        yield marks
        marks[1].record()

    def tell(self, marks: tuple[Mark, Mark], told: Callable[[float], None]) -> None:
        """Call `told` with the seconds between the marks: now if they are known, else from `settle`."""
        self._untold.append((*marks, told))
        self.settle()

    def settle(self, wait: bool = False) -> None:
        """Tell what is known by now; with `wait`, everything."""
        while self._untold and (wait or self._untold[0][1].happened()):
            start, stop, told = self._untold.popleft()
            stop.wait()
            told(stop.seconds_since(start))
