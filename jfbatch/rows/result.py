"""What became of a row, and how results lie in a part: one Arrow schema, whatever the rows' schemas.

A part keeps the output's text as it is; the typed columns are made from it when the table is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from jfbatch.rows.json_text import dump, printable
from jfbatch.rows.row import Row, digest

STATUSES = (
    "ok",
    "shortened",
    "invalid_input",
    "unsupported_schema",
    "prompt_too_long",
    "failed",
    "invalid",
)
"""Every status. The journal holds them by number: new ones go to the end."""

VALUE_STATUSES = frozenset({"ok", "shortened"})
"""The statuses whose text is a complete, valid output; the others have no value."""

COUNTERS = ("prompt_tokens", "completion_tokens", "sampled_tokens", "jumped_tokens", "forward_passes")

PART_SCHEMA = pa.schema(
    [
        pa.field("_key", pa.binary(16), nullable=False),
        pa.field("_content", pa.binary(16), nullable=False),
        pa.field("_line", pa.int64(), nullable=False),
        pa.field("_is_json", pa.bool_(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("reasoning", pa.string()),
        pa.field("tool_calls", pa.string()),
        pa.field("error", pa.string()),
        *(pa.field(name, pa.int64()) for name in COUNTERS),
        pa.field("backend", pa.string()),
        pa.field("_extra", pa.string()),
    ]
)
"""Columns of a part. `_key` is the digest of the row's key, `_extra` a JSON object of the kept fields,
`tool_calls` a JSON list."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """The outcome of one row.

    `text` is the output; `is_json` says whether it is a JSON document (the row had a schema) or plain text.
    `reasoning` is what the model thought before it, None where it did not; `tool_calls` the calls of tools
    in it as JSON, [{"name", "arguments"}, ...] with arguments as JSON text, None in rows without tools: text
    is then what stands around them.
    `key`, `content`, `index`, `line`, `id` and `extra` are the row's own. Counters and
    `backend`, which made the row's grammar, are None where the row never reached the engine.
    """

    key: str
    content: bytes
    index: int
    line: int
    id: str | None
    status: str
    text: str | None = None
    is_json: bool = False
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    sampled_tokens: int | None = None
    jumped_tokens: int | None = None
    forward_passes: int | None = None
    backend: str | None = None
    reasoning: str | None = None
    tool_calls: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        row: Row,
        status: str,
        text: str | None = None,
        error: str | None = None,
        backend: str | None = None,
        reasoning: str | None = None,
        tool_calls: str | None = None,
        **counters: int,
    ) -> RowResult:
        """The result of `row`; `counters` are the five counters by name."""
        if status not in STATUSES:
            raise ValueError(f"unknown status {status!r}")
        return RowResult(
            key=row.key,
            content=row.content,
            index=row.index,
            line=row.line,
            id=row.id,
            status=status,
            text=text,
            is_json=row.pattern is not None and row.pattern.kind == "schema",
            error=error,
            backend=backend,
            reasoning=reasoning,
            tool_calls=tool_calls,
            extra=row.extra,
            **counters,
        )

    @property
    def value_json(self) -> str | None:
        """The value as JSON text: the output itself, or as a JSON string; None without a valid output."""
        return value_json(self.status, self.text, self.is_json)


def value_json(status: str, text: str | None, is_json: bool) -> str | None:
    """See `RowResult.value_json`."""
    if text is None or status not in VALUE_STATUSES:
        return None
    return text if is_json else dump(text)


def part_table(results: Sequence[RowResult]) -> pa.Table:
    """The results as a table of PART_SCHEMA, in the order given."""
    columns: dict[str, list[Any]] = {
        "_key": [digest(result.key) for result in results],
        "_content": [result.content for result in results],
        "_line": [result.line for result in results],
        "_is_json": [result.is_json for result in results],
        "id": [result.id for result in results],
        "row": [result.index for result in results],
        "status": [result.status for result in results],
        "text": [_utf8(result.text) for result in results],
        "reasoning": [_utf8(result.reasoning) for result in results],
        "tool_calls": [_utf8(result.tool_calls) for result in results],
        "error": [_utf8(result.error) for result in results],
        **{name: [getattr(result, name) for result in results] for name in COUNTERS},
        "backend": [result.backend for result in results],
        "_extra": [dump(result.extra) if result.extra else None for result in results],
    }
    arrays = [pa.array(columns[name], type=PART_SCHEMA.field(name).type) for name in PART_SCHEMA.names]
    return pa.Table.from_arrays(arrays, schema=PART_SCHEMA)


def _utf8(text: str | None) -> str | None:
    return None if text is None else printable(text)
