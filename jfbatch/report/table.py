"""The first rows of an output table as text, for `jfbatch show`. This is data, so it goes to stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jfbatch.errors import UsageError
from jfbatch.report.progress import LastingConsole

# Columns that say how a row was made rather than what it says; shown only when asked for.
_COUNTERS = frozenset(
    {"row", "text", "prompt_tokens", "completion_tokens", "sampled_tokens", "jumped_tokens", "forward_passes"}
    | {"backend"}
)


def choose_columns(present: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """The columns to show, in order: those wanted, else all but the counters. `text` stands in for `value`.

    Raises UsageError on a wanted column that is not there.
    """
    if wanted is None:
        hidden = _COUNTERS if "value" in present else _COUNTERS - {"text"}
        return [name for name in present if name not in hidden]
    chosen = [name.strip() for name in wanted]
    for name in chosen:
        if name not in present:
            raise UsageError(f"no column {name!r}; the table has {', '.join(present)}")
    return chosen


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], total: int, console: Console | None = None
) -> None:
    """Print rows as a table; empty columns are left out, and a last line says how many rows there are."""
    console = console or LastingConsole(highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    shown = [name for name in columns if any(row[name] is not None for row in rows)]
    for name in shown:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in shown))
    if rows:
        console.print(table)
    console.print(f"{len(rows)} of {total:,} rows")


def _cell(value: Any) -> Text:
    # Text, not str: rich would read square brackets in a str as markup.
    if value is None:
        return Text()
    return Text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
