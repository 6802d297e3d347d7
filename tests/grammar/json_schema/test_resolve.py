"""References: pointers, anchors, embedded resources, recursion, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jfbatch.errors import UnsupportedSchema
from jfbatch.grammar.grammar import compile_schema
from jfbatch.grammar.json_schema import schema_to_rules
from tests.grammar.json_schema.schema_language import SchemaLanguage

INTEGER: dict[str, Any] = {"type": "integer"}
D4 = "http://json-schema.org/draft-04/schema#"
D7 = "http://json-schema.org/draft-07/schema#"
D2019 = "https://json-schema.org/draft/2019-09/schema"
D2020 = "https://json-schema.org/draft/2020-12/schema"

TO_AN_INTEGER: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}},
    {"$ref": "#/definitions/a~1b~0c", "definitions": {"a/b~c": INTEGER}},
    {"$ref": "#/$defs/with%20space%22", "$defs": {'with space"': INTEGER}},
    {"$ref": "#here", "$defs": {"x": {"$anchor": "here", **INTEGER}}},
    {"$schema": D4, "$ref": "#here", "definitions": {"x": {"id": "#here", **INTEGER}}},
    {"$schema": D7, "$ref": "#here", "definitions": {"x": {"$id": "#here", **INTEGER}}},
    {"$id": "https://example.com/root", "$ref": "item", "$defs": {"x": {"$id": "item", **INTEGER}}},
    {"$id": "https://example.com/root", "$ref": "https://example.com/root#/$defs/x", "$defs": {"x": INTEGER}},
    {
        "$id": "https://example.com/root",
        "$ref": "inner#/$defs/y",
        "$defs": {"x": {"$id": "inner", "$defs": {"y": INTEGER}}, "y": {"type": "string"}},
    },
    {
        "$id": "https://example.com/root",
        "allOf": [{"$id": "inner", "$ref": "#/$defs/y", "$defs": {"y": INTEGER}}],
        "$defs": {"y": {"type": "string"}},
    },
    {"$id": "urn:uuid:1", "$ref": "urn:uuid:2", "$defs": {"x": {"$id": "urn:uuid:2", **INTEGER}}},
    {"$ref": "#/allOf/0/anyOf/1", "allOf": [{"anyOf": [True, INTEGER]}]},
    {"$schema": D2020, "$dynamicRef": "#d", "$defs": {"x": {"$dynamicAnchor": "d", **INTEGER}}},
]


@pytest.mark.parametrize("schema", TO_AN_INTEGER)
def test_a_reference_is_found(schema: dict[str, Any]) -> None:
    language = SchemaLanguage(schema)
    assert language.takes(5)
    assert not language.takes("x")
    assert not language.takes(1.5)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("https://example.com/other.json", "never fetched"),
        ("other.json#/a", "never fetched"),
        ("#/$defs/missing", "leads nowhere"),
        ("#nowhere", "names no anchor"),
        ("#/$defs/list/7", "leads nowhere"),
    ],
)
def test_a_reference_that_leads_out_or_nowhere_is_refused_by_name(reference: str, reason: str) -> None:
    schema = {"properties": {"a": {"$ref": reference}}, "$defs": {"list": [True]}}
    with pytest.raises(UnsupportedSchema) as caught:
        schema_to_rules(schema)
    assert (caught.value.path, caught.value.keyword) == ("/properties/a", "$ref")
    assert reason in str(caught.value)


def test_mutual_recursion() -> None:
    schema = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {"type": "object", "properties": {"children": {"$ref": "#/$defs/forest"}}, **_CLOSED},
            "forest": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
    }
    language = SchemaLanguage(schema)
    assert language.takes({"children": [{"children": []}, {}]})
    assert not language.takes({"children": [[]]})


def test_recursion_through_merging_ends() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"allOf": [{"$ref": "#/$defs/b"}, {"properties": {"x": {"$ref": "#/$defs/a"}}}]},
            "b": {
                "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"x": {"minProperties": 1}, "y": INTEGER}}]
            },
        },
    }
    language = SchemaLanguage(schema)
    assert language.takes({"x": {"y": 1}})
    assert not language.takes({"x": {}})
    assert not language.takes({"x": {"x": {}}})


def test_a_recursive_anchor_leads_to_the_outermost_resource() -> None:
    schema = {
        "$schema": D2019,
        "$id": "https://example.com/closed",
        "$recursiveAnchor": True,
        "$ref": "open",
        "unevaluatedProperties": False,
        "$defs": {
            "open": {
                "$id": "open",
                "$recursiveAnchor": True,
                "type": "object",
                "properties": {"next": {"$recursiveRef": "#"}},
            }
        },
    }
    language = SchemaLanguage(schema)
    assert language.takes({"next": {"next": {}}})
    assert not language.takes({"next": {"other": 1}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"enum": [1], "type": "string"},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        False,
    ],
)
def test_a_schema_that_nothing_satisfies_is_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedSchema, match="no value can satisfy it"):
        compile_schema(schema)


WRONG: list[tuple[Any, str]] = [
    ({"type": "strin"}, "type"),
    ({"type": 5}, "type"),
    ({"required": "a"}, "required"),
    ({"properties": []}, "properties"),
    ({"items": 5}, "schema"),
    ({"minLength": -1}, "minLength"),
    ({"minimum": "1"}, "minimum"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"enum": 3}, "enum"),
    ({"anyOf": []}, "anyOf"),
    ({"type": "string", "pattern": "("}, "pattern"),
    ({"$ref": 5}, "$ref"),
]


@pytest.mark.parametrize(("schema", "keyword"), WRONG)
def test_a_malformed_keyword_is_refused_by_name(schema: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        schema_to_rules(schema)
    assert caught.value.keyword == keyword


_CLOSED = {"additionalProperties": False}
