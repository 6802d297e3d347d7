"""Which rows are finished already, and where their results lie: about 40 bytes per row, in sorted arrays.

Rows are told apart by the 16-byte digest of their key. Of two results for one key the later one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jfbatch.rows.result import PART_SCHEMA, STATUSES

RECORD = np.dtype(
    [
        ("key", "<u8", 2),
        ("content", "<u8"),
        ("line", "<u4"),
        ("status", "u1"),
        ("is_json", "u1"),
    ]
)
"""One row of the journal and of the index: key digest, first half of the content digest, ..."""


@dataclass(frozen=True, slots=True)
class Found:
    """A finished row: 8 bytes of its content digest, its status, and row `row` of source `source`."""

    content: int
    status: str
    source: int
    row: int


class FinishedRows:
    """Finished rows by key digest. Fill with `add`, in the order of writing, then ask with `find`."""

    def __init__(self) -> None:
        self._pieces: list[tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]] = []
        self._high: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def add(self, records: NDArray[Any], source: int) -> None:
        """`records`: RECORD[rows] of one source (a part), in its row order."""
        rows = np.arange(len(records), dtype=np.int32)
        self._pieces.append((records, np.full(len(records), source, np.int32), rows))

    def freeze(self) -> None:
        """Sorts what was added; `find` answers for that."""
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        if len(pieces) > 1:
            columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
            pieces = [(columns[0], columns[1], columns[2])]
        records, sources, rows = pieces.pop()
        # lexsort is stable: equal keys stay in the order of writing, and the last of each is kept.
        order = np.lexsort((records["key"][:, 1], records["key"][:, 0]))
        keys = records["key"][order]
        last = np.ones(len(order), bool)
        last[:-1] = (keys[1:] != keys[:-1]).any(axis=1)
        chosen = order[last]
        self._high, self._low = keys[last, 0].copy(), keys[last, 1].copy()
        self._content, self._status = records["content"][chosen], records["status"][chosen]
        self._sources, self._rows = sources[chosen], rows[chosen]

    def __len__(self) -> int:
        return len(self._high)

    def find(self, key: bytes) -> Found | None:
        """The finished row with this 16-byte key digest."""
        if not len(self._high):
            return None
        high, low = np.frombuffer(key, "<u8")
        at = int(np.searchsorted(self._high, high))
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                status = STATUSES[self._status[at]]
                return Found(int(self._content[at]), status, int(self._sources[at]), int(self._rows[at]))
            at += 1
        return None


def short_content(content: bytes) -> int:
    """The half of a content digest that is compared."""
    return int.from_bytes(content[:8], "little")


def records_of(part: pa.Table) -> NDArray[Any]:
    """RECORD[rows] of a part's rows. Raises ValueError on a status or digest that is none of ours."""
    records = np.zeros(len(part), RECORD)
    records["key"] = _digests(part, "_key")
    records["content"] = _digests(part, "_content")[:, 0]
    records["line"] = np.minimum(part.column("_line").to_numpy(), 2**32 - 1)
    records["status"] = [STATUSES.index(status) for status in part.column("status").to_pylist()]
    records["is_json"] = part.column("_is_json").to_numpy()
    return records


def with_identities(table: pa.Table, records: NDArray[Any]) -> pa.Table:
    """A part of the rows of a finished table and their records; the content digests are cut to 8 bytes."""
    if len(table) != len(records):
        raise ValueError(f"{len(table)} rows and {len(records)} records")
    contents = np.zeros((len(records), 2), "<u8")
    contents[:, 0] = records["content"]
    made = {
        "_key": pa.array([key.tobytes() for key in records["key"]], pa.binary(16)),
        "_content": pa.array([content.tobytes() for content in contents], pa.binary(16)),
        "_line": pa.array(records["line"].astype(np.int64)),
        "_is_json": pa.array(records["is_json"].astype(bool)),
    }
    columns = [made[name] if name in made else table.column(name) for name in PART_SCHEMA.names]
    return pa.Table.from_arrays(columns, schema=PART_SCHEMA)


def _digests(part: pa.Table, name: str) -> NDArray[np.uint64]:
    """uint64[rows, 2] of a column of 16-byte digests."""
    joined = b"".join(part.column(name).to_pylist())
    return np.frombuffer(joined, "<u8").reshape(-1, 2)
