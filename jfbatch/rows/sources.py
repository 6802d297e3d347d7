"""From the names on the command line to raw records: which files, how they are packed, one record at a time.

Everything streams. A file that breaks off gives its whole records first, then an InputError with the place.
"""

from __future__ import annotations

import csv
import errno
import glob
import io
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from jfbatch.errors import InputError, UsageError
from jfbatch.rows.json_text import printable
from jfbatch.rows.packing import TruncatedInput, open_unpacked
from jfbatch.rows.row import RowProblem

STDIN = "-"
_ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
_PACKED_SUFFIXES = (".gz", ".zst")
_PARQUET_BATCH_ROWS = 256
_PARQUET_MAGIC = b"PAR1"
_HEAD_BYTES = 256
MAXIMUM_LINE_BYTES = 1 << 30
"""A line above 1 GiB is refused as a row (and skipped without being held in memory)."""


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record: the bytes of a JSONL line, the fields of a table's row, or what is wrong with it."""

    line: int
    data: bytes | dict[str, Any] | RowProblem
    raw: bytes = field(default=b"", repr=False)


def expand(inputs: Sequence[str], exclude: Iterable[str] = ()) -> list[str]:
    """The files that the inputs name, in order: globs and directories expanded (sorted, no hidden ones).

    A directory gives the row files in it and below. `exclude` names files and directories (such as the
    output) that a glob or directory does not give. Raises UsageError where a name gives nothing.
    """
    if not inputs:
        raise UsageError("no input: name a file, a directory, a glob or - for stdin")
    excluded = {Path(name).resolve() for name in exclude}
    files: list[str] = []
    for name in inputs:
        if not name:
            raise UsageError("the name of an input is empty: name a file, a directory, a glob or - for stdin")
        if name == STDIN:
            if STDIN in files:
                raise UsageError("stdin (-) is named twice: it can be read only once")
            files.append(name)
        elif Path(name).is_dir():
            files.extend(_wanted(_files_below(Path(name)), excluded, name, "directory has no row files"))
        elif Path(name).exists():
            files.append(name)
        elif glob.has_magic(name):
            matches = [found for found in sorted(glob.glob(name, recursive=True)) if Path(found).is_file()]
            files.extend(_wanted(matches, excluded, name, "glob matches no file"))
        else:
            raise UsageError(f"{name}: no such file: check the path")
    return files


def _wanted(names: list[str], excluded: set[Path], given: str, nothing: str) -> list[str]:
    kept = [name for name in names if not excluded & {Path(name).resolve(), *Path(name).resolve().parents}]
    if not kept:
        raise UsageError(f"{given}: {nothing} (such as {', '.join(_ROW_SUFFIXES)}, also with .gz or .zst)")
    return kept


