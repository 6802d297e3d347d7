"""From results scattered over parts to one table in the input's order, in bounded memory.

The table's rows are gathered some tens of megabytes at a time; each gathering reads a part at most once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jfbatch.rows.durable import sync
from jfbatch.rows.finished import records_of, with_identities
from jfbatch.rows.journal import Journal, JournalWriter, table_identity
from jfbatch.rows.parts import PartDirectory, read_part
from jfbatch.rows.result import PART_SCHEMA, STATUSES
from jfbatch.rows.tables import TableFormat, TableSettings, open_writer

_GATHER_ROWS = 1 << 15
_GATHER_BYTES = 32 << 20


@dataclass
class ResultFiles:
    """The files that hold results, by source number, and how much lies in all of them."""

    paths: list[Path] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def add(self, path: Path, rows: int, size: int) -> int:
        """Takes a file in; its source number."""
        self.paths.append(path)
        self.rows += rows
        self.bytes += size
        return len(self.paths) - 1

    def rows_at_once(self) -> int:
        """How many rows of average size may be in memory together."""
        return min(max(_GATHER_BYTES * max(self.rows, 1) // max(self.bytes, 1), 1), _GATHER_ROWS)

    def gather(self, sources: NDArray[np.int32], rows: NDArray[np.int32]) -> pa.Table:
        """The results (sources[i], rows[i]) in that order, each part read once. Raises OutputError."""
        order = np.lexsort((rows, sources))
        starts = np.flatnonzero(np.diff(sources[order], prepend=-1))
        pieces = []
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            inside = order[start:end]
            part = read_part(self.paths[sources[inside[0]]])
            pieces.append(part.take(pa.array(rows[inside])))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        table: pa.Table = pa.concat_tables(pieces).combine_chunks().take(pa.array(back))
        return table


def unpack_table(
    tables: Iterable[pa.Table], records: NDArray[Any], directory: PartDirectory, files: ResultFiles
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Puts the rows of a finished table into parts; (source, row) of each, int32[rows] both.

    `tables` are the pieces of the table, `records` its journal. Raises ValueError where they do not fit.
    """
    sources, rows = np.empty(len(records), np.int32), np.empty(len(records), np.int32)
    start = 0
    for number, table in enumerate(tables):
        here = slice(start, start + len(table))
        part = with_identities(table, records[here])
        path = directory.write(f"base-{number:06d}.parquet", part)
        sources[here] = files.add(path, len(part), part.nbytes)
        rows[here] = np.arange(len(part))
        start += len(table)
    if start != len(records):
        raise ValueError(f"{start} rows instead of {len(records)}")
    return sources, rows


def write_table(
    files: ResultFiles,
    places: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]],
    form: TableFormat,
    settings: TableSettings,
    header: Journal,
    table_path: Path,
    journal_path: Path,
) -> Journal:
    """Streams the table and its journal to the two paths, fsynced; the journal's complete header.

    `places` says of each row of the table where its result lies, as source and row there (int32[rows]), and
    its number in the input (int64[rows]). Raises OSError, pa.ArrowException.
    """
    statuses: Counter[str] = Counter(dict.fromkeys(STATUSES, 0))
    sources, rows, numbers = places
    size = files.rows_at_once()
    with JournalWriter(journal_path) as journal:
        with open(table_path, "wb", buffering=1 << 20) as file:
            with contextlib.closing(open_writer(form, file, settings)) as writer:
                for start in range(0, len(sources), size):
                    part = files.gather(sources[start : start + size], rows[start : start + size])
                    part = _renumbered(part, numbers[start : start + size])
                    writer.write(part)
                    journal.append(records_of(part))
                    statuses.update(part.column("status").to_pylist())
            file.flush()
            sync(file.fileno())
        header = replace(header, table=table_identity(table_path), statuses=dict(statuses))
        journal.finish(header)
    return header


def _renumbered(part: pa.Table, numbers: NDArray[np.int64]) -> pa.Table:
    """The rows with their numbers of this run, which an edit of the input may have changed."""
    position = PART_SCHEMA.get_field_index("row")
    return part.set_column(position, PART_SCHEMA.field("row"), pa.array(numbers.astype(np.int64)))
