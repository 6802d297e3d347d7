"""unevaluatedProperties and unevaluatedItems: what the subschemas applied in a branch left over.

In one branch it is known which alternatives were taken, so what they describe is known too. As
alternatives of an anyOf may hold together, its split is made over every set of them (see `keywords`);
beside a longer anyOf the constraint is left to the check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jfbatch.grammar.json_schema.branch import LATE, Alternative, Branch, Fact, Split
from jfbatch.grammar.json_schema.reading import item_scope, property_scope
from jfbatch.grammar.json_schema.resolve import SchemaNode
from jfbatch.grammar.json_schema.shape import ARRAY, OBJECT, Atom, ItemScope, PropertyScope

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger


MOST_ALTERNATIVES = 5
"""Alternatives of an anyOf of which every set is told apart."""


def add_unevaluated_properties(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    """`unevaluatedProperties`: a schema for the members nothing else in the branch spoke of."""
    rest: Atom = (merger.resolver.child(node, value, "unevaluatedProperties"), True)

    def expand(current: Branch) -> list[Alternative] | None:
        names: dict[str, Atom] = {}
        patterns: dict[str, Atom] = {}
        always: Atom = (merger.resolver.always, True)
        for part in _applied(merger, node, current):
            if _has_long_any_of(merger, part):
                return None
            if part is not node and "unevaluatedProperties" in merger.keywords(part):
                return [()]
            if not _has(merger, part, ("properties", "patternProperties", "additionalProperties")):
                continue
            scope = property_scope(merger, part)
            if scope.additional is not None:
                return [()]
            names.update(dict.fromkeys(scope.properties, always))
            patterns.update(dict.fromkeys((pattern for pattern, _ in scope.patterns), always))
        scope = PropertyScope(names, tuple(patterns.items()), rest)
        return [(Fact("properties", (scope,)),)]

    branch.add_split(Split(f"#{node.path}: unevaluatedProperties", OBJECT, (), expand, LATE))


def add_unevaluated_items(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    """`unevaluatedItems`: a schema for the items nothing else in the branch spoke of."""
    rest: Atom = (merger.resolver.child(node, value, "unevaluatedItems"), True)

    def expand(current: Branch) -> list[Alternative] | None:
        length = 0
        for part in _applied(merger, node, current):
            keywords = merger.keywords(part)
            if _has_long_any_of(merger, part):
                return None
            if part is not node and "unevaluatedItems" in keywords:
                return [()]
            if "contains" in keywords and part.draft >= 2020:
                return None
            if _has(merger, part, ("items", "prefixItems", "additionalItems")):
                scope = item_scope(merger, part)
                if scope.rest is not None:
                    return [()]
                length = max(length, len(scope.prefix))
        return [(Fact("items", (ItemScope((None,) * length, rest),)),)]

    branch.add_split(Split(f"#{node.path}: unevaluatedItems", ARRAY, (), expand, LATE))


def _has_long_any_of(merger: Merger, node: SchemaNode) -> bool:
    return "anyOf" in merger.keywords(node) and len(node.schema["anyOf"]) > MOST_ALTERNATIVES


def _has(merger: Merger, node: SchemaNode, keywords: tuple[str, ...]) -> bool:
    return any(keyword in keywords for keyword in merger.keywords(node))


def _applied(merger: Merger, node: SchemaNode, branch: Branch) -> list[SchemaNode]:
    """The node and every subschema of it that this branch applies to the same value."""
    found: dict[SchemaNode, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        if current in found or not isinstance(current.schema, dict):
            continue
        found[current] = None
        for child in _in_place(merger, current):
            if (child, True) in branch.visited:
                pending.append(child)
    return list(found)


def _in_place(merger: Merger, node: SchemaNode) -> list[SchemaNode]:
    children: list[SchemaNode] = []
    resolver = merger.resolver
    for keyword in merger.keywords(node):
        value = node.schema[keyword]
        if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            children.append(resolver.reference(node, keyword))
        elif keyword in ("allOf", "anyOf", "oneOf"):
            children += [resolver.child(node, part, keyword, str(index)) for index, part in enumerate(value)]
        elif keyword == "if":
            children += [
                resolver.child(node, node.schema[name], name)
                for name in ("if", "then", "else")
                if name in node.schema
            ]
        elif keyword in ("dependentSchemas", "dependencies"):
            children += [
                resolver.child(node, part, keyword, name)
                for name, part in value.items()
                if isinstance(part, (dict, bool))
            ]
    return children
