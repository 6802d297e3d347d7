"""Keyword by keyword: valid values are taken, invalid ones are not, in the draft that says so."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from tests.grammar.json_schema.schema_language import SchemaLanguage

D4 = "http://json-schema.org/draft-04/schema#"
D6 = "http://json-schema.org/draft-06/schema#"
D7 = "http://json-schema.org/draft-07/schema#"
D2019 = "https://json-schema.org/draft/2019-09/schema"
D2020 = "https://json-schema.org/draft/2020-12/schema"

Case = tuple[str, Any, list[Any], list[Any]]

CASES: list[Case] = [
    ("true", True, [1, "x", None, [{}], {"a": [1]}], []),
    ("empty schema", {}, [1.5, "", False, {"a": {"b": []}}], []),
    ("several types", {"type": ["string", "null"]}, ["a", None], [1, False, []]),
    ("integer", {"type": "integer"}, [0, -7, 12345], [1.5, "1", True]),
    ("not integer", {"type": "number", "not": {"type": "integer"}}, [0.5, -2.25], [1, 0, "x"]),
    (
        "enum of everything",
        {"enum": ['a"b', "ü", "c\\d", 3, 3.5, True, None, [1, 2], {"z": 1}]},
        ['a"b', "ü", "c\\d", 3, 3.5, True, None, [1, 2], {"z": 1}],
        ["", 4, False, [2, 1], {"z": 2}, {}],
    ),
    ("enum beside a type", {"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None]),
    ("enum beside a bound", {"enum": [1, 5, 9], "minimum": 4}, [5, 9], [1]),
    ("enum beside a pattern", {"enum": ["ab", "cd"], "pattern": "^a"}, ["ab"], ["cd"]),
    ("const object", {"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, {}]),
    ("exclusive bounds", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.1, 1], [0, 1.01]),
    ("multipleOf", {"type": "integer", "minimum": 2, "multipleOf": 5}, [5, 120], [0, 7, -5]),
    ("two multipleOf", {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, [12, 0], [4, 6]),
    ("not multipleOf", {"type": "integer", "not": {"multipleOf": 2}}, [1, 7], [2, 0]),
    ("lengths in characters", {"type": "string", "minLength": 1, "maxLength": 2}, ["é", "😀😀"], ["", "abc"]),
    (
        "two patterns",
        {"allOf": [{"pattern": "^a"}, {"pattern": "z$"}], "type": "string"},
        ["az", "abz"],
        ["ab"],
    ),
    ("not pattern", {"type": "string", "not": {"pattern": "^a"}}, ["b", ""], ["a", "ab"]),
    ("not a format", {"type": "string", "not": {"format": "date"}}, ["x"], ["2024-02-29"]),
    ("not const", {"type": "string", "not": {"const": "no"}}, ["yes", "n"], ["no"]),
    ("not enum", {"not": {"enum": [1, "a", True]}}, [2, "b", False, None], [1, "a", True]),
    ("not required", {"not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, 5]),
    ("required only", {"required": ["x"]}, [{"x": 1}, [], 3], [{}, {"y": 1}]),
    (
        "properties and additionalProperties false",
        {"properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False},
        [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": None}],
        [{"c": 1}, {"a": "x"}],
    ),
    (
        "additionalProperties schema",
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        [{"a": "x", "z": 1}, {"z": 2}],
        [{"z": "x"}],
    ),
    (
        "patternProperties over a declared one",
        {
            "properties": {"score": {"multipleOf": 5}},
            "patternProperties": {"^s": {"type": "integer"}, "^x_": {"type": "string"}},
            "additionalProperties": False,
        },
        [{"score": 15}, {"s": 7}, {"x_a": "v"}, {}],
        [{"score": 7}, {"score": "15"}, {"x_a": 1}, {"y": 1}],
    ),
    (
        "overlapping patterns",
        {"patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 3}}, "additionalProperties": False},
        [{"a": 1}, {"b": 3}, {"ab": 4}, {"b": "x"}],
        [{"ab": 1}, {"ab": "x"}, {"c": 1}, {"a": 1.5}],
    ),
    ("propertyNames", {"propertyNames": {"maxLength": 2}}, [{}, {"ab": 1}], [{"abc": 1}]),
    ("propertyNames enum", {"propertyNames": {"enum": ["a", "b"]}}, [{"b": 1, "a": 2}], [{"c": 1}]),
    ("minProperties", {"minProperties": 2}, [{"a": 1, "b": 2}, 3], [{}, {"a": 1}]),
    (
        "count of declared members",
        {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"b": 1, "c": 2}, {"a": 1, "z": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "z": 3}],
    ),
    (
        "dependentRequired",
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    (
        "dependentSchemas",
        {
            "properties": {"a": {}, "b": {}},
            "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}},
        },
        [{"a": 1, "b": None}, {"b": 5}, {"a": 1}],
        [{"a": 1, "b": 5}],
    ),
    ("items", {"items": {"type": "integer"}}, [[], [1, 2], "x"], [["x"], [1, "x"]]),
    ("item counts", {"type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, None]], [[], [1, 2, 3]]),
    (
        "prefixItems",
        {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        [[], ["a"], ["a", 1]],
        [["a", 1, 2], [1]],
    ),
    ("prefixItems and more", {"prefixItems": [{}], "items": {"type": "null"}}, [["a", None]], [["a", 1]]),
    ("contains", {"contains": {"type": "integer"}}, [[1], ["a", 2, "b"], "x"], [[], ["a"]]),
    (
        "minContains and maxContains",
        {"type": "array", "contains": {"type": "integer"}, "minContains": 2, "maxContains": 3},
        [[1, 2], ["a", 1, 2, 3]],
        [[1], [1, 2, 3, 4], []],
    ),
    ("minContains 0", {"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [[], [1, 2]], [[1, 1]]),
    (
        "uniqueItems of enum",
        {"items": {"enum": ["a", "b"]}, "uniqueItems": True},
        [["b", "a"], []],
        [["a", "a"]],
    ),
    (
        "uniqueItems of booleans",
        {"items": {"type": "boolean"}, "uniqueItems": True},
        [[True, False]],
        [[True, True]],
    ),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"minLength": 2}]}, [1, "ab", None], ["a"]),
    ("oneOf by type", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, 1.5]),
    (
        "oneOf that overlaps",
        {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"},
        [2, 3],
        [6, 1],
    ),
    (
        "oneOf required",
        {"properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 2}],
    ),
    (
        "oneOf with a tag",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "x"}, "n": {"type": "integer"}},
                    "required": ["k"],
                },
                {
                    "type": "object",
                    "properties": {"k": {"const": "y"}, "n": {"type": "string"}},
                    "required": ["k"],
                },
            ]
        },
        [{"k": "x", "n": 1}, {"k": "y", "n": "s"}],
        [{"k": "x", "n": "s"}, {"k": "z"}, {}],
    ),
    (
        "not closed object",
        {"type": "object", "not": {"properties": {"a": {}}, "additionalProperties": False}},
        [{"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1}],
    ),
    (
        "if, then, else",
        {
            "properties": {"k": {"enum": ["x", "y"]}, "n": {}},
            "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": {"type": "null"}}},
        },
        [{"k": "x", "n": 1}, {"k": "y"}, {"k": "y", "n": None}, {}],
        [{"k": "x"}, {"k": "y", "n": 1}],
    ),
    (
        "unevaluatedProperties",
        {
            "properties": {"a": {}},
            "anyOf": [{"properties": {"b": {"type": "integer"}}}, {"properties": {"c": {"type": "integer"}}}],
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"b": 1}, {"c": 1}, {"b": 1, "c": 2}],
        [{"d": 1}, {"b": 1, "c": "x"}],
    ),
    (
        "unevaluatedItems",
        {"allOf": [{"prefixItems": [{"type": "integer"}]}], "unevaluatedItems": False},
        [[], [1]],
        [[1, 2], ["x"]],
    ),
    ("impossible optional property", {"properties": {"a": False, "b": {}}}, [{}, {"b": 1}], [{"a": 1}]),
    ("draft 4 bounds", {"$schema": D4, "minimum": 1, "exclusiveMinimum": True}, [2, 1.5], [1]),
    ("draft 4 knows no const", {"$schema": D4, "const": 1}, [2], []),
    (
        "draft 4 tuple",
        {"$schema": D4, "items": [{"type": "integer"}], "additionalItems": False},
        [[1]],
        [[1, 2]],
    ),
    ("draft 6 contains", {"$schema": D6, "contains": {"const": 1}}, [[1, 1]], [[2]]),
    ("draft 6 knows no if", {"$schema": D6, "if": True, "then": False}, [1], []),
    (
        "draft 7 $ref hides its siblings",
        {
            "$schema": D7,
            "definitions": {"s": {"type": "string"}},
            "items": {"$ref": "#/definitions/s", "maxLength": 1},
        },
        [["abc"]],
        [[1]],
    ),
    (
        "2019-09 $ref has siblings",
        {
            "$schema": D2019,
            "$defs": {"s": {"type": "string"}},
            "items": {"$ref": "#/$defs/s", "maxLength": 1},
        },
        [["a"]],
        [["abc"], [1]],
    ),
    ("draft 7 dependencies", {"$schema": D7, "dependencies": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]),
    ("2020-12 knows no minContains alone", {"$schema": D2020, "minContains": 5}, [[]], []),
]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_keyword(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    language = SchemaLanguage(schema)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert language.unenforced == ()
    for value in valid:
        assert validator.is_valid(value), f"the case is wrong about {value!r}"
        assert language.takes(value), value
    for value in invalid:
        assert not validator.is_valid(value), f"the case is wrong about {value!r}"
        assert not language.takes_in_some_order(value), value


OLDER_SPELLINGS: list[tuple[Any, Any, Any]] = [
    ({"dependencies": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    ({"items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 2]),
    ({"minimum": 1, "exclusiveMinimum": True}, 2, 1),
    ({"definitions": {"s": {"id": "#s", "type": "string"}}, "items": {"$ref": "#s"}}, ["a"], [1]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), OLDER_SPELLINGS)
def test_older_spellings_count_where_no_draft_is_named(schema: Any, valid: Any, invalid: Any) -> None:
    language = SchemaLanguage(schema)
    assert language.takes(valid)
    assert not language.takes(invalid)


LEFT_TO_THE_CHECK: list[tuple[Any, str, Any]] = [
    ({"type": "array", "uniqueItems": True}, "#: uniqueItems", [1, 1]),
    (
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        "#/properties/a: uniqueItems",
        {"a": [0, 0]},
    ),
    ({"type": "array", "not": {"const": [1]}}, "#/not: not const", [1]),
]


@pytest.mark.parametrize(("schema", "label", "invalid"), LEFT_TO_THE_CHECK)
def test_what_is_not_enforced_is_said(schema: Any, label: str, invalid: Any) -> None:
    language = SchemaLanguage(schema)
    assert label in language.unenforced
    assert language.takes(invalid)


def test_an_unknown_format_is_an_annotation_and_a_warning() -> None:
    language = SchemaLanguage({"type": "string", "format": "pretty-name"})
    assert language.takes("anything")
    assert any("pretty-name" in warning for warning in language.warnings)
