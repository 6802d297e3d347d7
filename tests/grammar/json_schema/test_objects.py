"""Order of keys, undeclared ones, layout, and sizes that stay linear."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jfbatch.errors import UnsupportedSchema
from jfbatch.grammar.json_schema import schema_to_rules
from tests.grammar.json_schema.schema_language import SchemaLanguage, dumps, loads

ANSWER = {
    "type": "object",
    "properties": {
        "reasoning": {"type": "string"},
        "answer": {"enum": ["yes", "no"]},
        "sure": {"type": "number"},
    },
    "required": ["answer", "sure", "reasoning"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("objects", ["open", "closed"])
def test_keys_come_in_the_order_of_properties(objects: str) -> None:
    language = SchemaLanguage(ANSWER, objects=objects)
    assert language.takes({"reasoning": "r", "answer": "yes", "sure": 0.5})
    assert not language.takes({"answer": "yes", "sure": 0.5, "reasoning": "r"})


def test_merged_properties_come_in_the_order_of_first_mention() -> None:
    schema = {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"c": {}, "a": {"type": "integer"}}}],
        "properties": {"d": {}},
        "$defs": {"base": {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}}},
    }
    language = SchemaLanguage(schema)
    assert language.takes({"a": 1, "b": 2, "c": 3, "d": 4})
    assert not language.takes({"b": 2, "a": 1})
    assert not language.takes({"a": "x"})


def test_required_names_without_a_property_come_after_the_declared_ones() -> None:
    language = SchemaLanguage(
        {"type": "object", "properties": {"b": {}}, "required": ["z", "b"]}, objects="closed"
    )
    assert language.takes({"b": 1, "z": 2})
    assert not language.takes({"z": 2, "b": 1})


def test_an_open_object_also_takes_the_required_members_first() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["c", "b"]}
    language = SchemaLanguage(schema)
    for names in ("abc", "bc", "cb", "cba", "abcz", "cbz"):
        assert language.takes(dict.fromkeys(names, 1)), names
    for names in ("acb", "bac", "cab", "b", "zbc"):
        assert not language.takes(dict.fromkeys(names, 1)), names


def test_closed_objects_have_undeclared_members_only_where_a_schema_describes_them() -> None:
    plain = {"type": "object", "properties": {"a": {}}}
    assert SchemaLanguage(plain, objects="open").takes({"a": 1, "z": 2})
    assert not SchemaLanguage(plain, objects="closed").takes({"a": 1, "z": 2})
    true = {**plain, "additionalProperties": True}
    assert not SchemaLanguage(true, objects="closed").takes({"z": 2})
    described = {**plain, "additionalProperties": {"type": "integer"}}
    assert SchemaLanguage(described, objects="closed").takes({"a": "x", "z": 2})
    by_pattern = {**plain, "patternProperties": {"^z": {"type": "integer"}}}
    assert SchemaLanguage(by_pattern, objects="closed").takes({"z1": 2})
    assert not SchemaLanguage(by_pattern, objects="closed").takes({"y": 2})


def test_an_undeclared_key_never_equals_a_declared_one() -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    language = SchemaLanguage(schema)
    assert language.takes_text('{"score":1,"scores":"x"}')
    assert not language.takes_text('{"score":1,"score":"x"}')


@pytest.mark.parametrize("style", ["spaced", "compact", "pretty"])
def test_each_style_is_what_json_dumps_prints(style: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array"},
            "b": {"const": {"x": [1, {}], "y": []}},
            "c": {"type": "object"},
        },
    }
    language = SchemaLanguage(schema, style)
    value = {"a": [1, [2, {"k": None}], {}, []], "b": {"x": [1, {}], "y": []}, "c": {"d": [{}]}}
    for part in (value, {}, {"b": value["b"]}, {"a": [], "c": {}}):
        for other in ("spaced", "compact", "pretty"):
            assert language.takes_text(dumps(part, other)) == (dumps(part, other) == dumps(part, style))
    assert not language.takes_text("{ }")


@pytest.mark.parametrize("style", ["spaced", "compact", "pretty"])
def test_random_texts_are_laid_out_as_their_style_says(style: str) -> None:
    language = SchemaLanguage({"type": ["object", "array"]}, style)
    source = random.Random(7)
    for _ in range(30):
        text = language.sample(source, 200)
        value = loads(text)
        if value is not None and not any(letter in text for letter in "eE."):
            assert text == dumps(value, style)


def test_pretty_writes_a_recursive_schema_to_a_stated_depth() -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}
    language = SchemaLanguage(schema, "pretty")
    value: dict[str, Any] = {}
    for _ in range(15):
        value = {"n": value}
    assert language.takes(value)
    assert any("levels deep" in warning for warning in language.warnings)


def test_strict_refuses_what_would_be_left_to_the_check() -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        schema_to_rules({"properties": {"a": {"type": "array", "uniqueItems": True}}}, strict=True)
    assert (caught.value.path, caught.value.keyword) == ("/properties/a", "uniqueItems")


def test_optional_members_take_rules_in_proportion_to_their_number() -> None:
    def rules(count: int) -> int:
        properties = {f"p{index}": {"type": "integer"} for index in range(count)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return len(schema_to_rules(schema).rules.rules)

    assert rules(400) <= 2.1 * rules(200)
