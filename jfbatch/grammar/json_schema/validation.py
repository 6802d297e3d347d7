"""Whether one JSON value satisfies one subschema: used to filter enum values and property names.

The values are few and known, so this evaluates directly, keyword by keyword. Patterns and formats are
left to jsonschema-rs, whose regular expressions follow ECMA-262.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jsonschema_rs

from jfbatch.errors import UnsupportedSchema
from jfbatch.grammar.json_schema.conditional import conditional_parts
from jfbatch.grammar.json_schema.reading import (
    contains_bounds,
    exclusive_flag,
    item_scope,
    property_scope,
    read_count,
    read_names,
    read_number,
    read_schema_map,
    read_schemas,
    read_step,
    read_string,
    read_types,
)
from jfbatch.grammar.json_schema.resolve import SchemaNode
from jfbatch.grammar.json_schema.shape import Atom, type_of, value_key

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger

DEPTH_LIMIT = 100


@lru_cache(maxsize=4096)
def _pattern_validator(pattern: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator({"pattern": pattern})


@lru_cache(maxsize=256)
def _format_validator(name: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)


def matches_pattern(pattern: str, text: str) -> bool:
    """ECMA-262 search. Raises UnsupportedSchema where the pattern is not a regular expression."""
    try:
        validator = _pattern_validator(pattern)
    except (ValueError, jsonschema_rs.ValidationError) as error:
        raise UnsupportedSchema("", "pattern", f"{pattern!r} is not a regular expression") from error
    return bool(validator.is_valid(text))


def holds(merger: Merger, atom: Atom, value: Any, depth: int = 0) -> bool:
    """Whether the atom's subschema holds (or, for a negative atom, does not) for the value."""
    node, positive = atom
    return _satisfies(merger, node, value, depth) == positive


