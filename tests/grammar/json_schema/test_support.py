"""docs/json-schema.md is made from the code, lists every keyword, and says of each what is so."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.grammar import compile_schema
from jfbatch.grammar.json_schema import schema_to_rules
from jfbatch.grammar.json_schema.formats import KNOWN_FORMATS
from jfbatch.grammar.json_schema.keywords import POSITIVE
from jfbatch.grammar.json_schema.negation import NEGATIVE
from jfbatch.grammar.json_schema.support import READ_WITH, SUPPORT, listed_keywords, page
from tests.grammar.json_schema.schema_language import SchemaLanguage
from tests.run_command import ROOT

COMMAND = [sys.executable, "-m", "jfbatch.grammar.json_schema.support"]
PAGE = ROOT / "docs" / "json-schema.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"{' '.join(COMMAND[1:])} > docs/json-schema.md"


def test_the_command_prints_the_page() -> None:
    made = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, check=True)
    assert made.stdout.decode("utf-8") == page()
    assert made.stderr == b""


def test_every_keyword_that_the_code_handles_is_listed_once() -> None:
    listed = listed_keywords()
    assert len(listed) == len(set(listed))
    assert set(listed) == set(POSITIVE) | set(READ_WITH)
    assert set(POSITIVE) == set(NEGATIVE)


def test_every_enforced_format_is_named() -> None:
    assert all(f"`{name}`" in page() for name in KNOWN_FORMATS)


TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
CHECKED: dict[str, Any] = {
    "anyOf": {"allOf": [{"anyOf": [{"minimum": n}, {"maxLength": n}]} for n in range(12)]},
    "not": {"not": {"const": [1]}},
    "uniqueItems": {"uniqueItems": True, **TEXTS},
    "contains": {
        **TEXTS,
        "items": {"type": ["array", "null"]},
        "contains": {"type": "array", "uniqueItems": True},
        "maxContains": 2,
    },
    "unevaluatedItems": {"contains": {"const": 1}, "unevaluatedItems": False, "type": "array"},
    "unevaluatedProperties": {
        "type": "object",
        "anyOf": [{"properties": {name: True}} for name in "abcdef"],
        "unevaluatedProperties": False,
    },
    "minProperties": {"type": "object", "minProperties": 3, "not": {"propertyNames": {"maxLength": 3}}},
    "dependentRequired": {"dependentRequired": {f"a{n}": [f"b{n}"] for n in range(12)}, "type": "object"},
    "if": {
        "allOf": [
            {"if": {"required": [f"a{n}"]}, "then": {"required": [f"b{n}"]}, "type": "object"}
            for n in range(12)
        ]
    },
}


@pytest.mark.parametrize("keyword", CHECKED)
def test_what_the_page_calls_checked_is_left_to_the_check(keyword: str) -> None:
    (row,) = (row for rows in SUPPORT.values() for row in rows if keyword in row.keywords)
    assert row.checked
    labels = schema_to_rules(CHECKED[keyword]).unenforced
    assert any(label.rpartition(": ")[2].removeprefix("not ") in (keyword, "const") for label in labels), (
        labels
    )
    with pytest.raises(InvalidGrammar):
        schema_to_rules(CHECKED[keyword], strict=True)


REFUSED: dict[str, Any] = {
    "$ref": [{"$ref": "https://example.com/a.json"}, {"$ref": "#/$defs/none"}],
    "multipleOf": [{"type": "integer", "multipleOf": 10001}],
    "pattern": [{"pattern": r"(a+)\1b"}, {"pattern": "(unclosed"}],
    "$dynamicRef": [
        {
            "$dynamicRef": "one#item",
            "$defs": {
                name: {"$id": name, "$dynamicAnchor": "item", "type": "string"} for name in ("one", "two")
            },
        }
    ],
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_the_page_calls_refused_is_refused(keyword: str) -> None:
    (row,) = (row for rows in SUPPORT.values() for row in rows if keyword in row.keywords)
    assert row.refused
    for schema in REFUSED[keyword]:
        with pytest.raises(InvalidGrammar):
            compile_schema(schema)


ENFORCED: dict[str, Any] = {
    "multipleOf": [{"type": "number", "multipleOf": step} for step in (0.025, 9999, 1000000)]
    + [{"type": "integer", "multipleOf": 10001, "minimum": 0, "maximum": 9_000_000}],
    "uniqueItems": [
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(11))}},
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(12))}, "maxItems": 5},
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(13))}, "maxItems": 3},
    ],
    "contains": [{"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 5}],
    "unevaluatedProperties": [
        {
            "type": "object",
            "anyOf": [{"properties": {name: True}} for name in "abcde"],
            "unevaluatedProperties": False,
        }
    ],
}


@pytest.mark.parametrize("keyword", ENFORCED)
def test_what_the_page_calls_enforced_is_enforced(keyword: str) -> None:
    for schema in ENFORCED[keyword]:
        assert schema_to_rules(schema).unenforced == ()


@pytest.mark.parametrize(
    ("more", "is_described"),
    [
        ({}, False),
        ({"additionalProperties": True}, False),
        ({"additionalProperties": {}}, True),
        ({"unevaluatedProperties": {"type": "integer"}}, True),
        ({"patternProperties": {"^z": {}}}, True),
        ({"patternProperties": {"^z": True}}, False),
    ],
)
def test_closed_objects_have_the_undeclared_properties_that_a_schema_describes(
    more: dict[str, Any], is_described: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    assert SchemaLanguage(schema, objects="open").takes({"a": 1, "z": 2})
    assert SchemaLanguage(schema, objects="closed").takes({"a": 1, "z": 2}) == is_described


def test_open_objects_have_two_orders_and_then_the_undeclared_properties() -> None:
    names = {name: {"type": "integer"} for name in ("a", "b", "c")}
    language = SchemaLanguage({"type": "object", "properties": names, "required": ["c", "a"]}, objects="open")
    assert language.takes({"a": 1, "b": 1, "c": 1, "z": 1, "y": 1})
    assert language.takes({"c": 1, "a": 1, "b": 1, "z": 1})
    assert not language.takes({"b": 1, "a": 1, "c": 1})
    assert not language.takes({"z": 1, "a": 1, "c": 1})
