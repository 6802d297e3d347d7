"""Parts: Parquet files of some finished rows each, in a directory beside the output. They are the journal.

A part is whole or absent (see durable), so a crash costs only rows that had not been committed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from jfbatch.errors import OutputError
from jfbatch.rows.durable import TEMPORARY_SUFFIX, output_errors, write_durably
from jfbatch.rows.finished import records_of
from jfbatch.rows.result import PART_SCHEMA

logger = logging.getLogger("jfbatch")

FORMAT_VERSION = 2
"""Version of parts, journal and fingerprints; another version is another fingerprint."""

_SETTINGS = "settings.json"
_DONE = "done.json"
WAITING_JOURNAL = "journal"
"""The journal of a table that is about to appear."""
_PART_NAME = re.compile(r"part-(\d+)\.parquet")


class PartDirectory:
    """The directory OUTPUT.parts: its parts by number, and the settings they were made with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clean(self) -> None:
        """Removes what a crash left half-done. Raises OutputError."""
        with output_errors(self.path):
            for leftover in [*self.path.glob(f"*{TEMPORARY_SUFFIX}"), *self.path.glob("base-*.parquet")]:
                leftover.unlink()

    def numbered(self) -> list[tuple[int, Path]]:
        """(number, path) of the parts, in the order in which they were written. Raises OutputError."""
        found = []
        with output_errors(self.path, "read"):
            for path in self.path.iterdir():
                match = _PART_NAME.fullmatch(path.name)
                if match:
                    found.append((int(match.group(1)), path))
        return sorted(found)

    def settings(self) -> dict[str, Any] | None:
        """What `write_settings` wrote, or None. A damaged file fits no settings. Raises OutputError."""
        path = self.path / _SETTINGS
        try:
            with output_errors(path, "read"):
                if not path.exists():
                    return None
                settings = json.loads(path.read_bytes())
        except ValueError:
            settings = None
        whole = isinstance(settings, dict) and isinstance(settings.get("fingerprint"), dict)
        return dict(settings) if whole else {"fingerprint": {}}

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Keeps the run's settings with its parts. Raises OutputError."""
        write_durably(self.path / _SETTINGS, json.dumps(settings, indent=1).encode())
        with output_errors(self.path):
            (self.path / _DONE).unlink(missing_ok=True)

    def write_done(self, counts: Mapping[str, Any]) -> None:
        """Marks that every row has a result, until the next start. Raises OutputError."""
        write_durably(self.path / _DONE, json.dumps(counts, indent=1).encode())

    def is_done(self) -> bool:
        """Whether the last start got to its end. Raises OutputError."""
        with output_errors(self.path, "read"):
            return (self.path / _DONE).exists()

    def write(self, name: str, table: pa.Table) -> Path:
        """Commits one table of PART_SCHEMA. Raises OutputError; then no part of that name has appeared."""
        path = self.path / name
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        write_durably(path, memoryview(sink.getvalue()))
        return path

    def remove_parts(self) -> None:
        """Removes every part, the newest first: what remains after a crash is what older runs wrote."""
        with output_errors(self.path, "remove parts in"):
            for _, path in reversed(self.numbered()):
                path.unlink()

    def remove(self) -> None:
        """Removes all of our files but the lock. Raises OutputError."""
        self.remove_parts()
        self.clean()
        with output_errors(self.path, "remove files in"):
            for name in (_SETTINGS, _DONE, WAITING_JOURNAL):
                (self.path / name).unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        """Removes the directory, unless somebody put other files there."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def part_name(number: int) -> str:
    """The file name of part `number`."""
    return f"part-{number:06d}.parquet"


# Files are opened here, as pyarrow takes no name that is not UTF-8.


def read_part(path: Path) -> pa.Table:
    """A part's rows. Raises OutputError on a damaged one."""
    try:
        return _read(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise OutputError(
            f"{path} is damaged: {reason}; run the same command again: its rows are run again"
        ) from None


@dataclass(frozen=True)
class PartContent:
    """What a whole part holds: finished.RECORD[rows], its bytes unpacked, whether any row has a reasoning."""

    records: NDArray[Any]
    bytes: int
    has_reasoning: bool


def read_content(path: Path) -> PartContent | None:
    """What a part holds; None, with a warning, where it is not whole.

    All of it is read, checksums included: a column that only the end needs would be missed there.
    """
    try:
        table = _read(path)
        reasoning = table.column("reasoning")
        return PartContent(records_of(table), table.nbytes, reasoning.null_count < len(reasoning))
    except (OSError, ValueError, pa.ArrowException) as error:
        logger.warning("%s is not a whole part (%s): its rows are run again", path, str(error)[:200])
        return None


def _read(path: Path) -> pa.Table:
    """Raises OSError, ValueError or pa.ArrowException where the file is not a whole part of this version."""
    with open(path, "rb") as stream, pq.ParquetFile(stream, page_checksum_verification=True) as file:
        if file.schema_arrow.remove_metadata() != PART_SCHEMA:
            raise pa.ArrowInvalid("not a part of this version")
        return file.read(use_threads=False)
