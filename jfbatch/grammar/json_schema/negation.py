"""What it takes not to satisfy a schema: one list of alternatives per keyword, by de Morgan's laws.

A keyword about one type fails only for values of that type. What cannot be negated exactly is
replaced by something weaker, and the branch notes it as unenforced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jfbatch.grammar.json_schema.branch import Alternative, Fact, Formula
from jfbatch.grammar.json_schema.conditional import conditional_parts
from jfbatch.grammar.json_schema.formats import KNOWN_FORMATS
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
from jfbatch.grammar.json_schema.shape import (
    ANY_TYPE,
    ARRAY,
    NUMBER,
    OBJECT,
    STRING,
    Contains,
    ItemScope,
    SomeKey,
)

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger, NegativeKeyword


def _fact(method: str, *arguments: Any) -> Fact:
    return Fact(method, arguments)


def _of(mask: int, *formulas: Formula) -> Alternative:
    return (_fact("limit_types", mask), *formulas)


def _unknown(node: SchemaNode, keyword: str, mask: int) -> list[Alternative]:
    return [_of(mask, _fact("unenforce", mask, f"#{node.path}: not {keyword}"))]


def _type(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    mask = ANY_TYPE & ~read_types(node, value)
    return [_of(mask)] if mask else []


def _enum(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    if not isinstance(value, list):
        raise node.fail("enum", "must be a list of values")
    label = f"#{node.path}: not enum"
    return [tuple(_fact("exclude", member, label) for member in value)]


def _const(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    return [(_fact("exclude", value, f"#{node.path}: not const"),)]


def _reference(keyword: str) -> NegativeKeyword:
    def negate(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
        return [((merger.resolver.reference(node, keyword), False),)]

    return negate


def _all_of(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    return [((part, False),) for part in read_schemas(merger, node, "allOf", value)]


def _any_of(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    return [tuple((part, False) for part in read_schemas(merger, node, "anyOf", value))]


def _one_of(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    """None holds, or two do."""
    parts = read_schemas(merger, node, "oneOf", value)
    none: list[Alternative] = [tuple((part, False) for part in parts)]
    pairs: list[Alternative] = [
        ((left, True), (right, True))
        for index, left in enumerate(parts)
        for right in parts[index + 1 :]
        if not merger.is_empty(((left, True), (right, True)))
    ]
    return none + pairs


def _not(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    return [((merger.resolver.child(node, value, "not"), True),)]


def _if(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    condition, consequence, otherwise = conditional_parts(merger, node)
    return [
        ((condition, True), (consequence, False)),
        ((condition, False), (otherwise, False)),
    ]


def _dependencies(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    if not isinstance(value, dict):
        raise node.fail("dependencies", "must be an object")
    found: list[Alternative] = []
    for name, dependency in value.items():
        if isinstance(dependency, (list, str)):
            names = [dependency] if isinstance(dependency, str) else dependency
            found += [_of(OBJECT, _fact("require", name), _fact("forbid", other)) for other in names]
        else:
            child = merger.resolver.child(node, dependency, "dependencies", name)
            found.append(_of(OBJECT, _fact("require", name), (child, False)))
    return found


def _dependent_required(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    if not isinstance(value, dict):
        raise node.fail("dependentRequired", "must be an object")
    return [
        _of(OBJECT, _fact("require", name), _fact("forbid", other))
        for name, names in value.items()
        for other in read_names(node, "dependentRequired", names)
    ]


def _dependent_schemas(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    children = read_schema_map(merger, node, "dependentSchemas")
    return [_of(OBJECT, _fact("require", name), (child, False)) for name, child in children.items()]


def _minimum(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    number = read_number(node, "minimum", value)
    return [_of(NUMBER, _fact("maximum", number, not exclusive_flag(node, "exclusiveMinimum")))]


def _maximum(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    number = read_number(node, "maximum", value)
    return [_of(NUMBER, _fact("minimum", number, not exclusive_flag(node, "exclusiveMaximum")))]


def _exclusive_minimum(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    if isinstance(value, bool):
        return []
    return [_of(NUMBER, _fact("maximum", read_number(node, "exclusiveMinimum", value), False))]


def _exclusive_maximum(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    if isinstance(value, bool):
        return []
    return [_of(NUMBER, _fact("minimum", read_number(node, "exclusiveMaximum", value), False))]


def _multiple_of(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    return [_of(NUMBER, _fact("not_multiple_of", read_step(node, "multipleOf", value)))]


def _at_least(keyword: str, opposite: str, mask: int, labelled: bool = False) -> NegativeKeyword:
    """Not `minX: n` is `maxX: n - 1`."""

    def negate(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
        count = read_count(node, keyword, value)
        label = (f"#{node.path}: not {keyword}",) if labelled else ()
        return [_of(mask, _fact(opposite, count - 1, *label))] if count > 0 else []

    return negate


def _at_most(keyword: str, opposite: str, mask: int, labelled: bool = False) -> NegativeKeyword:
    """Not `maxX: n` is `minX: n + 1`."""

    def negate(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
        label = (f"#{node.path}: not {keyword}",) if labelled else ()
        return [_of(mask, _fact(opposite, read_count(node, keyword, value) + 1, *label))]

    return negate


def _pattern(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    pattern = read_string(node, "pattern", value)
    merger.patterns.setdefault(pattern, node.path)
    return [_of(STRING, _fact("pattern", pattern, False))]


def _format(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    name = read_string(node, "format", value)
    return [_of(STRING, _fact("format", name, False))] if name in KNOWN_FORMATS else []


def _items(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    """Some item breaks the schema of its position."""
    scope = item_scope(merger, node)
    found: list[Alternative] = []
    for index, atom in enumerate(scope.prefix):
        if atom is not None and atom[0].schema is not True:
            before: tuple[None, ...] = (None,) * index
            broken = ItemScope((*before, (atom[0], not atom[1])), None)
            found.append(_of(ARRAY, _fact("min_items", index + 1), _fact("items", broken)))
    if scope.rest is None or scope.rest[0].schema is True:
        return found
    beyond = len(scope.prefix)
    if scope.rest[0].schema is False:
        found.append(_of(ARRAY, _fact("min_items", beyond + 1)))
    elif beyond == 0:
        label = f"#{node.path}: not items"
        found.append(_of(ARRAY, _fact("contains", Contains((scope.rest[0], False), 1, None, label))))
    else:
        found += [_of(ARRAY, _fact("min_items", beyond + 1), *_unknown(node, "items", ARRAY)[0])]
    return found


def _unique_items(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    if value is not True:
        return []
    unknown = _fact("unenforce", ARRAY, f"#{node.path}: not uniqueItems")
    return [_of(ARRAY, _fact("min_items", 2), unknown)]


def _contains(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    low, high = contains_bounds(merger, node)
    child = merger.resolver.child(node, value, "contains")
    label = f"#{node.path}: not contains"
    found: list[Alternative] = []
    if low == 1:
        found.append(_of(ARRAY, _fact("items", ItemScope((), (child, False)))))
    elif low > 1:
        found.append(_of(ARRAY, _fact("contains", Contains((child, True), 0, low - 1, label))))
    if high is not None:
        found.append(_of(ARRAY, _fact("contains", Contains((child, True), high + 1, None, label))))
    return found


def _properties(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    """Some property breaks its schema, or some undeclared one does."""
    scope = property_scope(merger, node)
    found: list[Alternative] = []
    for name, (child, positive) in scope.properties.items():
        if child.schema is not True:
            found.append(
                _of(OBJECT, _fact("require", name), _fact("property_holds", name, (child, not positive)))
            )
    for pattern, (child, positive) in scope.patterns:
        if child.schema is not True:
            label = f"#{node.path}: not patternProperties"
            some = SomeKey(frozenset(), (pattern,), (), (), ((child, not positive),), label)
            found.append(_of(OBJECT, _fact("some_key", some)))
    if scope.additional is not None and scope.additional[0].schema is not True:
        child, positive = scope.additional
        label = f"#{node.path}: not additionalProperties"
        patterns = tuple(pattern for pattern, _ in scope.patterns)
        some = SomeKey(frozenset(scope.properties), (), patterns, (), ((child, not positive),), label)
        found.append(_of(OBJECT, _fact("some_key", some)))
    return found


def _required(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    if isinstance(value, bool):
        return []
    return [_of(OBJECT, _fact("forbid", name)) for name in read_names(node, "required", value)]


def _property_names(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
    child = merger.resolver.child(node, value, "propertyNames")
    label = f"#{node.path}: not propertyNames"
    some = SomeKey(frozenset(), (), (), ((child, False),), (), label)
    return [_of(OBJECT, _fact("some_key", some))]


def _unevaluated(keyword: str, mask: int) -> NegativeKeyword:
    def negate(merger: Merger, node: SchemaNode, value: Any) -> list[Alternative]:
        return _unknown(node, keyword, mask)

    return negate


NEGATIVE: dict[str, NegativeKeyword] = {
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
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "minimum": _minimum,
    "maximum": _maximum,
    "exclusiveMinimum": _exclusive_minimum,
    "exclusiveMaximum": _exclusive_maximum,
    "multipleOf": _multiple_of,
    "minLength": _at_least("minLength", "max_length", STRING, True),
    "maxLength": _at_most("maxLength", "min_length", STRING, True),
    "pattern": _pattern,
    "format": _format,
    "items": _items,
    "prefixItems": _items,
    "additionalItems": _items,
    "minItems": _at_least("minItems", "max_items", ARRAY),
    "maxItems": _at_most("maxItems", "min_items", ARRAY),
    "uniqueItems": _unique_items,
    "contains": _contains,
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _properties,
    "required": _required,
    "minProperties": _at_least("minProperties", "max_properties", OBJECT, True),
    "maxProperties": _at_most("maxProperties", "min_properties", OBJECT, True),
    "propertyNames": _property_names,
    "unevaluatedItems": _unevaluated("unevaluatedItems", ARRAY),
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", OBJECT),
}
