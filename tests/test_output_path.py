"""Outputs by odd paths: links, names that are too long, what is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.run_command import Job, invoke, write_lines

REGEX = ("--regex", "[A-Z][a-z]{6,12} [a-z]{4,9}", "-q")
ROWS = [{"id": f"r{number}", "prompt": f"Who is number {number}?"} for number in range(4)]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return Job(tmp_path, tiny_model, tmp_path / "cache")


def linked(job: Job, name: str = "table.parquet") -> Path:
    """Make the output a link to a file of this name in another directory."""
    target = job.directory / "scratch" / name
    target.parent.mkdir()
    job.output.symlink_to(os.path.join("scratch", name))
    return target


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file() or path.is_symlink())


def test_a_link_at_the_output_is_followed_and_stays(job: Job) -> None:
    target = linked(job)
    assert len(job.run(ROWS[:2], *REGEX)) == 2  # the target is not there yet
    assert len(job.run(ROWS, *REGEX)) == 4  # and now it is
    assert job.output.is_symlink() and target.is_file() and not target.is_symlink()
    assert names(job.directory) == ["rows.jsonl", "table.parquet"]
    assert names(target.parent) == ["table.parquet", "table.parquet.journal"]


def test_runs_by_a_link_and_by_its_target_are_one(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    target = linked(job)
    command = ["run", str(job.input), "-o", str(target), *job.arguments(*REGEX)[4:]]
    write_lines(job.input, ROWS)
    assert invoke(*command, "--shard", "1/2") == 0
    assert job.start(None, *REGEX) == 2
    assert "was begun in 2 shards" in capsys.readouterr().err
    assert job.start(None, *REGEX, "--shard", "2/2") == 0
    assert invoke("merge", job.output, "-q") == 0
    assert job.output.is_symlink() and len(job.rows()) == 4
    assert invoke("merge", target, "-q") == 0
    assert invoke(*command) == 0


def test_a_links_name_says_the_format_where_its_targets_does_not(job: Job) -> None:
    target = linked(job, "job-17")
    assert len(job.run(ROWS[:2], *REGEX)) == 2
    assert target.read_bytes()[:4] == b"PAR1"
    assert len(job.run(ROWS, *REGEX)) == 4


@pytest.mark.parametrize("length", [247, 248, 300])
def test_a_name_that_is_too_long_for_what_lies_beside_it_is_refused_at_once(
    job: Job, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "é" * 119 + "x" * (length - 238 - len(".jsonl")) + ".jsonl"
    assert len(name.encode()) == length
    write_lines(job.input, ROWS[:1])
    output = job.directory / name
    command = ["run", job.input, "-o", output, *job.arguments(*REGEX)[4:]]
    assert invoke(*command) == (0 if length == 247 else 2)
    complaint = capsys.readouterr().err
    if length == 247:
        assert output.is_file() and output.with_name(name + ".journal").is_file()
    else:
        assert "choose a shorter name" in complaint and complaint.count("\n") == 1
        assert names(job.directory) == ["rows.jsonl"]


def test_what_is_no_file_is_not_replaced(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = job.directory / "pipe"
    os.mkfifo(pipe)
    job.output.symlink_to(pipe)
    write_lines(job.input, ROWS[:1])
    for output in (pipe, job.output):
        flags = ["-o", output, *job.arguments(*REGEX)[4:], "--output-format", "jsonl"]
        assert invoke("run", job.input, *flags) == 2
        assert "not a regular file" in capsys.readouterr().err
    for directory in (".", "/", job.directory):
        assert invoke("merge", directory) == 2
        assert "is a directory" in capsys.readouterr().err
    assert pipe.is_fifo() and job.output.is_symlink()
