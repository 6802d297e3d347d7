"""Statistics, the progress line and the end summary."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from jfbatch.report.progress import Progress, format_seconds, progress_text
from jfbatch.report.statistics import RunStatistics
from jfbatch.report.summary import print_summary, summary_lines

STATISTICS = RunStatistics(
    rows_total=200,
    rows_kept=20,
    status_counts={"failed": 2, "ok": 70, "shortened": 8, "invalid_input": 20},
    prompt_tokens=12_000,
    sampled_tokens=900,
    jumped_tokens=2_100,
    forward_passes=1_500,
    patterns_compiled=3,
    patterns_loaded=4,
    patterns_failed=1,
    compile_seconds=1.25,
    prefill_seconds=10,
    decode_seconds=25,
    elapsed_seconds=40,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_derived_figures() -> None:
    assert STATISTICS.rows_done == 100
    assert STATISTICS.rows_failed == 22
    assert STATISTICS.completion_tokens == 3_000
    assert STATISTICS.jumped_share == pytest.approx(0.7)
    assert STATISTICS.rows_per_second == 2.0  # the 20 kept rows cost nothing
    assert STATISTICS.tokens_per_second == 75
    assert STATISTICS.seconds_left == 50


def test_nothing_done_divides_by_nothing() -> None:
    empty = RunStatistics()
    assert empty.jumped_share == empty.rows_per_second == empty.tokens_per_second == 0
    assert empty.seconds_left is None
    assert progress_text(empty) == "0/? rows · 0.00 rows/s · 0 tokens/s · 0% jumped"
    assert summary_lines(empty, None)


def test_progress_line_says_it_all() -> None:
    expected = "100/200 rows · 22 failed · 2.00 rows/s · 75 tokens/s · 70% jumped · 50.0 s left"
    assert progress_text(STATISTICS) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.94, "59.9 s"), (61, "1:01"), (3599.6, "1:00:00"), (7200, "2:00:00")],
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plain_lines_come_every_few_seconds_without_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        for step in range(120):  # 12 seconds, ten updates each
            clock.now = step / 10
            progress.update(STATISTICS)
    assert stream.getvalue() == f"{progress_text(STATISTICS)}\n" * 2


def test_a_terminal_gets_a_line_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    for variable in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    stream, clock = Terminal(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        for step in range(20):  # 2 seconds
            clock.now = step / 10
            progress.update(STATISTICS)
        progress.say("a [note]")
    written = stream.getvalue()
    assert 5 <= written.count("100/200 rows") <= 15
    assert "a [note]" in written
    assert "\x1b[" in written


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(quiet=True, clock=clock) as progress:
        clock.now = 100
        assert not progress.is_due()
        progress.update(STATISTICS)
        progress.say("hello")
    print_summary(STATISTICS, Path("t.parquet"), quiet=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_summary_goes_to_stderr_and_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(STATISTICS, Path("some/long directory/" + "x" * 100 + "/t.parquet"))
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in (
        "100: 70 ok, 8 shortened, 20 invalid_input, 2 failed (20 kept from an earlier start)",
        "3 compiled, 4 loaded from the cache, 1 failed",
        "3,000: 900 sampled, 2,100 jumped (70%)",
        "1,500 forward passes of the batch",
        "40.0 s: compiling 1.2 s (in the background), prefilling 10.0 s, decoding 25.0 s",
        "x" * 100 + "/t.parquet",
    ):
        assert part in captured.err
