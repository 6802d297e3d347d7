"""From the shards of an output to its one table, with a check that no row is missing.

A store like any other, whose results lie in the directories of all shards (and in the table of an earlier
merge): the input is read once more, and of every row the result is looked up where its shard must have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jfbatch.errors import UsageError
from jfbatch.rows.columns import Columns
from jfbatch.rows.durable import OutputLock
from jfbatch.rows.finished import FinishedRows, Found, short_content
from jfbatch.rows.parts import PartDirectory
from jfbatch.rows.row import Row, digest
from jfbatch.rows.shard import Shard, ShardBy, shard_number
from jfbatch.rows.shard_directories import (
    BegunShard,
    differing,
    lock_shard,
    remove_empty,
    remove_shard,
    shard_path,
)
from jfbatch.rows.store import FinishedTable, Store

_SHOWN_PLACES = 3


@dataclass
class ShardCount:
    """What the input has for one shard: rows, those without a result, those changed since they ran."""

    shard: Shard
    state: str
    rows: int = 0
    missing: int = 0
    changed: int = 0
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line on what is missing."""
        lacking = f"{self.missing:,} of {self.rows:,} rows have no result"
        if self.changed:
            lacking += f" ({self.changed:,} were changed in the input after they ran)"
        more = ", ..." if self.missing > len(self.places) else ""
        return f"shard {self.shard} {self.state}: {lacking}: {', '.join(self.places)}{more}"


class ShardedStore(Store):
    """The results of all shards of an output. Use as a Store: ask `contains` for every row, then `finish`.

    Opening locks every shard: it raises UsageError where one is running, where the shards were cut in
    several ways, or where they were made with different settings. `fingerprint` is the one they agree on.
    """

    def __init__(
        self,
        output: Path,
        columns: Columns,
        begun: list[BegunShard],
        output_format: str | None = None,
    ) -> None:
        first = begun[0]
        self._check_alike(output, begun)
        self.count: int = first.shard.count
        self.by: ShardBy = first.shard.by
        self._shard_locks: list[OutputLock] = []
        self._of_shards: list[FinishedRows] = []
        self.counts: list[ShardCount] = []
        ignore_table = any(shard.settings.get("ignore_table") for shard in begun)
        super().__init__(
            output, columns, first.fingerprint, overwrite=ignore_table, output_format=output_format
        )
        if self._fingerprint != first.fingerprint:
            self._let_go()
            raise UsageError(
                f"{output}: its shards were made by another version of jfbatch: "
                f"{differing(first.fingerprint, self._fingerprint)}"
            )

    @staticmethod
    def _check_alike(output: Path, begun: list[BegunShard]) -> None:
        first = begun[0]
        for other in begun[1:]:
            if (other.shard.count, other.shard.by) != (first.shard.count, first.shard.by):
                raise UsageError(
                    f"{output} has shards of {first.shard.count} by {first.shard.by} and of "
                    f"{other.shard.count} by {other.shard.by}: remove those that do not belong, "
                    f"{first.directory.path} or {other.directory.path}"
                )
            if other.fingerprint != first.fingerprint:
                raise UsageError(
                    f"shard {other.shard} of {output} was made with other settings than shard {first.shard}: "
                    f"{differing(first.fingerprint, other.fingerprint)}. Run one of them again with the "
                    "other's settings and --overwrite"
                )

    def _shards(self) -> list[Shard]:
        return [Shard(number, self.count, self.by) for number in range(1, self.count + 1)]

    def _lock_output(self, overwrite: bool) -> OutputLock:
        try:
            for shard in self._shards():
                self._shard_locks.append(lock_shard(self.output, shard))
            return OutputLock(self._directory.path / "lock", str(self.output))
        except BaseException:
            self._release_shards()
            raise

    def _load(self, numbered: list[tuple[int, Path]]) -> None:
        super()._load(numbered)
        for shard in self._shards():
            directory = PartDirectory(shard_path(self.output, shard))
            found = FinishedRows()
            self._load_parts([path for _, path in directory.numbered()], found)
            found.freeze()
            self._of_shards.append(found)
            settings = directory.settings()
            state = "was not started" if settings is None else "stopped before its end"
            self.counts.append(ShardCount(shard, "was finished" if directory.is_done() else state))

    def contains(self, row: Row) -> bool:
        """Whether the row's shard has its result; counts it where not."""
        present = super().contains(row)
        count = self.counts[shard_number(row, self.count, self.by) - 1]
        count.rows += 1
        if not present:
            count.missing += 1
            count.changed += self._by_key(row) is not None
            if len(count.places) < _SHOWN_PLACES:
                count.places.append(row.place if row.id is None else f"{row.place} ({row.id[:60]})")
        return present

    def _find(self, row: Row) -> Found | None:
        """The row's result in its shard, else in the table of an earlier merge."""
        found = self._by_key(row)
        if found is not None and found.content == short_content(row.content):
            return found
        return super()._find(row)

    def _by_key(self, row: Row) -> Found | None:
        return self._of_shards[shard_number(row, self.count, self.by) - 1].find(digest(row.key))

    @property
    def continues_table(self) -> bool:
        """Whether a table of an earlier merge is there, whose rows may be in no shard."""
        return self._base is not None

    @property
    def missing(self) -> list[ShardCount]:
        """The shards that lack results for rows that were asked for."""
        return [count for count in self.counts if count.missing]

    def finish(self, columns: Columns | None = None, partial: bool = False) -> FinishedTable:
        """Writes the table and removes the shards; a `partial` table leaves them, to be continued."""
        table = super().finish(columns, partial)
        if not partial:
            for shard, lock in zip(self._shards(), self._shard_locks, strict=True):
                remove_shard(PartDirectory(shard_path(self.output, shard)), lock)
            remove_empty(self.output)
        return table

    def _let_go(self) -> None:
        super()._let_go()
        self._release_shards()

    def _release_shards(self) -> None:
        for shard, lock in zip(self._shards(), self._shard_locks, strict=False):
            directory = PartDirectory(shard_path(self.output, shard))
            lock.release(remove=directory.settings() is None)
            directory.remove_if_empty()


def settings_of_job(output: Path, begun: list[BegunShard], inputs_given: bool = False) -> Mapping[str, Any]:
    """What the shards were told of the job besides their fingerprint.

    Raises UsageError where they were told different things, as the table of one of them could lack rows of
    another. With `inputs_given` the inputs they read do not count.
    """
    first = begun[0]
    ours = _compared(first)
    for other in begun[1:]:
        theirs = _compared(other)
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if inputs_given and "inputs" in names:
            names.remove("inputs")
        if not names:
            continue
        shown = "; ".join(
            f"{name} ({_shown(ours.get(name))} and {_shown(theirs.get(name))})" for name in names
        )
        way_out = "start one of them again with the other's settings"
        if names == ["inputs"]:
            way_out = f"name the files that count: jfbatch merge {output} INPUT..."
        raise UsageError(
            f"shard {first.shard} and shard {other.shard} of {output} were started with different "
            f"settings: {shown}: {way_out}"
        )
    job: Mapping[str, Any] = first.settings.get("job") or {}
    return job


def _compared(begun: BegunShard) -> dict[str, Any]:
    """The settings of a shard's job by name, those of its reader among them."""
    job = dict(begun.settings.get("job") or {})
    reader = job.pop("reader", None)
    job.update(reader if isinstance(reader, dict) else {})
    job.pop("exclude", None)  # files of the output, which the shards may know by different paths
    return job


def _shown(setting: Any) -> str:
    return ", ".join(map(str, setting)) if isinstance(setting, list) else json.dumps(setting)
