"""Profiles: spans nest per thread, their own times add up, and the file is what Chrome reads."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jfbatch.errors import OutputError
from jfbatch.report.trace import Profile, Trace, outside_the_forward_pass, print_table, shares


def work(trace: Trace) -> None:
    with trace.span("step"):
        time.sleep(0.004)
        with trace.span("forward"):
            time.sleep(0.004)
            with trace.span("linear"):
                time.sleep(0.004)
        with trace.span("choose"):
            time.sleep(0.002)


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def assert_nested(spans: list[dict[str, Any]]) -> None:
    """Two spans of a thread lie apart or one inside the other."""
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        by_thread.setdefault(span["tid"], []).append((span["ts"], span["ts"] + span["dur"]))
    for places in by_thread.values():
        ends: list[float] = []
        for start, stop in sorted(places, key=lambda place: (place[0], -place[1])):
            while ends and ends[-1] <= start + 0.002:  # both are rounded to nanoseconds
                ends.pop()
            assert not ends or stop <= ends[-1] + 0.002
            ends.append(stop)


def test_own_times_of_a_thread_add_up_to_the_outermost_spans() -> None:
    trace = Trace()
    work(trace)
    work(trace)
    (lane,) = trace.lanes
    assert lane.kinds["step"].calls == 2
    assert lane.busy == pytest.approx(lane.kinds["step"].whole)
    assert lane.kinds["forward"].whole > lane.kinds["linear"].whole >= 0.008
    assert lane.kinds["forward"].own == pytest.approx(
        lane.kinds["forward"].whole - lane.kinds["linear"].whole
    )


def test_shares_add_up_to_the_time_that_passed() -> None:
    trace = Trace()
    time.sleep(0.003)
    work(trace)
    elapsed = time.perf_counter() - trace.started
    lines = shares(trace.lanes[0], elapsed)
    assert sum(line.share for line in lines) == pytest.approx(1)
    assert sum(line.seconds for line in lines) == pytest.approx(elapsed)
    assert lines[-1].seconds >= 0.003


def test_the_share_outside_the_forward_pass() -> None:
    trace = Trace()
    assert outside_the_forward_pass(trace) is None
    work(trace)
    kinds = trace.lanes[0].kinds
    expected = 1 - kinds["forward"].whole / kinds["step"].whole
    assert outside_the_forward_pass(trace) == pytest.approx(expected)
    assert 0.2 < expected < 0.8


def test_threads_have_lanes_of_their_own_and_the_file_nests(tmp_path: Path) -> None:
    trace = Trace()
    threads = [threading.Thread(target=work, args=(trace,), name=f"worker {n}") for n in range(3)]
    for thread in threads:
        thread.start()
    work(trace)
    for thread in threads:
        thread.join()
    trace.write(tmp_path / "trace.json")
    spans = spans_of(tmp_path / "trace.json")
    assert len(spans) == 4 * 4
    assert {span["tid"] for span in spans} == {0, 1, 2, 3}
    assert_nested(spans)
    named = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in named if event["ph"] == "M"} >= {"worker 0", "worker 2"}


def test_spans_beyond_the_limit_count_but_are_not_kept(tmp_path: Path) -> None:
    trace = Trace(most_events=3)
    work(trace)
    work(trace)
    trace.write(tmp_path / "trace.json")
    assert len(spans_of(tmp_path / "trace.json")) == 3
    assert trace.lanes[0].kinds["step"].calls == 2
    assert "5 later spans left out" in (tmp_path / "trace.json").read_text()


def test_a_span_that_ends_by_an_exception_is_kept() -> None:
    trace = Trace()
    with pytest.raises(ValueError, match="broken"), trace.span("step"), trace.span("forward"):
        raise ValueError("broken")
    assert set(trace.lanes[0].kinds) == {"step", "forward"}
    assert trace.lanes[0].inner == []


def test_the_table_names_every_kind() -> None:
    trace, stream = Trace(), io.StringIO()
    work(trace)
    print_table(trace, stream)
    assert all(word in stream.getvalue() for word in ("step", "forward", "linear", "choose", "outside"))
    assert "is not the forward pass" in stream.getvalue()


def test_a_profile_is_written_when_the_run_breaks(tmp_path: Path) -> None:
    def run() -> None:
        with Profile(tmp_path / "trace.json", io.StringIO()) as trace:
            work(trace)
            raise KeyError("row")

    with pytest.raises(KeyError):
        run()
    assert spans_of(tmp_path / "trace.json")


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        Trace().write(tmp_path / "missing" / "trace.json")
