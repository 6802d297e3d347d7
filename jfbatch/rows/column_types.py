"""JSON Schema -> Arrow type, with the conversion of parsed JSON values that goes with it.

The type follows from the schema alone, never from values, so an all-null column has its type and every
table of one job has the same. What Arrow cannot type (recursion, free objects, mixed unions) is JSON text.

The rules:
* an object with declared properties and nothing else allowed is a struct, in the schema's order; an object
  that may have other keys (patternProperties, additionalProperties true or a schema, required names that
  are not declared, combinators that bring properties) is JSON text;
* what has keywords beside a `$ref` or a combinator that may say more than bounds, and an array of numbers,
  objects or arrays with subschemas besides those of its items, is JSON text;
* an integer is int64; where a bound, an enum value or the step it must be a multiple of lies outside int64
  it is decimal128(38, 0), and text where one has more than 38 digits. The grammar holds a side without a
  bound to that type, so that no value is lost; where it does not (`any_integers`), an integer that lacks a
  bound is text;
* a number is double; a mix of integers and numbers too, but an enum of both with an integer beyond 2**53 is
  JSON text;
* a value that its column cannot hold becomes null, and the row's `error` says so; `text` has it exactly.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from jfbatch.rows.column_keywords import (
    BESIDE_ITEMS,
    COMBINATORS,
    DYNAMIC,
    FAR_REACHING,
    NEGATING,
    all_integer_bounds,
    finite,
    integer_bounds,
    integer_step,
    is_closed,
    is_only_null,
    keeps_type_of_target,
    listed,
)
from jfbatch.rows.json_text import dump, is_utf8

Notes = list[str]
Convert = Callable[[Any, Notes], Any]
Within = tuple[dict[str, Any], ...]

MAXIMUM_DEPTH = 24
MAXIMUM_LEAVES = 2000
"""A schema nested deeper, or spread wider, than these becomes JSON text from there on."""

_INT64 = range(-(2**63), 2**63)
_DECIMAL_LIMIT = 10**38

_EXACT_IN_DOUBLE = 2**53


@dataclass(frozen=True)
class ColumnType:
    """An Arrow type and `convert(value, notes)`, which gives what pyarrow takes for it.

    `is_json` marks JSON text. `fields` are a struct's children by name.
    """

    arrow: pa.DataType
    convert: Convert
    is_json: bool = False
    fields: tuple[tuple[str, ColumnType], ...] = ()


class _DoesNotFit(Exception):
    """A value that its type cannot hold; the text says which type."""


def column_type(
    schema: Any,
    arrow_dates: bool = False,
    open_objects: bool = False,
    any_integers: bool = False,
    path: str = "value",
) -> ColumnType:
    """The type for a JSON Schema (an object, or true/false). `path` names the column in notes.

    `open_objects`: an object without additionalProperties may have other keys than the declared ones.
    `any_integers`: an integer that lacks a bound may be of any size.
    """
    return _Builder(schema, arrow_dates, open_objects, any_integers).build(schema, path, 0, ())


def json_type() -> ColumnType:
    """JSON text."""
    return ColumnType(pa.string(), lambda value, notes: None if value is None else dump(value), is_json=True)


class _Builder:
    def __init__(self, root: Any, arrow_dates: bool, open_objects: bool, any_integers: bool) -> None:
        self._root = root
        self._any_integers = any_integers
        self._open = open_objects
        self._dates = arrow_dates
        self._leaves = 0

    def build(self, schema: Any, path: str, depth: int, within: Within) -> ColumnType:
        """`within` are the schemas on the way here: meeting one again is recursion."""
        self._leaves += 1
        if not isinstance(schema, dict) or depth > MAXIMUM_DEPTH or self._leaves > MAXIMUM_LEAVES:
            return json_type()
        if any(schema is outer for outer in within):
            return json_type()
        within = (*within, schema)
        if DYNAMIC & schema.keys():
            return json_type()
        if "$ref" in schema:
            target = self._resolve(schema["$ref"])
            keeps_type = isinstance(target, dict) and keeps_type_of_target(schema, target)
            return self.build(target, path, depth, within) if keeps_type else json_type()
        if "const" in schema:
            return self._of_values([schema["const"]], path, depth)
        if isinstance(schema.get("enum"), list):
            return self._of_values(schema["enum"], path, depth)
        names = schema.get("type")
        if names is None:
            return self._untyped(schema, path, depth, within)
        kinds = (
            {names} if isinstance(names, str) else set(map(str, names)) if isinstance(names, list) else set()
        )
        if len(kinds) > 1:
            kinds.discard("null")
        if kinds == {"integer", "number"}:
            kinds = {"number"}
        return self._of_kind(schema, kinds.pop(), path, depth, within) if len(kinds) == 1 else json_type()

    def _resolve(self, reference: Any) -> Any:
        """The schema that a local JSON pointer names, or None."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target = self._root
        for part in unquote(reference[1:]).split("/")[1:] if reference != "#" else ():
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part.isdigit() and int(part) < len(target):
                target = target[int(part)]
            else:
                return None
        return target if reference == "#" or reference.startswith("#/") else None

    def _untyped(self, schema: dict[str, Any], path: str, depth: int, within: Within) -> ColumnType:
        """A schema without type: one branch of a combinator, or what its keywords speak of."""
        combinators = [name for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)]
        if len(combinators) == 1 and not (schema.keys() - {combinators[0]}) & FAR_REACHING:
            branches = schema[combinators[0]]
            if combinators[0] == "allOf" and len(branches) != 1:
                return json_type()
            types = [
                self.build(branch, path, depth, within) for branch in branches if not is_only_null(branch)
            ]
            return _one_type(types)
        return json_type()

    def _of_kind(
        self, schema: dict[str, Any], kind: str, path: str, depth: int, within: Within
    ) -> ColumnType:
        if kind == "object":
            return self._object(schema, path, depth, within)
        if kind == "array":
            return self._array(schema, path, depth, within)
        if kind == "string":
            return _string(schema.get("format") if self._dates else None, path)
        if kind == "integer":
            return self._integer(within, path)
        scalars = {"number": _NUMBER, "boolean": _BOOLEAN, "null": _NULL}
        return _scalar(*scalars[kind], path) if kind in scalars else json_type()

    def _integer(self, within: Within, path: str) -> ColumnType:
        """The type of an integer with what it names, and what the schemas around it and joined to it do."""
        named: list[int] = []
        bounds: list[tuple[int | None, int | None]] = []
        loose: list[int] = []  # bounds, also those that a tighter one covers
        steps = [1]
        seen: set[int] = set()
        stack: list[Any] = list(within)
        is_known, is_negated = True, False
        while stack:
            schema = stack.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            bounds.append(integer_bounds(schema))
            loose += chain(*all_integer_bounds(schema))
            values = [finite(value) for value in (*listed(schema.get("enum")), schema.get("const"))]
            named += [math.floor(value) for value in values if value is not None]
            steps += integer_step(schema.get("multipleOf"))
            target = self._resolve(schema.get("$ref"))
            is_known &= not DYNAMIC & schema.keys() and ("$ref" not in schema or target is not None)
            is_negated |= bool(NEGATING & schema.keys())
            stack.append(target)
            for name in COMBINATORS:
                inner = schema.get(name)
                stack += inner.values() if name == "dependentSchemas" and isinstance(inner, dict) else ()
                stack += inner if isinstance(inner, list) else [inner]
        if not is_known or (self._any_integers and None in integer_bounds(within[-1])):
            return _scalar(*_EXACT_INTEGER, path)
        step = math.lcm(*steps)
        for low, high in bounds:  # with the multiples that they leave nearest to 0
            named += [] if low is None else [low, max(0, -(-low // step) * step)]
            named += [] if high is None else [high, min(0, high // step * step)]
        if is_negated:  # which allows the integers on the other side of a bound
            named += [value + beside for value in (*named, *loose) for beside in (-1, 1)]
        return _integer([*named, step], path)

    def _object(self, schema: dict[str, Any], path: str, depth: int, within: Within) -> ColumnType:
        properties = schema.get("properties")
        if (
            not isinstance(properties, dict)
            or not properties
            or not is_closed(schema, properties, self._open)
        ):
            return json_type()
        fields = []
        for name, inner in properties.items():
            if inner is False:
                continue
            if not is_utf8(name):
                return json_type()
            fields.append((name, self.build(inner, f"{path}.{name}", depth + 1, within)))
        return _struct(tuple(fields), path) if fields else json_type()

    def _array(self, schema: dict[str, Any], path: str, depth: int, within: Within) -> ColumnType:
        items = schema.get("items")
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else None
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        if first and items is None:
            return json_type()
        allowed = [*(first or ()), *(() if items is False else (items,))]
        if not allowed or any(item is None or item is True for item in allowed):
            return json_type()
        inner = _one_type([self.build(item, f"{path}[]", depth + 1, within) for item in allowed])
        if inner.is_json and len(allowed) > 1:
            return json_type()
        if BESIDE_ITEMS & schema.keys() and inner.arrow not in (pa.string(), pa.bool_()):
            return json_type()
        return _list(inner, path)

    def _of_values(self, values: list[Any], path: str, depth: int) -> ColumnType:
        """The type of an enum's or a const's values; nulls apart."""
        kinds = {type(value) for value in values if value is not None}
        if not kinds:
            return _scalar(*_NULL, path) if values else json_type()
        if kinds == {int}:
            return _integer([value for value in values if value is not None], path)
        if kinds <= {int, float}:
            is_exact = all(type(value) is not int or abs(value) <= _EXACT_IN_DOUBLE for value in values)
            return _scalar(*_NUMBER, path) if is_exact else json_type()
        if kinds == {bool}:
            return _scalar(*_BOOLEAN, path)
        return _string(None, path) if kinds == {str} else json_type()


def _one_type(types: list[ColumnType]) -> ColumnType:
    """The type that all branches share (double for integers and numbers together); else JSON text."""
    if not types:
        return json_type()
    first = types[0]
    if all(other.arrow.equals(first.arrow) and other.is_json == first.is_json for other in types):
        return first
    doubles = [other for other in types if other.arrow == pa.float64()]
    if doubles and all(other.arrow in (pa.float64(), pa.int64()) for other in types):
        return doubles[0]
    return json_type()


def _scalar(arrow: pa.DataType, convert: Callable[[Any], Any], path: str) -> ColumnType:
    def converted(value: Any, notes: Notes) -> Any:
        if value is None:
            return None
        try:
            return convert(value)
        except (_DoesNotFit, ValueError, OverflowError, ArithmeticError):
            shown = dump(value)
            shown = shown if len(shown) <= 60 else f"{shown[:56]}..."
            notes.append(f"{path}: {shown} does not fit {arrow}; the text column has it")
            return None

    return ColumnType(arrow, converted)


def _to_integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _DoesNotFit
    # 1e999999999 is short to write and endless to convert.
    if (isinstance(value, Decimal) and value.adjusted() > 100_000) or value != int(value):
        raise _DoesNotFit
    return int(value)


def _to_int64(value: Any) -> int:
    integer = _to_integer(value)
    if integer not in _INT64:
        raise _DoesNotFit
    return integer


def _to_decimal(value: Any) -> Decimal:
    integer = _to_integer(value)
    if not -_DECIMAL_LIMIT < integer < _DECIMAL_LIMIT:
        raise _DoesNotFit
    return Decimal(integer)


def _to_double(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _DoesNotFit
    number = float(value)
    if not math.isfinite(number):
        raise _DoesNotFit
    return number


def _to_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _DoesNotFit
    return value


def _to_null(value: Any) -> None:
    raise _DoesNotFit


def _to_string(value: Any) -> str:
    if not isinstance(value, str) or not is_utf8(value):
        raise _DoesNotFit
    return value


_NUMBER = (pa.float64(), _to_double)
_BOOLEAN = (pa.bool_(), _to_boolean)
_NULL = (pa.null(), _to_null)
_EXACT_INTEGER = (pa.string(), lambda value: str(_to_integer(value)))


def _integer(named: list[int], path: str) -> ColumnType:
    beyond = [value for value in named if value not in _INT64]
    if not beyond:
        return _scalar(pa.int64(), _to_int64, path)
    if all(-_DECIMAL_LIMIT < value < _DECIMAL_LIMIT for value in beyond):
        return _scalar(pa.decimal128(38, 0), _to_decimal, path)
    return _scalar(*_EXACT_INTEGER, path)


def _string(form: Any, path: str) -> ColumnType:
    if form == "date":
        return _scalar(pa.date32(), lambda value: datetime.date.fromisoformat(_to_string(value)), path)
    if form == "date-time":
        return _scalar(pa.timestamp("us", tz="UTC"), _to_instant, path)
    if form == "time":
        return _scalar(pa.time64("us"), _to_time, path)
    return _scalar(pa.string(), _to_string, path)


def _to_instant(value: Any) -> datetime.datetime:
    instant = datetime.datetime.fromisoformat(_to_string(value))
    if instant.tzinfo is None:
        raise _DoesNotFit
    return instant.astimezone(datetime.UTC)


def _to_time(value: Any) -> datetime.time:
    """A time of day in UTC."""
    time = datetime.time.fromisoformat(_to_string(value))
    if time.tzinfo is None:
        raise _DoesNotFit
    day = datetime.datetime.combine(datetime.date(2000, 1, 2), time)
    return day.astimezone(datetime.UTC).time()


def _list(inner: ColumnType, path: str) -> ColumnType:
    convert = inner.convert

    def converted(value: Any, notes: Notes) -> Any:
        if value is None:
            return None
        if not isinstance(value, list):
            notes.append(f"{path}: not a list; the text column has it")
            return None
        return [convert(item, notes) for item in value]

    return ColumnType(pa.list_(inner.arrow), converted)


def _struct(fields: tuple[tuple[str, ColumnType], ...], path: str) -> ColumnType:
    converters = [(name, inner.convert) for name, inner in fields]
    names = {name for name, _ in fields}

    def converted(value: Any, notes: Notes) -> Any:
        if value is None:
            return None
        if not isinstance(value, dict):
            notes.append(f"{path}: not an object; the text column has it")
            return None
        if not value.keys() <= names:
            notes.append(f"{path}: keys that the schema does not declare; the text column has them")
        return {name: convert(value.get(name), notes) for name, convert in converters}

    return ColumnType(pa.struct([(name, inner.arrow) for name, inner in fields]), converted, fields=fields)
