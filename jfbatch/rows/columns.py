"""The columns of the finished table: fixed ones, the typed value, and the kept input fields.

The Arrow schema follows from the pattern that all rows share (if they do) and the options, never from
values. Where rows have several patterns, `value` is JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence, Set
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from jfbatch.rows.column_types import ColumnType, Notes, column_type
from jfbatch.rows.json_text import MAXIMUM_DIGITS, dump, is_utf8
from jfbatch.rows.result import COUNTERS, VALUE_STATUSES, RowResult, part_table, value_json
from jfbatch.rows.row import Pattern

_BEFORE_VALUE = (("id", pa.string()), ("row", pa.int64()), ("status", pa.string()), ("text", pa.string()))
_AFTER_VALUE = (
    ("error", pa.string()),
    *((name, pa.int64()) for name in COUNTERS),
    ("backend", pa.string()),
)
FIXED = frozenset({name for name, _ in _BEFORE_VALUE + _AFTER_VALUE} | {"value"})
"""The names every table has; other columns that would clash get a prefix."""

CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))
"""Calls of tools; arguments are JSON text."""


class Columns:
    """The columns of one job's table.

    `pattern` is the one that all rows share, None where they differ. `flatten` lifts the value's top-level
    properties to columns of their own in place of `value`; a name that a fixed column has becomes
    "value.NAME". `keep` names input fields to carry along, as text: strings as they are, anything else as
    JSON; a name that another column has becomes "input.NAME". (The prefix comes again where that is taken
    too.) `arrow_dates` types date, date-time and time.
    `open_objects`: objects may have undeclared properties, and such objects are JSON text.
    `any_integers`: integers that lack a bound may be of any size, and are text.
    `reasoning` and `tool_calls`: whether there are columns for what was thought, and which tools were called.
    """

    def __init__(
        self,
        pattern: Pattern | None,
        flatten: bool = False,
        keep: Sequence[str] = (),
        arrow_dates: bool = False,
        open_objects: bool = False,
        any_integers: bool = False,
        reasoning: bool = False,
        tool_calls: bool = False,
    ) -> None:
        further = [("reasoning", pa.string())] if reasoning else []
        further += [("tool_calls", CALLS)] if tool_calls else []
        self.further = tuple(name for name, _ in further)
        fixed = FIXED | {*self.further}
        self.pattern = pattern
        self.keep = tuple(dict.fromkeys(keep))
        self.value_type: ColumnType | None = None
        if pattern is not None and pattern.kind == "schema":
            self.value_type = column_type(pattern.schema, arrow_dates, open_objects, any_integers)
        lifted = self.value_type.fields if flatten and self.value_type else ()
        columns = _unique([name for name, _ in lifted], "value.", fixed)
        self.lifted = tuple(
            (name, column, inner) for (name, inner), column in zip(lifted, columns, strict=True)
        )
        values = [(column, inner.arrow) for _, column, inner in self.lifted] or [
            ("value", self.value_type.arrow if self.value_type else pa.string())
        ]
        taken = fixed | {column for column, _ in values}
        self.kept_columns = _unique(self.keep, "input.", taken)
        self.arrow_schema = pa.schema(
            [
                *_BEFORE_VALUE,
                *further,
                *values,
                *_AFTER_VALUE,
                *((column, pa.string()) for column in self.kept_columns),
            ]
        )

    def table(self, results: Sequence[RowResult]) -> pa.Table:
        """The results as a table of `arrow_schema`, in the order given."""
        return self.finished(part_table(results))

    def finished(self, part: pa.Table) -> pa.Table:
        """The rows of a part (result.PART_SCHEMA) as a table of `arrow_schema`."""
        statuses = part.column("status").to_pylist()
        texts = part.column("text").to_pylist()
        kinds = part.column("_is_json").to_pylist()
        notes: list[Notes] = [[] for _ in statuses]
        made = self._values(statuses, texts, kinds, notes)
        if "tool_calls" in self.further:
            calls = part.column("tool_calls").to_pylist()
            made["tool_calls"] = pa.array([called and json.loads(called) for called in calls], CALLS)
        made.update(self._kept(part.column("_extra").to_pylist()))
        errors = part.column("error")
        if any(notes):
            told = zip(errors.to_pylist(), notes, strict=True)
            errors = pa.array(
                ["; ".join(filter(None, [error, *more])) or None for error, more in told], pa.string()
            )
        made["error"] = errors
        arrays = [
            made[name] if name in made else part.column(name).cast(self.arrow_schema.field(name).type)
            for name in self.arrow_schema.names
        ]
        return pa.Table.from_arrays(arrays, schema=self.arrow_schema)

    def _values(
        self, statuses: list[str], texts: list[str | None], kinds: list[bool], notes: list[Notes]
    ) -> dict[str, Any]:
        rows = list(zip(statuses, texts, kinds, strict=True))
        if self.value_type is None or self.value_type.is_json:
            # A shared regex or choice gives plain text; several patterns, or a free schema, JSON text.
            plain = self.pattern is not None and self.pattern.kind != "schema"
            values = [
                (text if status in VALUE_STATUSES else None) if plain else value_json(status, text, is_json)
                for status, text, is_json in rows
            ]
            return {"value": pa.array(values, pa.string())}
        parsed = [
            _parsed(text, note) if text is not None and is_json and status in VALUE_STATUSES else None
            for (status, text, is_json), note in zip(rows, notes, strict=True)
        ]
        converted = [self.value_type.convert(value, note) for value, note in zip(parsed, notes, strict=True)]
        if not self.lifted:
            return {"value": pa.array(converted, self.value_type.arrow)}
        return {
            column: pa.array([row and row[name] for row in converted], inner.arrow)
            for name, column, inner in self.lifted
        }

    def _kept(self, extras: list[str | None]) -> dict[str, Any]:
        if not self.keep:
            return {}
        parsed = [json.loads(extra) if extra else {} for extra in extras]
        return {
            column: pa.array([_kept_text(row.get(name)) for row in parsed], pa.string())
            for name, column in zip(self.keep, self.kept_columns, strict=True)
        }


def _unique(names: Sequence[str], prefix: str, taken: Set[str]) -> tuple[str, ...]:
    """A column for each of the (distinct) names: itself, or behind as many prefixes as make it unique."""
    used = {*taken, *names}
    columns = []
    for name in names:
        column = name
        while column in taken or (column != name and column in used):
            column = prefix + column
        used.add(column)
        columns.append(column)
    return tuple(columns)


def _parsed(text: str, notes: Notes) -> Any:
    """The value of an output's JSON, None with a note where it cannot be read."""
    try:
        return parse_output(text)
    except ValueError as error:
        notes.append(f"value: {error}; the text column has it")
        return None


def parse_output(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of an output's JSON. Numbers beyond Python's int and float become Decimal.

    `pairs` makes an object of its (key, value) pairs, as for json.loads. Raises ValueError on other text, and
    on a number beyond Decimal (1e99999999999999999999).
    """
    return json.loads(
        text, parse_int=_integer, parse_float=_float, parse_constant=_no_constant, object_pairs_hook=pairs
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _integer(text: str) -> int | Decimal:
    return int(text) if len(text) <= MAXIMUM_DIGITS else _decimal(text)


def _float(text: str) -> float | Decimal:
    value = float(text)
    return value if math.isfinite(value) else _decimal(text)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        shown = text if len(text) <= 60 else f"{text[:56]}..."
        raise ValueError(f"the number {shown} is too large to be read") from None


def _kept_text(value: Any) -> str | None:
    if value is None:
        return None
    return value if isinstance(value, str) and is_utf8(value) else dump(value)
