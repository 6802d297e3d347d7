"""The last check of an output."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import InvalidGrammar
from jfbatch.rows.row import Pattern
from jfbatch.rows.validate import SchemaValidator, validator

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "d": {"format": "date"}, "n": {"type": "number"}},
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1}', None),
        ('{"a": ' + "1" * 400 + "}", None),
        ('{"a": ' + "1" * 9000 + "}", None),
        ('{"n": 1e400}', None),
        ('{"n": 1e99999999999999999999}', "too large to be read"),
        ('{"n": -1e99999999999999999999}', "too large to be read"),
        ('{"n": 1e-99999999999999999999}', None),
        ('{"b": "\\ud83d\\ude00"}', None),
        ('{"a": "x"}', "/a: "),
        ('{"a": 1, "a": 1}', "the key 'a' appears twice"),
        ('{"x": {"b": 1, "b": 2}}', "the key 'b' appears twice"),
        ('{"d": "2020-13-01"}', "/d: "),
        ('{"x": ' + "[" * 9000 + "]" * 9000 + "}", "nested deeper"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ('{"a": 1} {"a": 1}', "not JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[]", "the value: "),
    ],
)
def test_check_says_what_is_wrong(text: str, problem: str | None) -> None:
    said = SchemaValidator(SCHEMA).check(text)
    if problem is None:
        assert said is None
    else:
        assert said is not None and problem in said and "\n" not in said


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"$ref": "#/nope"},
        {"$ref": "http://example.com/x.json"},
        {"pattern": "("},
        {"minimum": "1"},
        5,
    ],
)
def test_a_schema_that_is_none_is_an_invalid_grammar(schema: Any) -> None:
    with pytest.raises(InvalidGrammar, match="not a valid JSON Schema"):
        SchemaValidator(schema)


def test_a_validator_is_made_once_per_schema() -> None:
    assert validator(Pattern.of_schema(SCHEMA)) is validator(Pattern.of_schema(dict(SCHEMA)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0]) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
)
SCHEMAS = st.sampled_from(
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]},
        {"not": {"type": "number", "minimum": 1}},
        {"enum": [1, "a", None, {"a": []}]},
    ]
)


@settings(deadline=None)
@given(SCHEMAS, VALUES)
def test_agrees_with_the_python_implementation(schema: dict[str, Any], value: Any) -> None:
    oracle = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert (SchemaValidator(schema).check(json.dumps(value)) is None) == oracle
