"""What a schema's keywords say about the Arrow type of its values: bounds, declared keys, what stands beside.

Questions about one schema object, none of which looks into references. Where an answer is not certain it is
the one that makes the column JSON text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

COMBINATORS = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas")
DYNAMIC = {"$dynamicRef", "$recursiveRef"}
NEGATING = {"not", "if", "oneOf"}
_HARMLESS_IN_BRANCHES = {"required", "title", "description", "$comment", "minProperties", "maxProperties"}
BESIDE_ITEMS = {*COMBINATORS, "contains", "unevaluatedItems"}
FAR_REACHING = (
    {*COMBINATORS, "dependentRequired", "dependencies", "extends", "$ref", "enum", "const", "type"}
    | {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required"}
    | {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"}
)
"""Keywords that can change the type of what stands beside them, not only its bounds."""


def is_only_null(schema: Any) -> bool:
    """Whether null is all that a schema allows."""
    if not isinstance(schema, dict):
        return False
    return (
        schema.get("type") in ("null", ["null"])
        or schema.get("enum") == [None]
        or ("const" in schema and schema["const"] is None)
    )


def is_closed(schema: dict[str, Any], properties: dict[str, Any], open_by_default: bool) -> bool:
    """Whether an object's keys are its declared properties and nothing else."""
    if schema.get("patternProperties") or schema.get("additionalProperties", open_by_default) is not False:
        return False
    if (
        schema.get("unevaluatedProperties", open_by_default and "additionalProperties" not in schema)
        is not False
    ):
        return False
    if not asks_for_declared(schema, properties) or "extends" in schema:
        return False
    for name in COMBINATORS:
        if name not in schema:
            continue
        inner = schema[name]
        branches: Iterable[Any] = (
            inner.values()
            if name == "dependentSchemas" and isinstance(inner, dict)
            else (inner if isinstance(inner, list) else [inner])
        )
        if not all(is_harmless(branch, properties) for branch in branches):
            return False
    return True


def is_harmless(branch: Any, properties: dict[str, Any]) -> bool:
    """Whether a branch of a combinator only asks for declared properties."""
    return (
        isinstance(branch, dict)
        and set(branch) <= _HARMLESS_IN_BRANCHES
        and asks_for_declared(branch, properties)
    )


def asks_for_declared(schema: dict[str, Any], properties: dict[str, Any]) -> bool:
    """Whether all names that `required`, `dependentRequired` and `dependencies` ask for are properties."""
    names = [*listed(schema.get("required"))]
    for keyword in ("dependentRequired", "dependencies"):
        dependents = schema.get(keyword, {})
        if not isinstance(dependents, dict):
            return False
        for dependent in dependents.values():
            if isinstance(dependent, dict | bool):
                if not is_harmless(dependent, properties):
                    return False
            else:
                names += dependent if isinstance(dependent, list) else [dependent]
    return set(map(str, names)) <= set(properties)


def keeps_type_of_target(schema: dict[str, Any], target: dict[str, Any]) -> bool:
    """Whether a schema with a `$ref` has the type of its target."""
    more = (schema.keys() & FAR_REACHING) - {"$ref"}
    properties = target.get("properties")
    return (
        more <= {"type", "required"}
        and ("type" not in more or schema["type"] == target.get("type"))
        and (
            "required" not in more or (isinstance(properties, dict) and asks_for_declared(schema, properties))
        )
    )


def integer_bounds(schema: dict[str, Any]) -> tuple[int | None, int | None]:
    """The least and the largest integer that a schema's own keywords allow, None where they do not say."""
    lows, highs = all_integer_bounds(schema)
    return max(lows, default=None), min(highs, default=None)


def all_integer_bounds(schema: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The least and the largest integer that each of a schema's own keywords allows.

    All of them count where the schema is negated: then it is enough that one is not kept.
    """
    least, most = finite(schema.get("minimum")), finite(schema.get("maximum"))
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    # Draft 4 says there only whether the bound itself is left out.
    lows = [] if least is None else [math.floor(least) + 1 if above is True else math.ceil(least)]
    highs = [] if most is None else [math.ceil(most) - 1 if below is True else math.floor(most)]
    above, below = finite(above), finite(below)
    lows += [] if above is None else [math.floor(above) + 1]
    highs += [] if below is None else [math.ceil(below) - 1]
    return lows, highs


def finite(value: Any) -> int | Decimal | None:
    """A number as the grammar takes it: floats by their shortest spelling, 1e38 is 10**38."""
    if isinstance(value, float):
        return Decimal(repr(value)) if math.isfinite(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def listed(value: Any) -> list[Any]:
    """What a keyword lists; nothing where it has something else than a list."""
    return value if isinstance(value, list) else []


def integer_step(value: Any) -> list[int]:
    """The integer that every integer which is a multiple of `value` is a multiple of, if there is one."""
    step = finite(value)
    return [abs(Decimal(step).as_integer_ratio()[0])] if step else []
