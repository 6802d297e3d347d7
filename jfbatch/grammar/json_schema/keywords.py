"""What each keyword adds to a branch where its schema holds.

`POSITIVE` maps keywords to functions. Keywords that only mean something together (properties,
patternProperties and additionalProperties, say) share one, called once under the first of them.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

from jfbatch.grammar.json_schema.branch import Alternative, Branch
from jfbatch.grammar.json_schema.conditional import (
    add_conditional,
    add_dependencies,
    add_dependent_required,
    add_dependent_schemas,
)
from jfbatch.grammar.json_schema.exclusive import add_one_of
from jfbatch.grammar.json_schema.reading import (
    contains_bounds,
    exclusive_flag,
    item_scope,
    property_scope,
    read_count,
    read_names,
    read_number,
    read_schemas,
    read_step,
    read_string,
    read_types,
)
from jfbatch.grammar.json_schema.resolve import Resolver, SchemaNode
from jfbatch.grammar.json_schema.shape import Contains
from jfbatch.grammar.json_schema.unevaluated import (
    MOST_ALTERNATIVES,
    add_unevaluated_items,
    add_unevaluated_properties,
)

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger, PositiveKeyword

_GROUPS = {
    "patternProperties": "properties",
    "additionalProperties": "properties",
    "prefixItems": "items",
    "additionalItems": "items",
}
_FIRST_DRAFT = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "exclusiveMinimum": 4,
    "exclusiveMaximum": 4,
    "if": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "$recursiveRef": 2019,
    "$dynamicRef": 2020,
    "prefixItems": 2020,
}
_LAST_DRAFT = {"dependencies": 7, "additionalItems": 2019, "$recursiveRef": 2019}


def active_keywords(resolver: Resolver, node: SchemaNode) -> tuple[str, ...]:
    """The keywords of a node that constrain anything in its draft; one per group."""
    schema = node.schema
    if not isinstance(schema, dict):
        return ()
    explicit = resolver.explicit_draft
    if explicit and node.draft <= 7 and "$ref" in schema:
        return ("$ref",)
    found: list[str] = []
    groups: set[str] = set()
    for keyword in schema:
        if keyword not in POSITIVE:
            continue
        if explicit and not _FIRST_DRAFT.get(keyword, 0) <= node.draft <= _LAST_DRAFT.get(keyword, 9999):
            resolver.warnings.append(f"#{node.path}: {keyword} means nothing in the draft that $schema names")
            continue
        group: str = _GROUPS.get(keyword, str(keyword))
        if group not in groups:
            groups.add(group)
            found.append(keyword)
    return tuple(found)


def _type(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.limit_types(read_types(node, value))


def _enum(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    if not isinstance(value, list):
        raise node.fail("enum", "must be a list of values")
    branch.shape.limit_values(tuple(value))


def _const(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.limit_values((value,))


def _reference(keyword: str) -> PositiveKeyword:
    def add(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
        branch.add((merger.resolver.reference(node, keyword), True))

    return add


def _all_of(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.add(*((part, True) for part in read_schemas(merger, node, "allOf", value)))


def _any_of(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    parts = read_schemas(merger, node, "anyOf", value)
    alternatives: list[Alternative] = [((part, True),) for part in parts]
    if merger.observes_evaluation and len(parts) <= MOST_ALTERNATIVES:
        alternatives = [
            tuple((part, True) for part in together)
            for size in range(1, len(parts) + 1)
            for together in combinations(parts, size)
        ]
    branch.split(f"#{node.path}: anyOf", alternatives)


def _not(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.add((merger.resolver.child(node, value, "not"), False))


def _minimum(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.minimum(read_number(node, "minimum", value), exclusive_flag(node, "exclusiveMinimum"))


def _maximum(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.maximum(read_number(node, "maximum", value), exclusive_flag(node, "exclusiveMaximum"))


def _exclusive_minimum(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    if not isinstance(value, bool):
        branch.shape.minimum(read_number(node, "exclusiveMinimum", value), True)


def _exclusive_maximum(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    if not isinstance(value, bool):
        branch.shape.maximum(read_number(node, "exclusiveMaximum", value), True)


def _multiple_of(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.multiple_of(read_step(node, "multipleOf", value))


def _min_length(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.min_length(read_count(node, "minLength", value), f"#{node.path}: minLength")


def _max_length(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.max_length(read_count(node, "maxLength", value), f"#{node.path}: maxLength")


def _pattern(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    pattern = read_string(node, "pattern", value)
    merger.patterns.setdefault(pattern, node.path)
    branch.shape.pattern(pattern, True)


def _format(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.format(read_string(node, "format", value), True)


def _items(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.items(item_scope(merger, node))


def _min_items(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.min_items(read_count(node, "minItems", value))


def _max_items(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.max_items(read_count(node, "maxItems", value))


def _unique_items(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    if not isinstance(value, bool):
        raise node.fail("uniqueItems", "must be true or false")
    if value:
        branch.shape.unique_items(f"#{node.path}: uniqueItems")


def _contains(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    low, high = contains_bounds(merger, node)
    if low == 0 and high is None:
        return
    atom = (merger.resolver.child(node, value, "contains"), True)
    branch.shape.contains(Contains(atom, low, high, f"#{node.path}: contains"))


def _properties(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.properties(property_scope(merger, node))


def _required(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    if isinstance(value, bool) and (node.draft == 4 or not merger.resolver.explicit_draft):
        return  # draft 3's mark on a property; no later draft gives it a meaning
    branch.shape.require(*read_names(node, "required", value))


def _min_properties(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.min_properties(read_count(node, "minProperties", value), f"#{node.path}: minProperties")


def _max_properties(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.max_properties(read_count(node, "maxProperties", value), f"#{node.path}: maxProperties")


def _property_names(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    branch.shape.property_names((merger.resolver.child(node, value, "propertyNames"), True))


POSITIVE: dict[str, PositiveKeyword] = {
    "$ref": _reference("$ref"),
    "$dynamicRef": _reference("$dynamicRef"),
    "$recursiveRef": _reference("$recursiveRef"),
    "type": _type,
    "enum": _enum,
    "const": _const,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": add_one_of,
    "not": _not,
    "if": add_conditional,
    "dependencies": add_dependencies,
    "dependentRequired": add_dependent_required,
    "dependentSchemas": add_dependent_schemas,
    "minimum": _minimum,
    "maximum": _maximum,
    "exclusiveMinimum": _exclusive_minimum,
    "exclusiveMaximum": _exclusive_maximum,
    "multipleOf": _multiple_of,
    "minLength": _min_length,
    "maxLength": _max_length,
    "pattern": _pattern,
    "format": _format,
    "items": _items,
    "prefixItems": _items,
    "additionalItems": _items,
    "minItems": _min_items,
    "maxItems": _max_items,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _properties,
    "required": _required,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "propertyNames": _property_names,
    "unevaluatedItems": add_unevaluated_items,
    "unevaluatedProperties": add_unevaluated_properties,
}
