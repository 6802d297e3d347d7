"""The few lines that need CUDA, against a stand-in for torch.cuda that takes what torch's own functions take.

It keeps account of streams, of what is told to which, and of graphs and their pools of memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from jfbatch.engine.graphs import CudaRecorder
from jfbatch.engine.step_times import CudaMark, StepTimes, marks_of

DEVICE = torch.device("cuda", 1)
REAL = {
    name: getattr(torch.cuda, name)
    for name in (
        *("Stream", "Event", "CUDAGraph", "graph", "stream", "current_stream", "synchronize"),
        *("graph_pool_handle", "get_sync_debug_mode", "set_sync_debug_mode"),
    )
}
MADE = {"Stream": "make_stream", "Event": "make_event", "CUDAGraph": "make_graph"}


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.time: float | None = None

    def record(self, stream: FakeStream) -> None:
        assert stream is self.cuda.main
        self.time = self.cuda.launched

    def query(self) -> bool:
        return self.time is None or self.time <= self.cuda.done

    def synchronize(self) -> None:
        self.cuda.done = max(self.cuda.done, self.time or 0.0)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.time is not None and end.time is not None and end.query()
        return end.time - self.time


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.memory: Any = None

    def pool(self) -> Any:
        assert self.memory is not None
        return self.memory

    def reset(self) -> None:
        self.cuda.log.append("reset")
        self.memory = None

    def replay(self) -> None:
        assert self.memory is not None


class FakeCuda:
    """torch.cuda where nothing is computed. `fault` ends a recording as torch does: the stream stays."""

    def __init__(self) -> None:
        self.main, self.side = FakeStream(self, "main"), FakeStream(self, "side")
        self.current = self.main
        self.mode: Any = 0
        self.log: list[str] = []
        self.pools = 0
        self.launched = self.done = 0.0
        self.fault: Exception | None = None

    def make_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return self.side

    def make_event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def make_graph(self) -> FakeGraph:
        return FakeGraph(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return self.current

    def synchronize(self, device: torch.device) -> None:
        assert device == DEVICE
        self.log.append("synchronize")

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def get_sync_debug_mode(self) -> Any:
        return self.mode

    def set_sync_debug_mode(self, debug_mode: Any) -> None:
        self.mode = debug_mode

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, cuda_graph: FakeGraph, pool: Any, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        if self.fault is not None:
            raise self.fault
        cuda_graph.memory = pool
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    def checked(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name in MADE:
                inspect.signature(REAL[name].__new__).bind(REAL[name], *arguments, **options)
            else:
                inspect.signature(REAL[name]).bind(*arguments, **options)
            return getattr(fake, MADE.get(name, name))(*arguments, **options)

        return call

    for name in REAL:
        monkeypatch.setattr(torch.cuda, name, checked(name))
    return fake


def test_a_rehearsal_is_on_the_side_stream_between_what_came_before_and_what_comes_after(
    cuda: FakeCuda,
) -> None:
    recorder = CudaRecorder(DEVICE)
    recorder.rehearse(lambda: cuda.log.append(f"work on {cuda.current.name}, {cuda.mode}"))
    assert cuda.log == ["side waits for main", "work on side, error", "main waits for side"]
    assert (cuda.current, cuda.mode) == (cuda.main, 0)


def test_a_rehearsal_that_fails_leaves_things_as_they_were(cuda: FakeCuda) -> None:
    cuda.mode = 1

    def work() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaRecorder(DEVICE).rehearse(work)
    assert (cuda.current, cuda.mode) == (cuda.main, 1)
    assert cuda.log[-1] == "main waits for side"


def test_graphs_share_their_memory_as_long_as_one_of_them_lives(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(DEVICE)
    streams: list[str] = []
    first, second = (recorder.record(lambda: streams.append(cuda.current.name)) for _ in range(2))
    assert streams == ["side", "side"] and cuda.current is cuda.main
    assert first.pool() == second.pool() == 1
    recorder.release([first])
    assert cuda.log == ["synchronize", "reset"]
    third = recorder.record(lambda: None)
    assert third.pool() == 1
    recorder.release([second, third])
    assert recorder.record(lambda: None).pool() == 2


def test_a_recording_that_fails_leaves_the_stream_it_found(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(DEVICE)
    cuda.fault = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(lambda: None)
    assert cuda.current is cuda.main
    cuda.fault = None
    assert recorder.record(lambda: None).pool() == 2  # of the first pool nothing is known


def test_times_are_of_the_device_in_seconds_and_not_waited_for(cuda: FakeCuda) -> None:
    told: list[float] = []
    times = StepTimes(marks_of(DEVICE))
    for milliseconds in (8.0, 4.0):
        with times.measured() as marks:
            cuda.launched += milliseconds
        assert isinstance(marks[0], CudaMark)
        times.tell(marks, told.append)
    assert told == [] and cuda.done == 0
    cuda.done = 8
    times.settle()
    assert told == [0.008]
    times.settle(wait=True)
    assert told == [0.008, 0.004] and cuda.done == 12
