"""Random schemas over a small world of names and values, so that their keywords meet each other."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "b", "ab"]
TYPES: list[Any] = [
    *("null", "boolean", "integer", "number", "string", "array", "object", "object"),
    *(["string", "null"], ["integer", "object"], ["array", "object"]),
]
KEYWORDS = [
    *("type", "type", "type", "enum", "const", "bound", "length", "pattern", "properties", "properties"),
    *("required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    *("propertyNames", "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "unevaluated", "$ref"),
]
NESTING = {
    *("properties", "additionalProperties", "patternProperties", "items", "prefixItems", "contains", "allOf"),
    *("anyOf", "oneOf", "not", "if", "dependentSchemas", "unevaluated"),
}


def random_value(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(9 if depth < 2 else 7)
    if kind == 0:
        return None
    if kind == 1:
        return source.random() < 0.5
    if kind <= 3:
        return source.choice([-2, -1, 0, 1, 2, 3, 4, 0.5, 1.5, 2.25])
    if kind <= 6:
        return source.choice(["", "x", "xy", "a1", "ax", "b"])
    if kind == 7:
        return [random_value(source, depth + 1) for _ in range(source.randrange(4))]
    names = source.sample([*NAMES, "z"], source.randrange(4))
    return {name: random_value(source, depth + 1) for name in names}


def random_document(source: random.Random) -> dict[str, Any]:
    """A schema object with two definitions, one of them recursive."""
    schema = random_schema(source)
    document = schema if isinstance(schema, dict) else {"not": {"not": schema}}
    recursive = {"a": {"$ref": "#/$defs/q"}, "b": random_schema(source, 3)}
    document["$defs"] = {"p": random_schema(source, 2), "q": {"type": "object", "properties": recursive}}
    return document


def random_schema(source: random.Random, depth: int = 0) -> Any:
    if source.random() < 0.07:
        return source.random() < 0.7
    schema: dict[str, Any] = {}
    for _ in range(source.choice([1, 1, 2, 2, 3])):
        keyword = source.choice(KEYWORDS)
        if depth >= 3 and keyword in NESTING:
            keyword = "type"
        _add(schema, keyword, source, depth + 1)
    return schema


def _add(schema: dict[str, Any], keyword: str, source: random.Random, depth: int) -> None:
    def below() -> Any:
        return random_schema(source, depth)

    if keyword == "type":
        chosen = source.choice(TYPES)
        schema["type"] = list(chosen) if isinstance(chosen, list) else chosen  # the caller may change it
    elif keyword == "enum":
        schema["enum"] = [random_value(source, 1) for _ in range(source.randrange(1, 4))]
    elif keyword == "const":
        schema["const"] = random_value(source, 1)
    elif keyword == "bound":
        name = source.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
        schema[name] = source.choice([-1, 0, 1, 2, 0.5])
    elif keyword == "length":
        schema[source.choice(["minLength", "maxLength"])] = source.randrange(3)
    elif keyword == "pattern":
        schema["pattern"] = source.choice(["^a", "x$", "y", "^x?y*$"])
    elif keyword in ("properties", "dependentSchemas"):
        schema[keyword] = {name: below() for name in source.sample(NAMES, source.randrange(1, 3))}
    elif keyword == "required":
        schema["required"] = source.sample(NAMES, source.randrange(1, 3))
    elif keyword == "additionalProperties":
        schema[keyword] = below() if source.random() < 0.5 else False
    elif keyword == "patternProperties":
        patterns = source.sample(["^a", "b", "z"], source.randrange(1, 3))
        schema[keyword] = {pattern: below() for pattern in patterns}
    elif keyword in ("minProperties", "maxProperties", "minItems", "maxItems"):
        schema[keyword] = source.randrange(3)
    elif keyword == "propertyNames":
        schema[keyword] = source.choice(
            [{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "z"]}, {"not": {"const": "b"}}]
        )
    elif keyword in ("items", "not"):
        schema[keyword] = below()
    elif keyword in ("prefixItems", "allOf", "anyOf", "oneOf"):
        schema[keyword] = [below() for _ in range(source.randrange(1, 4))]
    elif keyword == "uniqueItems":
        schema["uniqueItems"] = True
    elif keyword == "contains":
        schema["contains"] = below()
        for bound in ("minContains", "maxContains"):
            if source.random() < 0.3:
                schema[bound] = source.randrange(3)
    elif keyword == "if":
        schema["if"] = below()
        for branch in ("then", "else"):
            if source.random() < 0.7:
                schema[branch] = below()
    elif keyword == "dependentRequired":
        schema[keyword] = {source.choice(NAMES): source.sample(NAMES, 1)}
    elif keyword == "unevaluated":
        name = source.choice(["unevaluatedProperties", "unevaluatedItems"])
        schema[name] = below() if source.random() < 0.4 else False
    elif keyword == "$ref":
        schema["$ref"] = source.choice(["#/$defs/p", "#/$defs/q"])
