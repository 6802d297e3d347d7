"""Faults: crashes at every step, torn and damaged files, full disks, read-only places, and the lock."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jfbatch.errors import OutputError, UsageError
from jfbatch.rows import durable
from jfbatch.rows.result import RowResult
from jfbatch.rows.row import Row
from tests.rows.jobs import answer, open_store, run, write_rows

PROMPTS = [f"prompt {n}" for n in range(20)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [{"id": f"r{n}", "prompt": prompt, "tag": n} for n, prompt in enumerate(PROMPTS)]
    return write_rows(tmp_path / "in.jsonl", rows)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def echoes(output: Path) -> list[str]:
    return [value["echo"] for value in pq.read_table(output).column("value").to_pylist()]


class Crash(BaseException):
    """Stands for the death of the process: nothing after it may run or be cleaned up."""


def crash_at(monkeypatch: pytest.MonkeyPatch, name: str, count: int, after: bool) -> Callable[[], int]:
    """Makes the `count`-th call of os.NAME die, before or after its effect; gives the calls so far."""
    real = getattr(os, name)
    calls = 0

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < count:
            return real(*arguments)
        if after and calls == count:
            real(*arguments)
        raise Crash

    monkeypatch.setattr(os, name, dying)
    return lambda: calls


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("finished_before", [False, True])
def test_a_crash_at_any_write_loses_and_doubles_nothing(
    source: Path, output: Path, step: str, after: bool, finished_before: bool
) -> None:
    if finished_before:
        half = source.read_text().splitlines(keepends=True)
        source.write_text("".join(half[:10]))
        run(source, output)
        source.write_text("".join(half))
    for count in range(1, 1000):
        copy = output.parent / f"{step}{count}"
        copy.mkdir()
        for path in output.parent.iterdir():
            if path.is_file():
                shutil.copy2(path, copy)
        here = copy / output.name
        crashed = True
        with pytest.MonkeyPatch.context() as patched:
            calls = crash_at(patched, step, count, after)
            try:
                run(copy / "in.jsonl", here)
                crashed = False
            except Crash:
                pass
        if not crashed:
            assert calls() == count - 1 or not after
            break
        before = echoes(here) if here.exists() else []
        assert before in ([], PROMPTS[:10], PROMPTS)  # never a torn table
        ran, table = run(copy / "in.jsonl", here)
        assert table is not None and echoes(here) == PROMPTS
        assert len(set(ran)) == len(ran)
        if before == PROMPTS:
            assert ran == [] and not table.written
        assert not (copy / f"{output.name}.parts").exists()
    assert count >= 9


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.rows.jobs import run
step, count, source, output = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
real, calls = getattr(os, step), 0
def dying(*arguments):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
setattr(os, step, dying)
run(source, output)
"""


@pytest.mark.parametrize(
    "call", [("fsync", 3), ("replace", 3), ("fsync", 8), ("replace", 9), ("replace", 10)]
)
def test_a_killed_process_loses_and_doubles_nothing(
    source: Path, output: Path, call: tuple[str, int]
) -> None:
    step, count = call
    command = [sys.executable, "-c", KILLED, step, str(count), str(source), str(output)]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == -signal.SIGKILL
    ran, table = run(source, output)
    assert table is not None and echoes(output) == PROMPTS
    assert len(ran) < 20 or count == 3
    assert {path.name for path in output.parent.iterdir()} == {
        "in.jsonl",
        output.name,
        f"{output.name}.journal",
    }


def test_torn_temporary_files_are_ignored_and_removed(source: Path, output: Path) -> None:
    run(source, output, stop_after=9)
    parts = output.parent / "out.parquet.parts"
    for name in ("part-000099.parquet.tmp", "table.tmp", "journal.tmp", "base-000000.parquet"):
        (parts / name).write_bytes(b"PAR1 torn")
    ran, table = run(source, output)
    assert len(ran) == 11 and table is not None and echoes(output) == PROMPTS


