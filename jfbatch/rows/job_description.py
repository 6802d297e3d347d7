"""What a shard leaves for the merge: the job's settings, so that `jfbatch merge OUT` needs no other argument.

The default pattern is kept itself, not its file's name, and input names are absolute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jfbatch.errors import UsageError
from jfbatch.rows.columns import Columns
from jfbatch.rows.reader import ReaderOptions
from jfbatch.rows.row import Pattern


@dataclass(frozen=True)
class JobDescription:
    """How the shards read their input, and what their table looks like."""

    inputs: tuple[str, ...]
    reader: ReaderOptions
    output_format: str | None = None
    flatten: bool = False
    arrow_dates: bool = False
    open_objects: bool = False
    any_integers: bool = False

    def columns(self, pattern: Pattern | None, reasoning: bool = False, tool_calls: bool = False) -> Columns:
        """The table's columns, `pattern` being what all rows share."""
        return Columns(
            pattern,
            self.flatten,
            self.reader.keep,
            self.arrow_dates,
            self.open_objects,
            self.any_integers,
            reasoning,
            tool_calls,
        )

    def as_json(self) -> Mapping[str, Any]:
        """The description as JSON values."""
        told = asdict(self)
        told["inputs"] = [os.path.abspath(name) for name in self.inputs]
        told["reader"]["exclude"] = [os.path.abspath(name) for name in self.reader.exclude]
        return told


def read_description(output: Path, told: Mapping[str, Any]) -> JobDescription:
    """The description back from `as_json`. Raises UsageError where it is none."""
    try:
        reader: dict[str, Any] = dict(told["reader"])
        reader["pattern"] = Pattern(**reader["pattern"]) if reader["pattern"] else None
        reader["keep"], reader["exclude"] = tuple(reader["keep"]), tuple(reader["exclude"])
        changed = {"inputs": tuple(told["inputs"]), "reader": ReaderOptions(**reader)}
        return JobDescription(**{**told, **changed})
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{output}: what its shards say of the job cannot be read: start one of them again, which "
            "writes it anew, and merge then"
        ) from None
