"""OUTPUT.shards: one directory of parts for each shard, such as OUTPUT.shards/3-of-8.

Shards share nothing but the file system. Each looks at what the others were begun with before it starts,
so that two commands that do not fit together are told at once, not when the table is made.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jfbatch.errors import UsageError
from jfbatch.rows.durable import OutputLock, output_errors
from jfbatch.rows.parts import PartDirectory
from jfbatch.rows.shard import Shard, ShardBy

_SIBLING_SECONDS = 3.0  # in which another shard has removed what both are to remove
_NAME = re.compile(r"(\d+)-of-(\d+)")


@dataclass(frozen=True)
class BegunShard:
    """A shard that has been started: its directory, and the settings kept there."""

    shard: Shard
    directory: PartDirectory
    settings: Mapping[str, Any]

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """The settings that its results depend on."""
        fingerprint: Mapping[str, str] = self.settings["fingerprint"]
        return fingerprint


def shards_path(output: Path) -> Path:
    """The directory of the output's shards."""
    return output.with_name(output.name + ".shards")


def shard_path(output: Path, shard: Shard) -> Path:
    """The directory of one shard."""
    return shards_path(output) / f"{shard.number}-of-{shard.count}"


def begun_shards(output: Path) -> list[BegunShard]:
    """The shards of this output that have been started, by number. Raises OutputError."""
    base = shards_path(output)
    found = []
    with output_errors(base, "read"):
        for path in base.iterdir() if base.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            directory = PartDirectory(path)
            settings = directory.settings() if match else None
            if match is None or settings is None:
                continue  # none of ours, or a shard that is just being begun
            by: ShardBy = "pattern" if settings.get("shard_by") == get_args(ShardBy)[1] else "row"
            shard = Shard(int(match[1]), int(match[2]), by)
            found.append(BegunShard(shard, directory, settings))
    return sorted(found, key=lambda begun: begun.shard)


def check_neighbours(
    output: Path, shard: Shard | None, fingerprint: Mapping[str, str], overwrite: bool
) -> None:
    """Raises UsageError where this output was begun in a way that does not go with `shard` (None: without).

    With `overwrite`, shards are removed before a run without them, as are parts of a run without shards and
    with other settings before shards, which may differ in theirs.
    """
    if shard is None:
        if overwrite:
            _discard_shards(output)
        _refuse_shards(output)
        return
    _check_siblings(output, shard, fingerprint, overwrite)
    alone = PartDirectory(output.with_name(output.name + ".parts"))
    if not _has_parts(alone):
        return
    if not overwrite:
        raise UsageError(
            f"{output} was begun without shards: continue it without --shard, --overwrite it, or remove "
            f"{alone.path}"
        )
    if (alone.settings() or {}).get("fingerprint") != fingerprint:  # else the merge takes them in
        _discard_alone(output, alone)


def _has_parts(directory: PartDirectory) -> bool:
    return directory.path.is_dir() and bool(directory.numbered())


def _discard_alone(output: Path, alone: PartDirectory) -> None:
    """Removes parts of a run without shards; several shards may be at it. Raises UsageError if it runs."""
    latest = time.monotonic() + _SIBLING_SECONDS
    while _has_parts(alone):
        try:
            lock = OutputLock(alone.path / "lock", str(output))
        except UsageError:
            if time.monotonic() > latest:
                raise
            time.sleep(0.1)
            continue
        alone.remove()
        lock.release(remove=True)
    alone.remove_if_empty()


def _check_siblings(output: Path, shard: Shard, fingerprint: Mapping[str, str], overwrite: bool) -> None:
    for begun in begun_shards(output):
        other = begun.shard
        if (other.count, other.by) != (shard.count, shard.by):
            raise UsageError(
                f"{output} was begun in {other.count} shards by {other.by}, not {shard.count} by {shard.by}: "
                f"continue with those, or remove {shards_path(output)} (after `jfbatch merge --partial`, "
                "what is done already is kept in the table)"
            )
        if begun.fingerprint != fingerprint and other != shard and not overwrite:
            raise UsageError(
                f"shard {other} of {output} was begun with other settings: "
                f"{differing(begun.fingerprint, fingerprint)}. Give all shards the same, "
                "or --overwrite to start over"
            )


def _refuse_shards(output: Path) -> None:
    """A run without shards would do all rows again."""
    begun = begun_shards(output)
    if begun:
        raise UsageError(
            f"{output} was begun in {begun[0].shard.count} shards ({shards_path(output)}): "
            f"continue those with --shard, put them together with `jfbatch merge`, or --overwrite them"
        )


def _discard_shards(output: Path) -> None:
    for begun in begun_shards(output):
        remove_shard(begun.directory, lock_shard(output, begun.shard))
    remove_empty(output)


def lock_shard(output: Path, shard: Shard) -> OutputLock:
    """Exclusive use of one shard. Raises UsageError where it is running, OutputError."""
    return OutputLock(shard_path(output, shard) / "lock", f"shard {shard} of {output}")


def remove_shard(directory: PartDirectory, lock: OutputLock) -> None:
    """Removes a shard's parts, settings and lock. Raises OutputError."""
    directory.remove()
    lock.release(remove=True)
    directory.remove_if_empty()


def remove_empty(output: Path) -> None:
    """Removes the directory of the shards if there are none in it."""
    with contextlib.suppress(OSError):
        shards_path(output).rmdir()


def differing(other: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Which settings differ: "name (was 'x', now 'y')", with ';' between them."""
    names = [*ours, *(name for name in other if name not in ours)]
    return "; ".join(
        f"{name} (was {_shown(other.get(name))}, now {_shown(ours.get(name))})"
        for name in names
        if other.get(name) != ours.get(name)
    )


def _shown(setting: str | None) -> str:
    return "none" if setting is None else repr(setting) if len(setting) <= 60 else repr(setting[:56] + "...")
