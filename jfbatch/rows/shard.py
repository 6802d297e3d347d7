"""Shards: which rows of the input one of several processes takes, agreed on without talking.

A row goes where the hash of its key, or of what it shares with others, says; so any number of machines
that read the same input cut it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jfbatch.rows.row import Row, digest

ShardBy = Literal["row", "pattern"]
_PREFIX_CHARACTERS = 256
"""Rows count as sharing a prefix where so much of the beginning of their prompts is the same."""
_SKEW_ROWS = 1000
_SKEW = 3.0  # times as many rows as the others have on average


@dataclass(frozen=True, order=True)
class Shard:
    """Shard `number` (from 1) of `count`.

    `by`: "row" spreads rows evenly, by their key; "pattern" keeps together the rows of one pattern whose
    prompts begin with the same 256 characters.
    """

    number: int
    count: int
    by: ShardBy = "row"

    @staticmethod
    def parse(text: str, by: ShardBy = "row") -> Shard:
        """The shard that is written i/n. Raises ValueError."""
        number, count = map(int, text.split("/"))
        return Shard(number, count, by)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def takes(self, row: Row) -> bool:
        """Whether the row is this shard's."""
        return self.number == shard_number(row, self.count, self.by)

    def parts(self, count: int) -> tuple[Shard, ...]:
        """This shard cut into `count` shards of the same output, such as one for each device."""
        numbers = range(self.number, self.count * count + 1, self.count)
        return tuple(Shard(number, self.count * count, self.by) for number in numbers)


def shard_number(row: Row, count: int, by: ShardBy = "row") -> int:
    """Which of `count` shards the row belongs to, from 1."""
    told = row.key
    if by == "pattern" and row.error is None:
        pattern = row.pattern.fingerprint if row.pattern else ""
        told = f"{pattern}\0{_beginning(row)}"
    return int.from_bytes(digest(told)[8:], "little") % count + 1


def _beginning(row: Row) -> str:
    if row.prompt is not None:
        return row.prompt[:_PREFIX_CHARACTERS]
    return "\0".join(message["content"] for message in row.messages or ())[:_PREFIX_CHARACTERS]


def rows_of(shard: Shard, rows: Iterable[Row], say: Callable[[str], None]) -> Iterator[Row]:
    """The shard's rows; says so at the end where it took far more than its share."""
    read = taken = 0
    for row in rows:
        read += 1
        if shard.takes(row):
            taken += 1
            yield row
    if taken > _SKEW_ROWS and taken * (shard.count - 1) > _SKEW * (read - taken):
        say(f"shard {shard} has {taken:,} of {read:,} rows, far more than others: --shard-by row is even")
