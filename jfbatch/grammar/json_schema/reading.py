"""Reading keyword values: each function checks one kind of value and names the keyword where it is wrong."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jfbatch.grammar.json_schema.resolve import SchemaNode
from jfbatch.grammar.json_schema.shape import TYPE_BITS, Atom, ItemScope, PropertyScope

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger


def read_number(node: SchemaNode, keyword: str, value: Any) -> int | float:
    """A finite number. Raises UnsupportedSchema naming the keyword."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise node.fail(keyword, "must be a number")
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise node.fail(keyword, "must be a finite number")
    return value


def read_count(node: SchemaNode, keyword: str, value: Any) -> int:
    """A whole number from 0. Raises UnsupportedSchema."""
    number = read_number(node, keyword, value)
    if number < 0 or number != int(number):
        raise node.fail(keyword, "must be a whole number, not below 0")
    return int(number)


def read_step(node: SchemaNode, keyword: str, value: Any) -> Fraction:
    """A number above 0, exactly as written. Raises UnsupportedSchema."""
    number = read_number(node, keyword, value)
    if number <= 0:
        raise node.fail(keyword, "must be above 0")
    return Fraction(Decimal(str(number)))


def read_string(node: SchemaNode, keyword: str, value: Any) -> str:
    """A string. Raises UnsupportedSchema."""
    if not isinstance(value, str):
        raise node.fail(keyword, "must be a string")
    return value


def read_names(node: SchemaNode, keyword: str, value: Any) -> list[str]:
    """A list of property names. Raises UnsupportedSchema."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise node.fail(keyword, "must be a list of property names")
    return value


def read_types(node: SchemaNode, value: Any) -> int:
    """The type bits of a `type` keyword."""
    if value == []:
        raise node.fail("type", "must name at least one type")
    mask = 0
    for name in value if isinstance(value, list) else [value]:
        bits = TYPE_BITS.get(name) if isinstance(name, str) else None
        if bits is None:
            raise node.fail("type", f"{name!r} is not a JSON type")
        mask |= bits
    return mask


def read_schemas(merger: Merger, node: SchemaNode, keyword: str, value: Any) -> list[SchemaNode]:
    """The nodes of a list of schemas, as under anyOf."""
    if not isinstance(value, list) or not value:
        raise node.fail(keyword, "must be a list of schemas that is not empty")
    return [merger.resolver.child(node, part, keyword, str(index)) for index, part in enumerate(value)]


def read_schema_map(merger: Merger, node: SchemaNode, keyword: str) -> dict[str, SchemaNode]:
    """The nodes of an object of schemas, as under properties; empty where the keyword is absent."""
    value = node.schema.get(keyword)
    if value is None and keyword not in node.schema:
        return {}
    if not isinstance(value, dict):
        raise node.fail(keyword, "must be an object of schemas")
    return {name: merger.resolver.child(node, schema, keyword, name) for name, schema in value.items()}


def exclusive_flag(node: SchemaNode, keyword: str) -> bool:
    """Draft 4's boolean exclusiveMinimum, a modifier of minimum."""
    return node.schema.get(keyword) is True


def property_scope(merger: Merger, node: SchemaNode) -> PropertyScope:
    """properties, patternProperties and additionalProperties of a node, as one value."""
    found = merger.property_scopes.get(node)
    if found is None:
        additional: Atom | None = None
        if "additionalProperties" in node.schema:
            value = node.schema["additionalProperties"]
            additional = (merger.resolver.child(node, value, "additionalProperties"), True)
        properties = read_schema_map(merger, node, "properties")
        patterns = read_schema_map(merger, node, "patternProperties")
        found = PropertyScope(
            {name: (child, True) for name, child in properties.items()},
            tuple((pattern, (child, True)) for pattern, child in patterns.items()),
            additional,
        )
        merger.property_scopes[node] = found
    return found


def item_scope(merger: Merger, node: SchemaNode) -> ItemScope:
    """prefixItems and items, or items and additionalItems in the older spelling, as one value."""
    found = merger.item_scopes.get(node)
    if found is None:
        schema, child = node.schema, merger.resolver.child
        prefix: list[Any] = []
        rest: Atom | None = None
        modern = not merger.resolver.explicit_draft or node.draft >= 2020
        if "prefixItems" in schema and modern:
            if not isinstance(schema["prefixItems"], list):
                raise node.fail("prefixItems", "must be a list of schemas")
            prefix = [
                (child(node, s, "prefixItems", str(i)), True) for i, s in enumerate(schema["prefixItems"])
            ]
        items = schema.get("items")
        if isinstance(items, list):
            prefix = [(child(node, s, "items", str(i)), True) for i, s in enumerate(items)]
            if "additionalItems" in schema:
                rest = (child(node, schema["additionalItems"], "additionalItems"), True)
        elif "items" in schema:
            rest = (child(node, items, "items"), True)
        found = ItemScope(tuple(prefix), rest)
        merger.item_scopes[node] = found
    return found


def contains_bounds(merger: Merger, node: SchemaNode) -> tuple[int, int | None]:
    """How many items must, and how many may, satisfy `contains`."""
    if merger.resolver.explicit_draft and node.draft < 2019:
        return 1, None
    low = read_count(node, "minContains", node.schema.get("minContains", 1))
    high = node.schema.get("maxContains")
    return low, None if high is None else read_count(node, "maxContains", high)
