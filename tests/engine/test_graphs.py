"""When steps are recorded, what frees the graphs, and what happens where recording fails."""

from __future__ import annotations

import logging

import pytest
import torch

from jfbatch.engine import graphs
from jfbatch.engine.graphs import RECORD_AT, Graphs, StepCounts
from tests.engine.recorded import WorkRecorder


class Doubling:
    """Work on tensors that stay where they are; `calls` counts how often Python did it."""

    def __init__(self) -> None:
        self.input, self.output = torch.zeros(3), torch.zeros(3)
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self.output.copy_(self.input * 2)

    def result(self, used: Graphs, size: str, value: float) -> float:
        self.input.fill_(value)
        used.run(size, self)
        return float(self.output[0])


def made(*faults: Exception | None) -> tuple[Graphs, WorkRecorder]:
    recorder = WorkRecorder(faults)
    return Graphs(recorder, StepCounts()), recorder


def test_a_size_is_recorded_once_it_has_come_up_a_few_times_and_then_replayed() -> None:
    used, recorder = made()
    work = Doubling()
    assert [work.result(used, "a", value) for value in range(7)] == [2 * value for value in range(7)]
    assert work.calls == RECORD_AT + 1  # the last of them was rehearsed and recorded
    assert (recorder.rehearsals, recorder.made[0].replays) == (1, 7 - RECORD_AT)
    counts = used.counts
    assert (counts.padded, counts.replayed, counts.recorded, counts.steps) == (RECORD_AT, 7 - RECORD_AT, 1, 7)
    assert counts.recording_seconds > 0


def test_sizes_have_graphs_of_their_own() -> None:
    used, recorder = made()
    one, other = Doubling(), Doubling()
    for value in range(6):
        assert one.result(used, "a", value) == 2 * value
        assert other.result(used, "b", value + 1) == 2 * value + 2
    assert len(recorder.made) == 2


def test_a_replay_repeats_what_was_recorded_not_what_python_would_do_now() -> None:
    used, _recorder = made()
    factor, source, target = [2.0], torch.zeros(1), torch.zeros(1)

    def work() -> None:
        target.copy_(source * factor[0])

    for value in range(RECORD_AT + 2):
        source.fill_(value)
        factor[0] = 2.0 if value < RECORD_AT else 5.0
        assert used.run("a", work) == (value >= RECORD_AT)
    assert float(target) == 2 * (RECORD_AT + 1)


def test_without_a_recorder_everything_is_done_as_it_comes() -> None:
    used, work = Graphs(None, StepCounts()), Doubling()
    assert [work.result(used, "a", value) for value in range(9)] == [2 * value for value in range(9)]
    assert (work.calls, used.counts.padded, used.active) == (9, 9, False)


def test_graphs_that_are_forgotten_are_freed_and_recorded_anew() -> None:
    used, recorder = made()
    work = Doubling()
    for value in range(6):
        work.result(used, "a", value)
    used.forget()
    assert recorder.live == []
    work.input, work.output = torch.zeros(3), torch.zeros(3)  # as when the pool has moved
    assert [work.result(used, "a", value) for value in range(6)] == [2 * value for value in range(6)]
    assert len(recorder.made) == 2 and recorder.live == recorder.made[1:]


def test_the_graph_that_was_not_used_for_longest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    used, recorder = made()
    work = Doubling()
    for size in ("a", "b", "a", "c"):
        for value in range(RECORD_AT + 1):
            assert work.result(used, size, value) == 2 * value
    assert [graph.released for graph in recorder.made] == [False, True, False]
    replays = used.counts.replayed
    work.result(used, "b", 1)
    assert used.counts.replayed == replays


def test_work_that_waits_for_the_device_is_done_once_each_time_and_said_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    used, recorder = made()
    target = torch.zeros(1)

    def work() -> None:
        target.fill_(7)
        if float(target.sum()) == 7:
            target.add_(1)

    with caplog.at_level(logging.WARNING):
        for _ in range(2 * RECORD_AT):
            target.zero_()
            assert not used.run("a", work)
            assert float(target) == 8
            used.run("b", work)
    assert [record.message for record in caplog.records] == [
        "this model's steps cannot be recorded as CUDA graphs; it runs slower "
        "(called a synchronizing CUDA operation: _local_scalar_dense)"
    ]
    assert used.given_up and not used.active and recorder.made == []


def test_where_recording_fails_the_step_is_done_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    used, recorder = made(None, RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing"))
    one, other = Doubling(), Doubling()
    with caplog.at_level(logging.WARNING):
        for value in range(6):
            assert one.result(used, "a", value) == 2 * value
            assert other.result(used, "b", value) == 2 * value
    assert used.given_up and recorder.live == []  # none is kept: one way for all steps
    assert len(caplog.records) == 1 and "(CUDA error: operation not permitted)" in caplog.text


def test_memory_that_runs_out_while_recording_is_reported_once_and_then_done_without() -> None:
    used, recorder = made(
        None,
        torch.OutOfMemoryError("CUDA out of memory"),
        _after(RuntimeError("capture failed"), torch.OutOfMemoryError("CUDA out of memory")),
    )
    work = Doubling()
    for value in range(4):
        work.result(used, "a", value)
    for value in range(RECORD_AT - 1):
        work.result(used, "b", value)
    with pytest.raises(torch.OutOfMemoryError):
        work.result(used, "b", RECORD_AT)
    assert not used.given_up
    used.forget()  # as the engine does
    assert recorder.live == []
    assert [work.result(used, "b", value) for value in range(5)] == [2 * value for value in range(5)]
    assert used.given_up


def test_memory_that_runs_out_in_a_step_is_not_taken_for_a_fault_of_recording() -> None:
    used, _recorder = made()

    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(RECORD_AT + 1):
        with pytest.raises(torch.OutOfMemoryError):
            used.run("a", work)
    assert used.active


def _after(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error
