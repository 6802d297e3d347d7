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

import pyarrow.parquet as pq
import pytest

from jfbatch.report import summary as written
from tests.run_command import ROOT, Job, invoke, write_lines

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


@pytest.mark.parametrize("flag", ["--summary-json", "--profile"])
def test_neither_input_nor_output_is_written_over_by_what_a_run_tells(
    job: Job, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run(ROWS[:2], *REGEX)
    source, before = job.directory / "rows.jsonl", job.output.read_bytes()
    written = source.read_bytes()
    for file in (source, job.output, job.directory):
        assert job.start(None, *REGEX, flag, file) == 2
        assert flag in capsys.readouterr().err
    assert (source.read_bytes(), job.output.read_bytes()) == (written, before)


def test_what_a_run_tells_is_no_input_of_the_next(job: Job) -> None:
    directory = job.directory / "in"
    directory.mkdir()
    write_lines(directory / "rows.jsonl", ROWS[:3])
    command = [
        "run",
        str(directory),
        *job.arguments(*REGEX, "--summary-json", directory / "summary.json")[2:],
    ]
    for _ in range(2):
        assert invoke(*command) == 0
        assert len(job.rows()) == 3


@pytest.mark.parametrize("rows", [[], ["no JSON"]])
def test_a_table_without_a_valid_row_has_its_schemas_columns_all_the_same(job: Job, rows: list[Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (job.directory / "s.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    flags = ("--schema", job.directory / "s.json")
    job.run(ROWS[:1], *flags)
    expected = pq.read_schema(job.output).field("value")
    job.run(rows, *flags, code=1 if rows else 0)
    assert pq.read_schema(job.output).field("value") == expected


def test_a_reader_of_stderr_that_goes_away_ends_nothing(job: Job) -> None:
    job.run(ROWS[:1], *REGEX)  # kernels and grammars are compiled
    command = [sys.executable, "-m", "jfbatch", *job.arguments(*REGEX)]
    command.remove("--quiet") if "--quiet" in command else command.remove("-q")
    write_lines(job.directory / "rows.jsonl", ROWS)
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(timeout=120) == 0
    assert len(job.rows()) == 12


@pytest.mark.parametrize("place", ["/dev/full", "closed"])
def test_a_log_that_cannot_be_written_ends_nothing(job: Job, place: str) -> None:
    job.run(ROWS[:1], *REGEX)
    write_lines(job.input, ROWS)
    command = [sys.executable, "-m", "jfbatch", *job.arguments(*REGEX[:-1])]
    if place == "closed":
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        assert subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode == 0
    else:
        with open(place, "w") as full:
            assert subprocess.run(command, cwd=ROOT, stderr=full, timeout=120, check=False).returncode == 0
    assert len(job.rows()) == 12


def test_standard_output_that_is_full_is_one_line_and_one_that_nobody_reads_none(job: Job) -> None:
    job.run(ROWS, *REGEX)
    show = [sys.executable, "-m", "jfbatch", "show", str(job.output)]
    check = [sys.executable, "-m", "jfbatch", "check", str(job.input), "--model", str(job.model)]
    for command in (show, check, [*check, "--json", "-"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
            )
        assert done.returncode == 74
        assert done.stderr == "jfbatch: standard output cannot be written: No space left on device\n"
    for command in (show, check):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(timeout=120) == 0


@pytest.mark.parametrize("flag", ["--regex", "--choice", "--system", "--keep", "--id-column"])
def test_settings_that_are_not_utf8_are_refused_by_name(
    job: Job, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.start(ROWS[:1], flag, "a\udcff") == 2
    complaint = capsys.readouterr().err
    assert "not UTF-8 text" in complaint and complaint.count("\n") == 1


@pytest.mark.parametrize("regex", ["(?=x)y", r"a\bb", "[^\\s\\S]"])
def test_a_regex_that_nothing_can_match_is_refused_at_the_start(
    job: Job, regex: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.start(ROWS[:1], "--regex", regex) == 2
    assert "nothing can match" in capsys.readouterr().err
    assert not job.output.exists()


def test_a_directory_where_the_journal_belongs_is_told_at_the_start(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    (job.directory / "table.parquet.journal").mkdir()
    assert job.start(ROWS[:1], *REGEX) == 2
    assert "table.parquet.journal is a directory" in capsys.readouterr().err
