"""JSON text from strangers: parsed strictly, with a column for whatever is wrong, and never a crash.

Python's parser recurses, takes NaN and turns 1e400 into infinity; here each of these is a RowProblem
that says where. Columns count characters from 1.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jfbatch.rows.row import RowProblem

MAXIMUM_NESTING = 256
"""Deepest nesting of objects and arrays that is read; the same on every Python version and stack."""

MAXIMUM_DIGITS = 4000
"""Longest number that is read, in characters (Python refuses to convert integers past 4300 digits)."""

STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
BRACKETS = re.compile(STRING + r"|([\[{])|([\]}])", re.DOTALL)
_CONSTANTS = re.compile(STRING + r"|(NaN|-?Infinity)", re.DOTALL)
_NUMBERS = re.compile(STRING + r"|(-?[0-9][0-9.eE+-]*)", re.DOTALL)
_KEYS_AND_BRACKETS = re.compile(rf"({STRING})\s*:|{STRING}|([\[{{])|([\]}}])", re.DOTALL)
_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


class RepeatedKey(ValueError):
    """A key that stands twice in one object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} appears twice in one object")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json.loads. Raises RepeatedKey, where Python would take the last."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RepeatedKey(key)
            seen.add(key)
    return value


class _Refused(Exception):
    """A number or constant that the parser met and does not take."""


def parse(text: str) -> Any:
    """The value of a JSON text. Raises RowProblem, with the column, on anything that is not plain JSON."""
    check_nesting(text)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RowProblem(f"not JSON: {_plain(error.msg)}", column=error.pos + 1) from None
    except _Refused:
        raise _refusal(text) from None
    except RepeatedKey as error:
        raise RowProblem(printable(str(error)), column=_column_of_repeated_key(text)) from None


def check_nesting(text: str) -> None:
    """Raises RowProblem where the text nests deeper than MAXIMUM_NESTING."""
    if text.count("[") + text.count("{") <= MAXIMUM_NESTING:
        return
    depth = 0
    for found in BRACKETS.finditer(text):
        if found.group(1):
            depth += 1
            if depth > MAXIMUM_NESTING:
                raise RowProblem(f"nested deeper than {MAXIMUM_NESTING} levels", column=found.start() + 1)
        elif found.group(2):
            depth -= 1


def _column_of_repeated_key(text: str) -> int | None:
    """The column where a key stands for the second time in its object, of the first object that ends."""
    keys: list[set[str]] = []
    repeated: list[int | None] = []
    for found in _KEYS_AND_BRACKETS.finditer(text):
        if found.group(2):
            keys.append(set())
            repeated.append(None)
        elif found.group(3):
            keys.pop()
            if (column := repeated.pop()) is not None:
                return column
        elif found.group(1):
            key = json.loads(found.group(1))
            if key in keys[-1] and repeated[-1] is None:
                repeated[-1] = found.start() + 1
            keys[-1].add(key)
    return None


def column_of_lone_surrogate(text: str) -> int | None:
    """The column of the first \\uD800-\\uDFFF escape without its other half, or None."""
    expected_at = -1
    high_at = -1
    for found in _ESCAPES.finditer(text):
        code = int(found.group(1), 16) if found.group(1) else 0
        is_low = 0xDC00 <= code <= 0xDFFF
        if high_at >= 0 and not (is_low and found.start() == expected_at):
            return high_at + 1
        if high_at >= 0:
            high_at = -1
        elif is_low:
            return found.start() + 1
        elif 0xD800 <= code <= 0xDBFF:
            high_at, expected_at = found.start(), found.end()
    return high_at + 1 if high_at >= 0 else None


def dump(value: Any) -> str:
    """One-line JSON that is always valid UTF-8: lone surrogates stay escapes, other values become strings."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if is_utf8(text) else json.dumps(value, default=str)


def is_utf8(text: str) -> bool:
    """Whether the text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """The text with lone surrogates spelt out, so that it can be written as UTF-8."""
    return text if is_utf8(text) else text.encode("utf-8", "backslashreplace").decode()


def _plain(message: str) -> str:
    return message[0].lower() + message[1:].removesuffix(" at")


def _constant(name: str) -> Any:
    raise _Refused(name)


def _integer(text: str) -> int:
    if len(text) > MAXIMUM_DIGITS:
        raise _Refused(text)
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _Refused(text)
    return value


def _refusal(text: str) -> RowProblem:
    for found in _CONSTANTS.finditer(text):
        if found.group(1):
            return RowProblem(f"not JSON: {found.group(1)} is not a JSON number", column=found.start() + 1)
    for found in _NUMBERS.finditer(text):
        number = found.group(1)
        if not number:
            continue
        if len(number) > MAXIMUM_DIGITS:
            reason = f"a number of {len(number)} characters (at most {MAXIMUM_DIGITS})"
            return RowProblem(reason, column=found.start() + 1)
        try:
            _float(number)
        except _Refused:
            return RowProblem(f"the number {number[:40]} is out of range", column=found.start() + 1)
        except ValueError:
            break
    return RowProblem("a number that cannot be read", column=1)


# Strict: control characters inside strings are refused, as JSON has it.
_DECODER = json.JSONDecoder(
    parse_int=_integer,
    parse_float=_float,
    parse_constant=_constant,
    object_pairs_hook=unique_keys,
    strict=True,
)
