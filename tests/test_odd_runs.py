"""What people do to a run: odd names, pipes, clocks that jump, the same command again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jfbatch.report import summary as written
from tests.run_command import ROOT, Job, write_lines

REGEX = ("--regex", "[A-Z][a-z]{6,12} [a-z]{4,9}", "-q")
ROWS = [{"id": f"r{number}", "prompt": f"Who is number {number}?"} for number in range(12)]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return Job(tmp_path, tiny_model, tmp_path / "cache")


def texts(job: Job) -> list[str]:
    return [row["text"] for row in job.rows()]


@pytest.mark.parametrize(
    "name",
    [
        "two words",
        "größe 東京 🎉",
        "-o",
        "a'b\"c",
        "back\\slash",
        "[a-z]*?",
        "%s {x} $HOME",
        "line\nbreak",
        "\udcff",
    ],
)
def test_any_directory_name_will_do(job: Job, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    expected = [row["text"] for row in job.run(ROWS, *REGEX)]
    odd = Job(job.directory / name, job.model, job.cache)
    odd.directory.mkdir()
    assert len(odd.run(ROWS[:6], *REGEX)) == 6
    odd.run([*ROWS, "no JSON"], *REGEX, code=1)
    assert texts(odd)[:12] == expected
    assert odd.rows()[12]["status"] == "invalid_input"
    assert capfd.readouterr() == ("", "")


def test_a_pipe_is_read_once_and_continued_like_a_file(job: Job) -> None:
    expected = [row["text"] for row in job.run(ROWS, *REGEX)]
    pipe = job.directory / "pipe"
    os.mkfifo(pipe)
    piped = Job(job.directory / "piped", job.model, job.cache)
    piped.directory.mkdir()
    for count in (5, 12, 12):
        content = "".join(json.dumps(row) + "\n" for row in ROWS[:count])
        writer = threading.Thread(target=pipe.write_text, args=(content,), daemon=True)
        writer.start()
        command = ["run", str(pipe), *piped.arguments(*REGEX)[2:]]
        done = subprocess.run(
            [sys.executable, "-m", "jfbatch", *command], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        writer.join(timeout=10)
        assert texts(piped) == expected[:count]


def test_retry_all_twice_runs_only_what_is_not_good_each_time(job: Job) -> None:
    rows: list[Any] = [*ROWS[:3], "no JSON", {"id": "late", "prompt": "x", "schema": {"type": "?"}}]
    job.run(rows, *REGEX, code=1)
    before = job.rows()
    summary = job.directory / "summary.json"
    for _ in range(2):
        job.run(None, *REGEX, "--retry", "all", "--summary-json", summary, code=1)
        assert json.loads(summary.read_text())["statistics"]["rows_kept"] == 3
        assert job.rows() == before


def test_a_clock_that_jumps_back_changes_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*REGEX, "--flush-rows", "2")
    job.run(ROWS[:6], *flags)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 10 * 365 * 86_400)
    job.run(ROWS, *flags)
    os.utime(job.output, (0, 0))
    summary = job.directory / "summary.json"
    job.run(None, *flags, "--summary-json", summary)
    assert json.loads(summary.read_text())["statistics"]["rows_kept"] == 12


def test_a_summary_that_cannot_be_written_in_the_end_leaves_the_table(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = job.directory / "summaries" / "summary.json"
    summary.parent.mkdir()
    real = written.write_summary

    def vanished(*arguments: Any, **more: Any) -> None:
        summary.parent.rmdir()
        real(*arguments, **more)

    monkeypatch.setattr(written, "write_summary", vanished)
    assert job.start(ROWS, *REGEX, "--summary-json", summary) == 74
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and str(summary) in complaint
    assert "the table is complete" in complaint
    assert len(job.rows()) == 12


def test_a_schema_file_with_a_key_twice_is_refused_by_name(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = job.directory / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {}, "a": {"type": "integer"}}}')
    assert job.start(ROWS, "--schema", schema) == 2
    assert "schema.json: not JSON: the key 'a' appears twice in one object" in capsys.readouterr().err


def test_two_starts_at_once_give_one_table(job: Job) -> None:
    expected = [row["text"] for row in job.run(ROWS, *REGEX)]
    job.output.unlink()
    (job.directory / "table.parquet.journal").unlink()
    write_lines(job.input, ROWS)
    processes = [job.process(*REGEX) for _ in range(3)]
    codes = []
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode in (0, 2), stderr
        assert process.returncode == 0 or "is being written by process" in stderr
        codes.append(process.returncode)
    assert 0 in codes
    assert texts(job) == expected
