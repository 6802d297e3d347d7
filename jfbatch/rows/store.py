"""Results that survive: parts as rows finish, one table at the end, and continuing from either.

Results are committed in completion order as parts; the table is put together in input order at the end.
For each row of the input the store remembers where its newest result lies (8 bytes), nothing else.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jfbatch.errors import OutputError, UsageError
from jfbatch.rows.assembly import ResultFiles, unpack_table, write_table
from jfbatch.rows.columns import Columns
from jfbatch.rows.durable import OutputLock, output_errors, rename
from jfbatch.rows.finished import FinishedRows, Found, short_content
from jfbatch.rows.journal import Journal, numbering, read_header, read_journal_records, table_identity
from jfbatch.rows.output_path import check_output
from jfbatch.rows.parts import (
    FORMAT_VERSION,
    WAITING_JOURNAL,
    PartDirectory,
    part_name,
    read_content,
)
from jfbatch.rows.result import STATUSES, VALUE_STATUSES, RowResult, part_table
from jfbatch.rows.row import Row, digest
from jfbatch.rows.shard import Shard
from jfbatch.rows.shard_directories import check_neighbours, differing, lock_shard, shard_path
from jfbatch.rows.tables import TableSettings, read_table, table_format

Retry = Literal["failed", "invalid", "all"]
_RETRIED: dict[str | None, frozenset[str]] = {
    None: frozenset(),
    "failed": frozenset({"failed"}),
    "invalid": frozenset({"invalid", "invalid_input", "unsupported_schema", "prompt_too_long"}),
    "all": frozenset(STATUSES) - VALUE_STATUSES,
}
_FLUSH_BYTES = 64 << 20
_MISSING = -1
_BASE = 0
"""Source 0 is the finished table that this run continues, if there is one; parts are sources from 1."""


@dataclass(frozen=True)
class FinishedTable:
    """What `Store.finish` leaves: the path, its rows, rows by status, and whether it had to be written."""

    path: Path
    rows: int
    statuses: Mapping[str, int]
    written: bool


class Store:
    """The results of one output, from opening to the finished table. A context manager.

    Use: ask `contains(row)` for every row of the input, in order; `add` the results of those it does not
    contain; `commit_if_due` now and then; `finish` when every row has one. Leaving the context commits what
    was added, and keeps the parts: the same command continues.

    Of a `shard`, only the shard's rows are asked for; `finish_shard` leaves its parts for `rows.merging`.
    `job` is kept with them: what merging needs to know besides.

    `columns` says what the table looks like; `fingerprint` names the settings that results depend on.
    Opening continues what lies there. It raises UsageError where that was made with other settings (unless
    `overwrite`: then it is discarded once the new table is whole, or at once if it is only parts), or where
    another process is at it, and OutputError (exit code 74) where the file system refuses.
    `retry` runs rows again: "failed", "invalid" (refused before they ran, or with an output that failed its
    check), "all" (every row without a valid output).
    """

    def __init__(
        self,
        output: Path,
        columns: Columns,
        fingerprint: Mapping[str, str],
        *,
        flush_rows: int = 256,
        flush_seconds: float = 15.0,
        overwrite: bool = False,
        retry: Retry | None = None,
        keep_parts: bool = False,
        output_format: str | None = None,
        shard: Shard | None = None,
        job: Mapping[str, Any] | None = None,
    ) -> None:
        self.output = output
        self._columns = columns
        self._format = table_format(output, output_format)
        kept = ", ".join(columns.keep)
        self._fingerprint = {**fingerprint, "jfbatch format": str(FORMAT_VERSION), "kept fields": kept}
        self._flush_rows, self._flush_seconds = flush_rows, flush_seconds
        self._retried = _RETRIED[retry]
        self._keep_parts = keep_parts
        self._journal_path = output.with_name(output.name + ".journal")
        self._shard, self._job = shard, job
        alone = output.with_name(output.name + ".parts")
        self._directory = PartDirectory(shard_path(output, shard) if shard else alone)
        self._asked = 0
        self._statuses: Counter[str] = Counter(dict.fromkeys(STATUSES, 0))
        self._pending: dict[int, RowResult] = {}
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._sources = array("i")
        self._rows = array("i")
        self._files = ResultFiles([output])
        self._next_number = 1
        self._finished_rows = FinishedRows()
        self._base: Journal | None = None
        self._broken = False
        self.has_reasoning = False  # whether any result says what the model thought
        check_output(output)
        self._lock = self._lock_output(overwrite)
        try:
            self._open(overwrite)
        except BaseException:
            self._let_go()
            raise

    # --- opening -------------------------------------------------------------------------------------

    def _lock_output(self, overwrite: bool) -> OutputLock:
        check_neighbours(self.output, self._shard, self._fingerprint, overwrite)
        if self._shard is not None:
            return lock_shard(self.output, self._shard)
        return OutputLock(self._directory.path / "lock", str(self.output))

    def _open(self, overwrite: bool) -> None:
        self._directory.clean()
        if self._shard is None:
            self._complete_interrupted_finish()
        numbered = self._directory.numbered()
        settings = self._directory.settings() if numbered else None
        ignore_table = bool(settings and settings.get("ignore_table"))
        if numbered and (settings is None or settings["fingerprint"] != self._fingerprint):
            if not overwrite:
                raise self._refusal(settings["fingerprint"] if settings else {})
            self._directory.remove_parts()
            numbered, settings, ignore_table = [], None, True
        if self.output.exists() and not ignore_table:
            self._base = self._matching_journal(self._journal_path)
            if self._base is None:
                ignore_table = True
                if not overwrite:
                    raise UsageError(
                        f"{self.output} exists and {self._journal_path.name} does not belong to it, so it "
                        "cannot be continued: choose another output, or --overwrite it"
                    )
            elif self._base.fingerprint != self._fingerprint:
                if not overwrite:
                    raise self._refusal(self._base.fingerprint)
                self._base, ignore_table = None, True
        self._created = int((settings or {}).get("created", time.time()))
        self._directory.write_settings(
            {
                "fingerprint": self._fingerprint,
                "ignore_table": ignore_table and self.output.exists(),
                "created": self._created,
                **({"shard_by": self._shard.by, "job": dict(self._job or {})} if self._shard else {}),
            }
        )
        self._load(numbered)

    def _complete_interrupted_finish(self) -> None:
        """After a crash between the table's rename and the end of `finish`: the parts are in the table."""
        waiting = self._directory.path / WAITING_JOURNAL
        if self._matching_journal(waiting) is None:
            return
        with output_errors(self._journal_path):
            rename(waiting, self._journal_path)
        if not self._keep_parts:
            self._directory.remove_parts()

    def _matching_journal(self, path: Path) -> Journal | None:
        header = read_header(path)
        if header is None or not self.output.exists():
            return None
        with output_errors(self.output, "read"):
            return header if table_identity(self.output) == header.table else None

    def _refusal(self, other: Mapping[str, str]) -> UsageError:
        return UsageError(
            f"{self.output} was begun with other settings: {differing(other, self._fingerprint)}. "
            "Give the same settings to continue, another output, or --overwrite to start over"
        )

    def _load(self, numbered: list[tuple[int, Path]]) -> None:
        """Learns what is finished, the oldest first: parts that are in the table, the table, newer parts."""
        in_table = self._base.parts if self._base else 0
        self._load_parts([path for number, path in numbered if number <= in_table], self._finished_rows)
        if self._base is not None:
            self.has_reasoning |= "reasoning" in self._base.further
            with self._reading_base() as records:
                self._finished_rows.add(records, _BASE)
        self._load_parts([path for number, path in numbered if number > in_table], self._finished_rows)
        self._finished_rows.freeze()
        self._next_number = max(in_table, *(number for number, _ in numbered), 0) + 1

    def _load_parts(self, paths: list[Path], into: FinishedRows) -> None:
        for path in paths:
            content = read_content(path)
            if content is not None:
                self.has_reasoning |= content.has_reasoning
                into.add(content.records, self._files.add(path, len(content.records), content.bytes))

    # --- while rows run ------------------------------------------------------------------------------

    @property
    def resumed_rows(self) -> int:
        """How many finished rows were found on opening."""
        return len(self._finished_rows)

    def contains(self, row: Row) -> bool:
        """Whether the row needs no run: finished with the same content, and not to be retried.

        Also tells the store the row's place in the table: ask for every row of the input.
        """
        self._reserve(row.index)
        self._asked += 1
        found = self._find(row)
        if found is None:
            return False
        # A row that is retried keeps its old result until the new one is committed.
        self._sources[row.index], self._rows[row.index] = found.source, found.row
        if found.status in self._retried:
            return False
        self._statuses[found.status] += 1
        return True

    def _find(self, row: Row) -> Found | None:
        """The row's newest result, if it is a result of this content."""
        found = self._finished_rows.find(digest(row.key))
        return found if found is not None and found.content == short_content(row.content) else None

    def add(self, result: RowResult) -> None:
        """Takes a result; commits when enough have come. Raises OutputError."""
        self._reserve(result.index)
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending[result.index] = result
        self._statuses[result.status] += 1
        self.has_reasoning |= result.reasoning is not None
        told = (result.text, result.reasoning, result.tool_calls, result.error)
        self._pending_bytes += sum(len(text or "") for text in told) + 200
        self._pending_bytes += sum(len(str(value)) for value in result.extra.values())
        self.commit_if_due()

    def commit_if_due(self) -> bool:
        """Commits if there are `flush_rows` results or the oldest is `flush_seconds` old."""
        if not self._pending:
            return False
        due = len(self._pending) >= self._flush_rows or self._pending_bytes >= _FLUSH_BYTES
        if not due and time.monotonic() - self._pending_since < self._flush_seconds:
            return False
        self.commit()
        return True

    def commit(self) -> None:
        """Makes everything added so far durable, as one part. Raises OutputError; then it stays pending."""
        if not self._pending:
            return
        results = [self._pending[index] for index in sorted(self._pending)]
        table = part_table(results)
        try:
            path = self._directory.write(part_name(self._next_number), table)
        except OutputError:
            self._broken = True
            raise
        source = self._files.add(path, len(table), table.nbytes)
        self._next_number += 1
        for position, result in enumerate(results):
            self._sources[result.index], self._rows[result.index] = source, position
        self._pending.clear()
        self._pending_bytes = 0

    def _reserve(self, index: int) -> None:
        missing = index + 1 - len(self._sources)
        if missing > 0:
            self._sources.extend([_MISSING] * missing)
            self._rows.extend([0] * missing)

    # --- the end -------------------------------------------------------------------------------------

    def finish_shard(self) -> FinishedTable:
        """Ends a shard: its parts stay, for merging. Raises OutputError where rows have no result."""
        self.commit()
        done = len(self._sources) - self._sources.count(_MISSING)
        self._refuse_missing(self._asked - done)
        statuses = dict(self._statuses)
        self._directory.write_done({"rows": done, "statuses": statuses})
        self._lock.release()
        return FinishedTable(self.output, done, statuses, written=False)

    def _refuse_missing(self, missing: int) -> None:
        if missing:
            raise OutputError(f"{missing} rows have no result yet: run the same command again to continue")

    def finish(self, columns: Columns | None = None, partial: bool = False) -> FinishedTable:
        """Writes the table, in the input's order, and removes the parts. It appears by one rename.

        `columns` replaces those given on opening (which pattern the rows share is known only at the end);
        `keep` must be the same. A `partial` table leaves out rows without a result. Raises OutputError where
        rows have no result or the disk refuses; the parts stay, and the same command continues.
        """
        self.commit()
        columns = columns or self._columns
        if columns.keep != self._columns.keep:
            raise ValueError("the kept fields are fixed when the store is opened")
        sources, rows = np.array(self._sources, np.int32), np.array(self._rows, np.int32)
        numbers = np.arange(len(sources), dtype=np.int64)
        if partial:
            numbers = np.flatnonzero(sources != _MISSING)
            sources, rows = sources[numbers], rows[numbers]
        self._refuse_missing(int((sources == _MISSING).sum()))
        layout = f"{self._format}\n{columns.arrow_schema.to_string()}"
        kept = dict(zip(columns.keep, columns.kept_columns, strict=True))
        header = Journal(
            self._fingerprint,
            self._format,
            kept,
            layout,
            len(sources),
            parts=self._next_number - 1,
            further=columns.further,
            numbers=numbering(numbers),
        )
        if self._base is not None and self._is_base(self._base, header, sources, rows):
            statuses = self._base.statuses
            self._end()
            return FinishedTable(self.output, len(sources), statuses, written=False)
        sources, rows = self._unpack_base(sources, rows)
        settings = TableSettings(
            columns, self._fingerprint, self._fingerprint.get("model", ""), self._created
        )
        table_path, journal_path = self._directory.path / "table.tmp", self._directory.path / "journal.tmp"
        with output_errors(self.output):
            header = write_table(
                self._files,
                (sources, rows, numbers),
                self._format,
                settings,
                header,
                table_path,
                journal_path,
            )
        self._publish()
        self._end()
        return FinishedTable(self.output, len(sources), header.statuses, written=True)

    @staticmethod
    def _is_base(base: Journal, ours: Journal, sources: NDArray[np.int32], rows: NDArray[np.int32]) -> bool:
        """Whether the table lies there already: nothing added, changed, removed or moved."""
        same = (base.rows, base.layout, base.numbers) == (ours.rows, ours.layout, ours.numbers)
        return same and bool((sources == _BASE).all()) and bool((rows == np.arange(len(rows))).all())

    def _unpack_base(
        self, sources: NDArray[np.int32], rows: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Puts the rows of the table that this run continues into parts, so that all results lie in parts."""
        from_base = sources == _BASE
        if self._base is None or not from_base.any():
            return sources, rows
        with self._reading_base() as records:
            tables = read_table(self.output, self._base.format, self._base.kept, self._base.further)
            base_sources, base_rows = unpack_table(tables, records, self._directory, self._files)
        positions = rows[from_base]
        sources[from_base], rows[from_base] = base_sources[positions], base_rows[positions]
        return sources, rows

    @contextlib.contextmanager
    def _reading_base(self) -> Iterator[NDArray[Any]]:
        """The journal's records; what is wrong with table or journal becomes an OutputError."""
        assert self._base is not None
        try:
            yield read_journal_records(self._journal_path, self._base)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise OutputError(
                f"{self.output} cannot be continued: {error}; choose another output, or --overwrite it"
            ) from error

    def _publish(self) -> None:
        """The renames. The journal waits in the parts directory for the table, so that a crash between
        them leaves either the old table and all parts, or the new table and its journal."""
        path = self._directory.path
        with output_errors(self.output):
            rename(path / "journal.tmp", path / WAITING_JOURNAL)
            rename(path / "table.tmp", self.output)
            rename(path / WAITING_JOURNAL, self._journal_path)

    def _end(self) -> None:
        if self._keep_parts:
            self._directory.clean()
            self._lock.release()
            return
        self._directory.remove()
        self._lock.release(remove=True)
        self._directory.remove_if_empty()

    # --- leaving -------------------------------------------------------------------------------------

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commits what is pending, unless the disk has just refused that, and lets the output go."""
        try:
            if not self._broken and self._lock.held:
                self.commit()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if not self._lock.held:
            return
        with contextlib.suppress(OutputError):
            if not self._directory.numbered() and not (self._directory.path / WAITING_JOURNAL).exists():
                # Nothing was begun: leave nothing that could refuse another try.
                self._directory.remove()
                self._lock.release(remove=True)
                self._directory.remove_if_empty()
        self._lock.release()