def _files_below(directory: Path) -> list[str]:
    found = []
    for path in sorted(directory.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if not hidden and path.is_file() and _unpacked_suffix(path.name) in _ROW_SUFFIXES:
            found.append(str(path))
    return found


def _unpacked_suffix(name: str) -> str:
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in _PACKED_SUFFIXES else path.suffix


def display_name(name: str) -> str:
    """How places name this input."""
    return "stdin" if name == STDIN else printable(name)


def check_file(name: str, prompts: Sequence[str], read: Sequence[str]) -> None:
    """Raises UsageError where a file cannot give rows: a table by its columns, others by how they begin.

    A table must have one of the columns `prompts`, and of those in `read`, which count, none twice.
    """
    try:
        columns = _columns(name)
        head = b"" if columns is not None else _head(name)
    except (OSError, pa.ArrowException, csv.Error, EOFError, TruncatedInput) as error:
        raise UsageError(f"{name}: cannot be read: {_words(error)}") from None
    if columns is None:
        _check_head(name, head)
        return
    if not any(column in columns for column in prompts):
        shown = ", ".join(columns[:20]) or "none"
        raise UsageError(
            f"{name}: no column {' or '.join(prompts)} (it has: {shown}): name one with --prompt-column"
        )
    twice = [column for column, count in Counter(columns).items() if count > 1 and column in read]
    if twice:
        raise UsageError(f"{name}: the column {twice[0]} stands there twice: which one counts nobody can say")


def _columns(name: str) -> list[str] | None:
    """The columns of a table; None where the file is none."""
    suffix = _unpacked_suffix(name)
    if suffix in (".csv", ".tsv"):
        with _open(name) as stream:
            columns: list[str] = next(iter(_csv_reader(name, stream)), [])
            return columns
    if suffix == ".parquet":
        with open(name, "rb") as file, pq.ParquetFile(file) as table:
            return list(table.schema_arrow.names)
    if not os.access(name, os.R_OK):
        raise PermissionError(errno.EACCES, "no permission to read it")
    return None


def _head(name: str) -> bytes:
    """The first bytes of a file of lines. A pipe can be read only once, so nothing of one."""
    if not os.path.isfile(name):
        return b""
    try:
        with _open(name) as stream:
            return stream.read(_HEAD_BYTES)
    except TruncatedInput:  # told with the place when it is read
        return b""


def _check_head(name: str, head: bytes) -> None:
    """Raises UsageError where a file of lines is another kind of file. One of few bytes may be anything."""
    if head.startswith(_PARQUET_MAGIC):
        raise UsageError(f"{name}: this is a Parquet file: give it a name that ends in .parquet")
    first = head.lstrip().split(b"\n", 1)[0].rstrip()
    if _unpacked_suffix(name) == ".json" and (first.startswith(b"[") or first == b"{"):
        what = "a JSON array" if first.startswith(b"[") else "JSON over several lines"
        program = ".[]" if first.startswith(b"[") else "."
        raise UsageError(
            f"{name}: this is {what}, and rows are lines: jq -c '{program}' {name} makes such a file"
        )


def records(name: str, columns: Sequence[str]) -> Iterator[Record]:
    """The records of one input. `columns` are the columns worth reading from a table.

    Raises InputError, after the last whole record, where the input cannot be read to its end.
    """
    shown = display_name(name)
    line = 0
    try:
        for record in _records(name, columns):
            line = record.line
            yield record
    except TruncatedInput as error:
        raise InputError(f"{shown}:{line + 1}", f"the file breaks off after line {line}: {error}") from None
    except (OSError, EOFError, pa.ArrowException) as error:
        raise InputError(f"{shown}:{line + 1}", f"cannot be read further: {_words(error)}") from None


def _words(error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())


def _open(name: str) -> BinaryIO:
    return open_unpacked(_stdin() if name == STDIN else open(name, "rb"))


def _stdin() -> BinaryIO:
    """Standard input by a reader of our own: with a thread waiting in its own, Python aborts when it ends."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except (AttributeError, OSError, io.UnsupportedOperation):  # something else stands in for it
        return sys.stdin.buffer


def _records(name: str, columns: Sequence[str]) -> Iterator[Record]:
    suffix = _unpacked_suffix(name) if name != STDIN else ""
    if suffix == ".parquet":
        yield from _parquet_records(name, columns)
        return
    with _open(name) as stream:
        if suffix in (".csv", ".tsv"):
            yield from _csv_records(name, stream, columns)
        else:
            yield from _line_records(stream)


def _line_records(stream: BinaryIO) -> Iterator[Record]:
    number = 0
    while True:
        # Lines end at \n alone: U+2028, U+0085 and a lone \r are ordinary characters of a JSON text.
        line = stream.readline(MAXIMUM_LINE_BYTES)
        if not line:
            return
        number += 1
        if len(line) >= MAXIMUM_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield Record(
                number, RowProblem(f"the line is longer than {MAXIMUM_LINE_BYTES} bytes"), line[:4096]
            )
            continue
        line = line.rstrip(b"\r\n")
        if line and not line.isspace():
            yield Record(number, line, line)


def _csv_reader(name: str, stream: BinaryIO) -> Any:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    delimiter = "\t" if _unpacked_suffix(name) == ".tsv" else ","
    lines = (line.decode("utf-8", "surrogateescape") for line in iter(stream.readline, b""))
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _csv_records(name: str, stream: BinaryIO, columns: Sequence[str]) -> Iterator[Record]:
    """Rows of a CSV file with a header; an empty cell is an absent field. `line` is where the row starts."""
    reader = _csv_reader(name, stream)
    try:
        header = next(reader, None)
    except csv.Error as error:
        raise InputError(f"{name}:1", f"the header is not CSV: {error}") from None
    if header is None:
        return
    wanted = set(columns)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Record(line, RowProblem(f"not CSV: {error}"), str(error).encode())
            continue
        if cells is None:
            return
        if not cells:
            continue
        yield Record(
            line, _csv_fields(header, cells, wanted), "\0".join(cells).encode("utf-8", "surrogateescape")
        )


def _csv_fields(header: list[str], cells: list[str], wanted: set[str]) -> dict[str, Any] | RowProblem:
    if len(cells) != len(header):
        return RowProblem(f"the row has {len(cells)} cells, the header {len(header)}")
    fields = {}
    for column, cell in zip(header, cells, strict=True):
        if column in wanted and cell != "":
            # Bytes that are not UTF-8 were kept as lone surrogates U+DC80..U+DCFF.
            if not cell.isascii() and any("\udc80" <= character <= "\udcff" for character in cell):
                return RowProblem(f"{column} is not UTF-8")
            fields[column] = cell
    return fields


def _parquet_records(name: str, columns: Sequence[str]) -> Iterator[Record]:
    """Rows of a Parquet file; `line` counts its rows from 1."""
    with open(name, "rb") as file, pq.ParquetFile(file) as table:
        present = [column for column in table.schema_arrow.names if column in set(columns)]
        number = 0
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=present):
            for fields in _python_values(batch):
                number += 1
                plain = {key: _plain(value) for key, value in fields.items() if value is not None}
                yield Record(number, plain)


def _python_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as Python has them, but for timestamps in nanoseconds, which become text. Raises ArrowInvalid."""
    for position, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
            batch = batch.set_column(position, column.name, batch.column(position).cast(pa.string()))
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError, ImportError) as error:  # a date beyond the year 9999, say
        raise pa.ArrowInvalid(str(error)) from None
    return rows


def _plain(value: Any) -> Any:
    """Text that a table has as bytes, and whole decimals, as they would stand in JSON; others as they are."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, Decimal) and value.is_finite() and value == int(value):
        return int(value)
    return value


def is_table(name: str) -> bool:
    """Whether the input's rows have columns (CSV, TSV, Parquet) and not JSON values."""
    return name != STDIN and _unpacked_suffix(name) in (".csv", ".tsv", ".parquet")
