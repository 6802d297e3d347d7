"""`max_string` bounds the strings that nothing else bounds or describes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jfbatch.errors import GrammarError
from jfbatch.grammar import Vocabulary
from jfbatch.grammar.grammar import Grammar

BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])


def allows(schema: Any, value: Any, max_string: int | None) -> bool:
    matcher = Grammar.from_json_schema(schema, BYTES, max_string=max_string).matcher()
    try:
        for byte in json.dumps(value, ensure_ascii=False).encode():
            matcher.accept_token(byte)
    except GrammarError:
        return False
    return matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "string"}, 5),
        ({"type": "string", "minLength": 2}, 5),
        ({"type": "string", "minLength": 7}, 7),  # the schema's own bounds win
        ({"type": "string", "maxLength": 9}, 9),
        ({"type": "string", "maxLength": 3}, 3),
        ({"type": "string", "format": "no such format"}, 5),
        ({"type": "string", "pattern": "^é*$"}, 40),
        ({"type": ["string", "null"]}, 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ({}, 5),
    ],
)
def test_a_string_without_a_bound_of_its_own_gets_one(schema: Any, longest: int) -> None:
    assert allows(schema, "é" * longest, 5)
    assert allows(schema, "é" * (longest + 1), 5) == (longest == 40)
    assert allows(schema, "é" * (longest + 1), None) == (longest in (5, 7, 40))


def test_strings_in_objects_and_arrays_are_bounded_too() -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"type": "string"}}}, "type": "object"}
    assert allows(schema, {"a": ["12345", ""]}, 5)
    assert not allows(schema, {"a": ["123456"]}, 5)


def test_formats_and_choices_stay_as_they_are() -> None:
    assert allows({"type": "string", "format": "date"}, "2024-05-17", 5)
    assert allows({"enum": ["a long value", 1]}, "a long value", 5)