def test_a_damaged_part_costs_only_its_rows(
    source: Path, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(source, output, stop_after=9)
    part = output.parent / "out.parquet.parts" / "part-000002.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    ran, _ = run(source, output)
    assert len(ran) == 11 + 3 and echoes(output) == PROMPTS
    assert "part-000002.parquet is not a whole part" in caplog.text


def damage(part: Path, name: str) -> None:
    """Turn over a byte of a column's data."""
    group = pq.ParquetFile(part).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    (column,) = [column for column in columns if column.path_in_schema == name]
    data = bytearray(part.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    part.write_bytes(data)


@pytest.mark.parametrize("column", ["_key", "text", "reasoning", "error", "backend", "_extra"])
def test_a_part_damaged_in_any_column_costs_only_its_rows(
    source: Path, output: Path, caplog: pytest.LogCaptureFixture, column: str
) -> None:
    run(source, output, stop_after=9)
    damage(output.parent / "out.parquet.parts" / "part-000002.parquet", column)
    ran, _ = run(source, output)
    assert len(ran) == 11 + 3 and echoes(output) == PROMPTS
    assert "part-000002.parquet is not a whole part" in caplog.text


def test_an_output_whose_name_is_not_utf8_is_continued(source: Path, tmp_path: Path) -> None:
    output = Path(os.fsdecode(os.fsencode(tmp_path) + b"/t\xff.parquet"))
    run(source, output, stop_after=9)
    ran, table = run(source, output)
    assert len(ran) == 11 and table is not None and table.rows == 20


def test_a_part_that_is_damaged_while_rows_run_is_named_and_run_again_by_the_same_command(
    source: Path, output: Path
) -> None:
    run(source, output, stop_after=9)
    part = output.parent / "out.parquet.parts" / "part-000002.parquet"

    def damaging(row: Row) -> RowResult:
        if row.index == 19:
            damage(part, "text")
        return answer(row)

    with pytest.raises(OutputError, match=r"part-000002.parquet is damaged.*run the same command") as caught:
        run(source, output, answer=damaging)
    assert caught.value.exit_code == 74
    ran, _ = run(source, output)
    assert len(ran) == 3 and echoes(output) == PROMPTS


def test_a_journal_that_lies_is_found_out(source: Path, output: Path) -> None:
    run(source, output)
    journal = output.parent / "out.parquet.journal"
    data = journal.read_bytes()
    fewer = data.replace(b'"rows": 20', b'"rows": 19')
    assert fewer != data
    for damaged in (b"", data[:50], data[:-1], data[:100] + data[101:], fewer):
        journal.write_bytes(damaged)
        with pytest.raises(UsageError, match="does not belong"):
            run(source, output)
    journal.write_bytes(data)
    assert run(source, output)[0] == []


@pytest.mark.parametrize("limit", [600, 6_500, 9_000])
def test_a_full_disk_is_one_error_and_the_same_command_continues(
    source: Path, output: Path, limit: int
) -> None:
    # A part is larger than the smallest limit, the finished table is larger than the others.
    rows = [{"id": f"r{n}", "prompt": os.urandom(60).hex(), "tag": n} for n in range(80)]
    write_rows(source, rows)
    script = f"""
        import resource
        from pathlib import Path
        from jfbatch.errors import OutputError
        from tests.rows.jobs import run
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
        try:
            run(Path({str(source)!r}), Path({str(output)!r}), flush_rows=8)
        except OutputError as error:
            print(error.exit_code, error)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert told.stderr == ""
    assert told.stdout.startswith("74 cannot write ") and "File too large" in told.stdout
    assert "run the same command again" in told.stdout and told.stdout.count("\n") == 1
    assert not output.exists()
    ran, _ = run(source, output)
    assert (len(ran) == 80) == (limit == 600)
    assert echoes(output) == [row["prompt"] for row in rows]


def test_a_vanished_directory_is_an_output_error(source: Path, output: Path) -> None:
    def vanishing(row: Row) -> RowResult:
        shutil.rmtree(output.parent / "out.parquet.parts", ignore_errors=True)
        return answer(row)

    with pytest.raises(OutputError, match="No such file or directory") as caught:
        run(source, output, answer=vanishing)
    assert caught.value.exit_code == 74
    run(source, output)
    assert echoes(output) == PROMPTS


def test_a_place_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot lock"):
        open_store(tmp_path / "file" / "out.parquet")
    with pytest.raises(OutputError, match="cannot lock"):
        open_store(Path("/proc/none/out.parquet"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_what_the_disk_refuses_is_one_error_and_the_same_command_continues(
    source: Path, output: Path, number: int
) -> None:
    def refusing(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    run(source, output, stop_after=7)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", refusing)
        with pytest.raises(OutputError, match=os.strerror(number)) as caught:
            run(source, output)
    assert caught.value.exit_code == 74 and "\n" not in str(caught.value)
    ran, _ = run(source, output)
    assert len(ran) == 13 and echoes(output) == PROMPTS


HOLDER = """
import sys, time
from pathlib import Path
from tests.rows.jobs import open_store
with open_store(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_dead(source: Path, output: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(output)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=rf"is being written by process {holder.pid} on "):
            run(source, output)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        if holder.stdout:
            holder.stdout.close()
    run(source, output)
    assert echoes(output) == PROMPTS


def test_the_lock_holds_within_one_process_too(output: Path) -> None:
    with open_store(output), pytest.raises(UsageError, match="is being written"):
        open_store(output)
    open_store(output).close()


def test_a_lock_whose_file_was_removed_by_its_last_holder_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = durable.OutputLock(path, "out")
    first.release(remove=True)
    assert not first.held
    second = durable.OutputLock(path, "out")
    with pytest.raises(UsageError):
        durable.OutputLock(path, "out")
    second.release()


def test_write_durably_leaves_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "x"
    durable.write_durably(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match="File too large"):
            durable.write_durably(path, b"new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
