"""OUTPUT.journal: which rows a finished table holds, so that the same command can add, change or retry rows.

It lies beside the table after its parts are gone: one fixed record per row, in the table's order, then the
header in JSON, which is known last. It is trusted only while it fits the table (by size, and a digest
of both ends).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import OutputError
from jfbatch.rows.durable import sync
from jfbatch.rows.finished import RECORD
from jfbatch.rows.result import STATUSES
from jfbatch.rows.tables import TableFormat

_MAGIC = b"jfbatch journal 1\n"
_END_BYTES = 1 << 16
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Journal:
    """The header: the run's settings, the table's format, kept columns and layout, its rows and statuses.

    `parts` is the number of the last part that went into it; `table` identifies the table it belongs to;
    `further` are the columns that only some tables have (columns.Columns.further). `numbers` tells rows'
    numbers in the input apart where they are not 0, 1, 2, ... (see `numbering`).
    """

    fingerprint: Mapping[str, str]
    format: TableFormat
    kept: Mapping[str, str]
    layout: str
    rows: int
    parts: int
    table: str = ""
    statuses: Mapping[str, int] = field(default_factory=dict)
    further: Sequence[str] = ()
    numbers: str = ""


def numbering(numbers: NDArray[np.int64]) -> str:
    """A digest of rows' numbers in the input, "" where no row between them is left out."""
    if np.array_equal(numbers, np.arange(len(numbers))):
        return ""
    return hashlib.blake2b(numbers.astype("<i8").tobytes(), digest_size=16).hexdigest()


def table_identity(path: Path) -> str:
    """Size and a digest of the first and last 64 KiB of a file: another table has another. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        told = hashlib.blake2b(file.read(_END_BYTES), digest_size=16)
        file.seek(max(0, size - _END_BYTES))
        told.update(file.read(_END_BYTES))
    return f"{size}-{told.hexdigest()}"


class JournalWriter:
    """Writes a journal as a stream; whole once `finish` has returned. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(_MAGIC)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, records: NDArray[Any]) -> None:
        """The next rows: finished.RECORD[rows]."""
        self._file.write(records.tobytes())

    def finish(self, header: Journal) -> None:
        """The header, and fsync."""
        told = json.dumps(asdict(header)).encode()
        self._file.write(told + _LENGTH.pack(len(told)))
        self._file.flush()
        sync(self._file.fileno())


def read_header(path: Path) -> Journal | None:
    """The header, or None where there is no journal or it is not a whole one of this version."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(_MAGIC)) != _MAGIC or size < len(_MAGIC) + _LENGTH.size:
                return None
            file.seek(size - _LENGTH.size)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            start = size - _LENGTH.size - length
            if start < len(_MAGIC):
                return None
            file.seek(start)
            header = Journal(**json.loads(file.read(length)))
            whole = start == len(_MAGIC) + header.rows * RECORD.itemsize
            return header if whole and header.format in get_args(TableFormat) else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}") from None


def read_journal_records(path: Path, header: Journal) -> NDArray[Any]:
    """RECORD[rows] of a journal whose header has been read. Raises OSError, or ValueError on damage."""
    records = np.fromfile(path, RECORD, count=header.rows, offset=len(_MAGIC))
    if len(records) != header.rows or (len(records) and int(records["status"].max()) >= len(STATUSES)):
        raise ValueError(f"{path} is damaged")
    return records
