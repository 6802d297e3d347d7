"""Steps of one size as CUDA graphs: recorded once, then replayed by one launch in place of thousands.

A graph repeats kernels on the addresses it saw, so work that is recorded reads and writes tensors that
stay where they are, and nothing it computes reaches the host. A size is recorded when it has come up a
few times; where recording fails, once, everything goes on without.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from jfbatch.engine.memory import is_out_of_memory

logger = logging.getLogger(__name__)

RECORD_AT = 2  # the time a size comes up when it is recorded: many come up once
MOST_GRAPHS = 48  # each holds a few megabytes of launches; those not used for longest go first

Work = Callable[[], None]


@dataclass
class StepCounts:
    """How a runner's steps were computed.

    eager: as tensors of the step's own shapes. padded: in fixed shapes, but launched one kernel after
    another. replayed: as graphs. `recorded` graphs were made, in `recording_seconds`, a step's time each
    included.
    """

    eager: int = 0
    padded: int = 0
    replayed: int = 0
    recorded: int = 0
    recording_seconds: float = 0.0

    @property
    def steps(self) -> int:
        """All of them."""
        return self.eager + self.padded + self.replayed

    def since(self, earlier: StepCounts) -> StepCounts:
        """What has been added to `earlier`."""
        return StepCounts(
            **{each.name: getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)}
        )


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again, on what its tensors hold now."""
        ...


class Recorder(Protocol):
    """Makes graphs."""

    def rehearse(self, work: Work) -> None:
        """Do the work as `record` will see it. Raises RuntimeError where it cannot be recorded."""
        ...

    def record(self, work: Work) -> Graph:
        """Record the work without doing it. Raises RuntimeError where that fails."""
        ...

    def release(self, graphs: Iterable[Graph]) -> None:
        """Free graphs; none is replayed again."""
        ...


class CudaRecorder:
    """CUDA graphs of one device. What they need besides their tensors lies in one pool of memory.

    Graphs may share it in any order of replay because no tensor made while recording is read after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device  # not always the current one of the thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._made: list[torch.cuda.CUDAGraph] = []

    def rehearse(self, work: Work) -> None:
        """See Recorder. On the side stream, as libraries set up their workspaces per stream.

        What waits for the device raises, as it would break the recording.
        """
        current, mode = torch.cuda.current_stream(self._device), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                torch.cuda.set_sync_debug_mode("error")
                work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)

    def record(self, work: Work) -> torch.cuda.CUDAGraph:
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        # A pool whose graphs are all gone cannot be used again: the first of new ones brings its own.
        pool = self._made[0].pool() if self._made else torch.cuda.graph_pool_handle()
        # The outer context restores the stream where ending the recording raises as well.
        with torch.cuda.stream(self._stream), torch.cuda.graph(graph, pool, self._stream):
            work()
        self._made.append(graph)
        return graph

    def release(self, graphs: Iterable[Graph]) -> None:
        """See Recorder."""
        torch.cuda.synchronize(self._device)
        gone = {id(graph) for graph in graphs}
        for graph in self._made:
            if id(graph) in gone:
                graph.reset()
        self._made = [graph for graph in self._made if id(graph) not in gone]


class Graphs:
    """The graphs of one runner, by the size of their steps.

    recorder: None where the device has no graphs; then all work is done as it comes.
    """

    def __init__(self, recorder: Recorder | None, counts: StepCounts) -> None:
        self.counts = counts
        self._recorder = recorder
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._uses: dict[Hashable, int] = {}
        self._ran_out = False
        self.given_up = False

    @property
    def active(self) -> bool:
        """Whether sizes that come up often are recorded."""
        return self._recorder is not None

    def run(self, size: Hashable, work: Work) -> bool:
        """Do the work, which is the same for equal sizes; whether by a replay.

        Raises torch.OutOfMemoryError, and whatever the work raises.
        """
        if (graph := self._graphs.get(size)) is not None:
            self._graphs.move_to_end(size)
            graph.replay()
            self.counts.replayed += 1
            return True
        self.counts.padded += 1
        self._uses[size] = self._uses.get(size, 0) + 1
        if self._recorder is None or self._uses[size] < RECORD_AT:
            work()
        else:
            self._do_and_record(self._recorder, size, work)
        return False

    def forget(self) -> None:
        """Free all graphs: what they read has moved, or memory is short."""
        self._uses.clear()
        if self._recorder is not None and self._graphs:
            self._recorder.release(self._graphs.values())
        self._graphs.clear()

    def _do_and_record(self, recorder: Recorder, size: Hashable, work: Work) -> None:
        """The rehearsal is this step; the recording is for those to come."""
        started = time.perf_counter()
        try:
            recorder.rehearse(work)
        except RuntimeError as error:
            if _ran_out_of_memory(error):
                raise
            fault = error
        else:
            self._record(recorder, size, work)
            self.counts.recording_seconds += time.perf_counter() - started
            return
        self._give_up(fault)
        work()

    def _record(self, recorder: Recorder, size: Hashable, work: Work) -> None:
        try:
            graph = recorder.record(work)
        except RuntimeError as error:
            if _ran_out_of_memory(error) and not self._ran_out:
                self._ran_out = True  # a smaller batch may leave room; should that not do, none is recorded
                raise torch.OutOfMemoryError("memory ran out while a CUDA graph was recorded") from error
            self._give_up(error)
            return
        self.counts.recorded += 1
        self._graphs[size] = graph
        if len(self._graphs) > MOST_GRAPHS:
            oldest, unused = self._graphs.popitem(last=False)
            recorder.release([unused])
            self._uses[oldest] = 0

    def _give_up(self, error: RuntimeError) -> None:
        """Record nothing more, and say so."""
        self.forget()
        self._recorder, self.given_up = None, True
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning("this model's steps cannot be recorded as CUDA graphs; it runs slower (%s)", reason)


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, is that memory ran out."""
    while error is not None:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            return True
        error = error.__context__
    return False
