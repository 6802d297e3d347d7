"""Runs on disks that fill up, cannot be written or go away: mounted for the test, where that is permitted."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run_command import Job, wait_until, write_lines

pytestmark = pytest.mark.slow

REGEX = ("--regex", "[A-Z][a-z]{6,12} [a-z]{4,9}")
ROWS = [{"id": f"r{number}", "prompt": f"Who is number {number}?"} for number in range(24)]


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory to mount something on; whatever is mounted there goes afterwards."""
    directory = tmp_path / "place"
    directory.mkdir()
    yield directory
    while str(directory) in Path("/proc/self/mounts").read_text():
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def job(place: Path, tiny_model: Path, tmp_path: Path) -> Job:
    return Job(place, tiny_model, tmp_path / "cache")


@pytest.fixture
def expected(tiny_model: Path, tmp_path: Path) -> list[str]:
    """What an undisturbed run writes; it also fills the cache."""
    (tmp_path / "undisturbed").mkdir()
    rows = Job(tmp_path / "undisturbed", tiny_model, tmp_path / "cache").run(ROWS, *REGEX, "-q")
    return [row["text"] for row in rows]


def assert_one_error(stderr: str, *words: str) -> None:
    complaint = stderr.splitlines()[-1]
    assert complaint.startswith("jfbatch: ") and "Traceback" not in stderr
    assert all(word in complaint for word in words), complaint


def assert_continues(job: Job, expected: list[str], at_least_kept: int, *flags: str | Path) -> None:
    summary = job.cache / "summary.json"
    rows = job.run(None, *flags, "--summary-json", summary)
    assert json.loads(summary.read_text())["statistics"]["rows_kept"] >= at_least_kept
    assert [row["text"] for row in rows] == expected


def test_a_disk_that_fills_up_is_exit_code_74_and_room_is_all_that_it_takes(
    job: Job, expected: list[str]
) -> None:
    mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", job.directory)
    notes = [os.urandom(100 if number < 12 else 8000).hex() for number in range(len(ROWS))]
    source = write_lines(
        job.cache / "rows.jsonl", [{**row, "note": note} for row, note in zip(ROWS, notes, strict=True)]
    )
    flags = (*REGEX, "-q", "--flush-rows", "3", "--batch-size", "3", "--keep", "note")
    job.input.symlink_to(source)
    process = job.process(*flags)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 74, stderr
    assert_one_error(stderr, str(job.directory), "No space left on device", "run the same command again")
    assert not job.output.exists()
    parts = {path.name: path.read_bytes() for path in job.parts.glob("part-*.parquet")}
    assert len(parts) >= 4
    mount("-o", "remount,size=8m", job.directory)
    assert_continues(job, expected, 3 * len(parts), *flags)
    assert [row["note"] for row in job.rows()] == notes


def test_a_read_only_disk_is_exit_code_74_and_is_left_as_it_was(
    job: Job, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mount("-t", "tmpfs", "tmpfs", job.directory)
    flags = (*REGEX, "-q")
    write_lines(job.input, ROWS)
    mount("-o", "remount,ro", job.directory)
    assert job.start(None, *flags) == 74
    assert_one_error(capsys.readouterr().err, str(job.parts), "Read-only file system")
    assert [path.name for path in job.directory.iterdir()] == ["rows.jsonl"]
    mount("-o", "remount,rw", job.directory)
    assert_continues(job, expected, 0, *flags)
    mount("-o", "remount,ro", job.directory)  # a finished table that nobody may touch
    assert job.start(None, *flags) == 74
    assert [row["text"] for row in job.rows()] == expected


def test_a_mount_that_goes_away_is_exit_code_74_and_its_parts_are_intact(
    job: Job, expected: list[str], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("--bind", disk, job.directory)
    write_lines(job.input, ROWS)
    flags = (*REGEX, "-q", "--flush-rows", "1", "--batch-size", "1", "--drafts", "off", "--jump", "off")
    process = job.process(*flags)
    try:
        wait_until(lambda: len(list(job.parts.glob("part-*.parquet"))) >= 2 or process.poll() is not None)
        subprocess.run(["umount", "--lazy", str(job.directory)], check=True)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 74, stderr
    assert_one_error(stderr, str(job.directory))
    assert list(job.directory.iterdir()) == []  # nothing is written to what lies below the mount
    parts = list((disk / "table.parquet.parts").glob("part-*.parquet"))
    assert len(parts) >= 2
    mount("--bind", disk, job.directory)
    assert_continues(job, expected, len(parts), *flags)
