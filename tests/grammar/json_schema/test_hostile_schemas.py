"""Huge, deep and explosive schemas: done or refused in seconds, never a crash."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from typing import Any

import pytest

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.json_schema import schema_to_rules
from tests.grammar.json_schema.random_schemas import random_document
from tests.grammar.json_schema.schema_language import SchemaLanguage


def _nested(depth: int, kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {
            "properties": {"type": "object", "properties": {"a": schema}, "required": ["a"]},
            "items": {"type": "array", "items": schema},
            "allOf": {"allOf": [schema]},
            "anyOf": {"anyOf": [schema, {"type": "null"}]},
            "oneOf": {"oneOf": [schema, {"type": "null"}]},
            "not": {"not": schema},
            "if": {"if": {"type": "null"}, "then": True, "else": schema},
        }[kind]
    return schema


def _choices(count: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(count)]}


HOSTILE: dict[str, Any] = {
    "ten thousand enum values": {"enum": [f"value {index}" for index in range(10_000)]},
    "ten thousand unique values": {"uniqueItems": True, "items": {"enum": list(range(10_000))}},
    "ten thousand properties": {"properties": {f"p{index}": {"type": "string"} for index in range(10_000)}},
    "choices to the power of 25": _choices(25),
    "five hundred tagged branches": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(500)
        ]
    },
    "sixty overlapping branches": {"oneOf": [{"properties": {f"p{i}": {"type": "null"}}} for i in range(60)]},
    "chain of dependencies": {"dependentRequired": {f"p{i}": [f"p{i + 1}"] for i in range(60)}},
    "overlapping patterns": {"patternProperties": {f"x{i}": {"type": "integer"} for i in range(20)}},
    "many contains": {"allOf": [{"contains": {"const": i}, "maxContains": 1} for i in range(20)]},
    "long tuple": {"prefixItems": [{"type": "integer"}] * 5_000},
    "chain of references": {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3_000)} | {"3000": True},
    },
    "doubling references": {
        "$ref": "#/$defs/0",
        "$defs": {
            str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]} for i in range(60)
        }
        | {"60": {"type": "null"}},
    },
    "itself": {"$ref": "#"},
    **{
        f"500 deep {kind}": _nested(500, kind)
        for kind in ("properties", "items", "allOf", "anyOf", "oneOf", "not")
    },
    "300 deep if": _nested(300, "if"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schema_ends_soon(name: str) -> None:
    started = time.perf_counter()
    with contextlib.suppress(InvalidGrammar):  # refused is as good as done
        compiled = schema_to_rules(HOSTILE[name])
        assert len(compiled.rules.rules) < 150_000
    assert time.perf_counter() - started < 10


def test_the_compiled_hostile_schemas_still_mean_what_they_say() -> None:
    tagged = SchemaLanguage(HOSTILE["five hundred tagged branches"])
    assert tagged.unenforced == ()
    assert tagged.takes({"k": 499})
    assert not tagged.takes({"k": 500})
    values = SchemaLanguage(HOSTILE["ten thousand enum values"])
    assert values.takes("value 9999")
    assert not values.takes("value 10000")
    choices = SchemaLanguage(HOSTILE["choices to the power of 25"])
    assert choices.unenforced
    assert choices.takes_in_some_order({f"a{index}": 1 for index in range(25)}, tries=1)


BROKEN: list[Any] = [
    None,
    True,
    5,
    -1,
    2.5,
    "x",
    "#/nope",
    "[",
    [],
    {},
    [5],
    {"a": 5},
    [{}],
    {"$ref": "#"},
    [None],
]


@pytest.mark.parametrize("seed", range(6))
def test_broken_keyword_values_are_refused_never_a_crash(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(100):
        document = random_document(source)
        places: list[tuple[Any, Any]] = []

        def note(value: Any, places: list[tuple[Any, Any]] = places) -> None:
            if isinstance(value, (dict, list)):
                for key in value if isinstance(value, dict) else range(len(value)):
                    places.append((value, key))
                    note(value[key])

        note(document)
        holder, key = source.choice(places)
        holder[key] = copy.deepcopy(source.choice(BROKEN))
        style = source.choice(["compact", "pretty"])
        with contextlib.suppress(InvalidGrammar):
            schema_to_rules(document, style=style)  # type: ignore[arg-type]
