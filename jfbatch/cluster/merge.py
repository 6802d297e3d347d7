"""`jfbatch merge`: the shards of an output become its one table, once every row has its result."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jfbatch.errors import InputError, UsageError
from jfbatch.rows.job_description import JobDescription, read_description
from jfbatch.rows.journal import read_header, table_identity
from jfbatch.rows.merging import ShardCount, ShardedStore, settings_of_job
from jfbatch.rows.output_path import check_output, followed
from jfbatch.rows.reader import check_inputs, read_rows
from jfbatch.rows.result import VALUE_STATUSES
from jfbatch.rows.row import Pattern
from jfbatch.rows.shard_directories import begun_shards
from jfbatch.rows.store import FinishedTable

_INCOMPLETE = 1


def merge(output: Path, inputs: Sequence[str] = (), *, partial: bool = False, quiet: bool = False) -> int:
    """Put the shards of `output` together; the exit code (see docs/running.md). Raises JfbatchError.

    `inputs` replace the names that the shards were given. Where rows have no result nothing is written, the
    shards that lack them are named on stderr, and the code is 1; `partial` writes the others. An input that
    is damaged counts as partial: no shard is removed, and a table that is there already stays as it is.
    """
    check_output(output)
    output = followed(output)
    if not begun_shards(output):
        return _merged_before(output, quiet)
    merged = merge_shards(output, inputs, partial=partial)
    for count in merged.missing:
        print(f"jfbatch: {count}", file=sys.stderr)
    if merged.table is None and merged.damage is not None:
        _say(f"{output} was not written, and the shards are kept: mend the input and merge then", quiet)
        raise merged.damage
    if merged.table is None:
        print(
            f"jfbatch: {output} was not written: run those shards again (finished rows are kept) and "
            "merge then, or merge --partial",
            file=sys.stderr,
        )
        return _INCOMPLETE
    table, shards = merged.table, merged.shards
    _say(f"{table.rows:,} rows of {shards} shards: {_told(table.statuses)}", quiet)
    left_out = ", without the rows named above; the shards are kept" if merged.missing else ""
    if merged.damage is not None:
        left_out = ", as far as the input can be read; the shards are kept: mend the input and merge again"
    _say(f"{output}{left_out}", quiet)
    if merged.damage is not None:
        raise merged.damage
    return _INCOMPLETE if merged.missing else _exit_code(table.statuses)


@dataclass(frozen=True)
class Merged:
    """What came of it: the table (None where none was written), and what was wrong with the input."""

    table: FinishedTable | None
    shards: int
    missing: list[ShardCount]
    damage: InputError | None


def merge_shards(output: Path, inputs: Sequence[str] = (), *, partial: bool = False) -> Merged:
    """As `merge`, without a word. Raises JfbatchError; UsageError where there are no shards."""
    begun = begun_shards(output)
    if not begun:
        raise UsageError(f"{output} has no shards")
    job = read_description(output, settings_of_job(output, begun, bool(inputs)))
    inputs = inputs or job.inputs
    if "-" in inputs:
        raise UsageError("merge reads the input again: name the files that the shards read, not -")
    check_inputs(inputs, job.reader)
    store = ShardedStore(output, job.columns(job.reader.pattern), begun, job.output_format)
    with store:
        shared, calls_tools, damage = _look_up(store, inputs, job)
        missing = store.missing
        table = None
        # Of a damaged input nobody knows which rows follow: what is finished is not removed.
        whole = not missing and damage is None
        if whole or ((partial or not missing) and not (damage and store.continues_table)):
            columns = job.columns(shared, store.has_reasoning, calls_tools)
            table = store.finish(columns, partial=not whole)
    return Merged(table, begun[0].shard.count, missing, damage)


def _look_up(
    store: ShardedStore, inputs: Sequence[str], job: JobDescription
) -> tuple[Pattern | None, bool, InputError | None]:
    """Look every row up; the pattern that all valid rows share, whether any calls tools, what was wrong."""
    patterns: set[Pattern | None] = set()
    calls_tools = False
    damage = None
    try:
        for row in read_rows(inputs, job.reader):
            if row.error is None and len(patterns) < 2:
                patterns.add(row.pattern)
            calls_tools |= row.pattern is not None and row.pattern.kind == "tools"
            store.contains(row)
    except InputError as error:
        damage = error
    if not patterns:
        return job.reader.pattern, calls_tools, damage
    return (next(iter(patterns)) if len(patterns) == 1 else None), calls_tools, damage


def _merged_before(output: Path, quiet: bool) -> int:
    """The code for an output without shards: that of its table, if it is whole."""
    header = read_header(output.with_name(output.name + ".journal"))
    if header is None or not output.is_file() or table_identity(output) != header.table:
        there = "; a run without --shard makes its table itself" if os.path.lexists(output) else ""
        raise UsageError(f"{output} has no shards: start them with `jfbatch run ... --shard i/n`{there}")
    _say(f"{output} is one table of {header.rows:,} rows already: {_told(header.statuses)}", quiet)
    return _exit_code(header.statuses)


def _exit_code(statuses: Mapping[str, int]) -> int:
    return 0 if all(status in VALUE_STATUSES for status, count in statuses.items() if count) else 1


def _told(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {status}" for status, count in statuses.items() if count) or "none"


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr)
