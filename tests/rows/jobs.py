"""A pretend job over the store: rows in, results that follow from the row, as the tests need them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jfbatch.rows.columns import Columns
from jfbatch.rows.reader import ReaderOptions, read_rows
from jfbatch.rows.result import RowResult
from jfbatch.rows.row import Pattern, Row
from jfbatch.rows.store import FinishedTable, Store

PATTERN = Pattern.of_schema(
    {"type": "object", "properties": {"length": {"type": "integer"}, "echo": {"type": "string"}}}
)
KEEP = ("tag",)
SETTINGS: Mapping[str, str] = {"model": "pretend", "temperature": "0"}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(row: Row, status: str = "ok") -> RowResult:
    """What the pretend model says to a row."""
    if row.error is not None:
        return RowResult.of(row, "invalid_input", error=row.error)
    prompt = row.prompt or ""
    text = json.dumps({"length": len(prompt), "echo": prompt})
    return RowResult.of(row, status, text=text, prompt_tokens=len(prompt), forward_passes=1)


def open_store(output: Path, settings: Mapping[str, str] = SETTINGS, **options: Any) -> Store:
    return Store(output, Columns(PATTERN, keep=KEEP), settings, **options)


def run(
    source: Path,
    output: Path,
    *,
    stop_after: int | None = None,
    answer: Callable[[Row], RowResult] = answer,
    settings: Mapping[str, str] = SETTINGS,
    flush_rows: int = 3,
    **options: Any,
) -> tuple[list[str], FinishedTable | None]:
    """One start of the job. Returns the prompts that ran, in order, and the table if it was finished.

    Rows run in windows of seven and finish in reverse order, so that parts are in another order than rows.
    """
    ran: list[str] = []
    with open_store(output, settings, flush_rows=flush_rows, **options) as store:
        window: list[Row] = []

        def run_window() -> bool:
            for row in reversed(window):
                if stop_after is not None and len(ran) >= stop_after:
                    return False
                ran.append(row.prompt or row.place)
                store.add(answer(row))
            window.clear()
            return True

        for row in read_rows([str(source)], ReaderOptions(keep=KEEP, pattern=PATTERN)):
            if not store.contains(row):
                window.append(row)
            if len(window) == 7 and not run_window():
                return ran, None
        if not run_window():
            return ran, None
        return ran, store.finish()