def _satisfies(merger: Merger, node: SchemaNode, value: Any, depth: int) -> bool:
    if isinstance(node.schema, bool):
        return node.schema
    if depth > DEPTH_LIMIT:
        raise node.fail("$ref", "nested too deeply around an enum or const value")
    for keyword in merger.keywords(node):
        if not _CHECKS[keyword](merger, node, node.schema[keyword], value, depth + 1):
            return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _type(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return bool(read_types(node, keyword) & type_of(value))


def _enum(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return value_key(value) in merger.enum_keys(node)


def _const(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return bool(value_key(keyword) == value_key(value))


def _reference(name: str) -> Any:
    def check(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
        return _satisfies(merger, merger.resolver.reference(node, name), value, depth)

    return check


def _all_of(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return all(
        _satisfies(merger, part, value, depth) for part in read_schemas(merger, node, "allOf", keyword)
    )


def _any_of(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return any(
        _satisfies(merger, part, value, depth) for part in read_schemas(merger, node, "anyOf", keyword)
    )


def _one_of(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return (
        sum(_satisfies(merger, part, value, depth) for part in read_schemas(merger, node, "oneOf", keyword))
        == 1
    )


def _not(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return not _satisfies(merger, merger.resolver.child(node, keyword, "not"), value, depth)


def _if(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    condition, consequence, otherwise = conditional_parts(merger, node)
    chosen = consequence if _satisfies(merger, condition, value, depth) else otherwise
    return _satisfies(merger, chosen, value, depth)


def _dependencies(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(keyword, dict):
        raise node.fail("dependencies", "must be an object")
    if not isinstance(value, dict):
        return True
    for name, dependency in keyword.items():
        if name not in value:
            continue
        if isinstance(dependency, (list, str)):
            names = [dependency] if isinstance(dependency, str) else dependency
            if not all(other in value for other in names):
                return False
        elif not _satisfies(
            merger, merger.resolver.child(node, dependency, "dependencies", name), value, depth
        ):
            return False
    return True


def _dependent_schemas(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, dict):
        return True
    children = read_schema_map(merger, node, "dependentSchemas")
    return all(_satisfies(merger, child, value, depth) for name, child in children.items() if name in value)


def _minimum(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not _is_number(value):
        return True
    bound = read_number(node, "minimum", keyword)
    return bool(value > bound if exclusive_flag(node, "exclusiveMinimum") else value >= bound)


def _maximum(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not _is_number(value):
        return True
    bound = read_number(node, "maximum", keyword)
    return bool(value < bound if exclusive_flag(node, "exclusiveMaximum") else value <= bound)


def _exclusive_minimum(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if isinstance(keyword, bool) or not _is_number(value):
        return True
    return bool(value > read_number(node, "exclusiveMinimum", keyword))


def _exclusive_maximum(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if isinstance(keyword, bool) or not _is_number(value):
        return True
    return bool(value < read_number(node, "exclusiveMaximum", keyword))


def _multiple_of(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not _is_number(value):
        return True
    return (Fraction(str(value)) / read_step(node, "multipleOf", keyword)).denominator == 1


def _count(kind: type, name: str, at_least: bool) -> Any:
    def check(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
        if not isinstance(value, kind):
            return True
        bound = read_count(node, name, keyword)
        return len(value) >= bound if at_least else len(value) <= bound  # type: ignore[arg-type]

    return check


def _pattern(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    return not isinstance(value, str) or matches_pattern(read_string(node, "pattern", keyword), value)


def _format(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, str):
        return True
    return bool(_format_validator(read_string(node, "format", keyword)).is_valid(value))


def _items(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, list):
        return True
    scope = item_scope(merger, node)
    for index, item in enumerate(value):
        atom = scope.prefix[index] if index < len(scope.prefix) else scope.rest
        if atom is not None and not holds(merger, atom, item, depth):
            return False
    return True


def _unique_items(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, list) or not keyword:
        return True
    return len({value_key(item) for item in value}) == len(value)


def _contains(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, list):
        return True
    low, high = contains_bounds(merger, node)
    child = merger.resolver.child(node, keyword, "contains")
    count = sum(_satisfies(merger, child, item, depth) for item in value)
    return count >= low and (high is None or count <= high)


def _properties(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, dict):
        return True
    scope = property_scope(merger, node)
    for name, member in value.items():
        atoms = [scope.properties[name]] if name in scope.properties else []
        atoms += [atom for pattern, atom in scope.patterns if matches_pattern(pattern, name)]
        if not atoms and scope.additional is not None:
            atoms = [scope.additional]
        if not all(holds(merger, atom, member, depth) for atom in atoms):
            return False
    return True


def _required(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, dict) or isinstance(keyword, bool):
        return True
    return all(name in value for name in read_names(node, "required", keyword))


def _property_names(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, dict):
        return True
    child = merger.resolver.child(node, keyword, "propertyNames")
    return all(_satisfies(merger, child, name, depth) for name in value)


def _unevaluated_properties(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, dict):
        return True
    child = merger.resolver.child(node, keyword, "unevaluatedProperties")
    done = _evaluated(merger, node, value, depth, "unevaluatedProperties")
    return all(_satisfies(merger, child, value[name], depth) for name in value if name not in done)


def _unevaluated_items(merger: Merger, node: SchemaNode, keyword: Any, value: Any, depth: int) -> bool:
    if not isinstance(value, list):
        return True
    child = merger.resolver.child(node, keyword, "unevaluatedItems")
    done = _evaluated(merger, node, value, depth, "unevaluatedItems")
    return all(_satisfies(merger, child, item, depth) for i, item in enumerate(value) if i not in done)


def _evaluated(merger: Merger, node: SchemaNode, value: Any, depth: int, without: str = "") -> set[Any]:
    """The names or indexes that a node and its applied subschemas, where they hold, speak about."""
    found: set[Any] = set()
    for keyword in merger.keywords(node):
        if keyword == without:
            continue
        if keyword in ("properties", "patternProperties", "additionalProperties") and isinstance(value, dict):
            scope = property_scope(merger, node)
            found |= {
                name
                for name in value
                if name in scope.properties
                or scope.additional is not None
                or any(matches_pattern(pattern, name) for pattern, _ in scope.patterns)
            }
        elif keyword in ("items", "prefixItems", "additionalItems") and isinstance(value, list):
            items = item_scope(merger, node)
            found |= set(range(len(value) if items.rest is not None else len(items.prefix)))
        elif keyword == "contains" and isinstance(value, list) and node.draft >= 2020:
            child = merger.resolver.child(node, node.schema[keyword], keyword)
            found |= {index for index, item in enumerate(value) if _satisfies(merger, child, item, depth)}
        elif keyword in ("unevaluatedProperties", "unevaluatedItems"):
            found |= set(value) if isinstance(value, dict) else set(range(len(value)))
    for part in in_place_subschemas(merger, node, value):
        if isinstance(part.schema, dict) and _satisfies(merger, part, value, depth + 1):
            found |= _evaluated(merger, part, value, depth + 1)
    return found


def in_place_subschemas(merger: Merger, node: SchemaNode, value: Any) -> list[SchemaNode]:
    """The subschemas that a node applies to the value itself; a `then` only where its `if` holds."""
    children: list[SchemaNode] = []
    child = merger.resolver.child
    for keyword in merger.keywords(node):
        content = node.schema[keyword]
        if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            children.append(merger.resolver.reference(node, keyword))
        elif keyword in ("allOf", "anyOf", "oneOf"):
            children += read_schemas(merger, node, keyword, content)
        elif keyword == "if":
            condition, consequence, otherwise = conditional_parts(merger, node)
            chosen = consequence if _satisfies(merger, condition, value, 0) else otherwise
            children += [condition, chosen]
        elif keyword in ("dependentSchemas", "dependencies") and isinstance(content, dict):
            children += [
                child(node, part, keyword, name)
                for name, part in content.items()
                if isinstance(value, dict) and name in value and isinstance(part, (dict, bool))
            ]
    return children


_CHECKS: dict[str, Any] = {
    "$ref": _reference("$ref"),
    "$dynamicRef": _reference("$dynamicRef"),
    "$recursiveRef": _reference("$recursiveRef"),
    "type": _type,
    "enum": _enum,
    "const": _const,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependent_schemas,
    "minimum": _minimum,
    "maximum": _maximum,
    "exclusiveMinimum": _exclusive_minimum,
    "exclusiveMaximum": _exclusive_maximum,
    "multipleOf": _multiple_of,
    "minLength": _count(str, "minLength", True),
    "maxLength": _count(str, "maxLength", False),
    "pattern": _pattern,
    "format": _format,
    "items": _items,
    "prefixItems": _items,
    "additionalItems": _items,
    "minItems": _count(list, "minItems", True),
    "maxItems": _count(list, "maxItems", False),
    "uniqueItems": _unique_items,
    "contains": _contains,
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _properties,
    "required": _required,
    "minProperties": _count(dict, "minProperties", True),
    "maxProperties": _count(dict, "maxProperties", False),
    "propertyNames": _property_names,
    "unevaluatedItems": _unevaluated_items,
    "unevaluatedProperties": _unevaluated_properties,
}
