"""Conditions: if/then/else and the dependency keywords, each a split on whether the condition holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jfbatch.grammar.json_schema.branch import Alternative, Branch, Fact, Split
from jfbatch.grammar.json_schema.reading import read_names, read_schema_map
from jfbatch.grammar.json_schema.resolve import SchemaNode
from jfbatch.grammar.json_schema.shape import OBJECT

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger


def add_conditional(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    """(if and then) or (not if and else)."""
    condition, consequence, otherwise = conditional_parts(merger, node)
    if consequence.schema is True and otherwise.schema is True and not merger.observes_evaluation:
        return
    alternatives: list[Alternative] = [
        ((condition, True), (consequence, True)),
        ((condition, False), (otherwise, True)),
    ]
    branch.split(f"#{node.path}: if", alternatives, cost=2)


def conditional_parts(merger: Merger, node: SchemaNode) -> tuple[SchemaNode, SchemaNode, SchemaNode]:
    """The nodes of if, then and else; an absent then or else is true."""
    parts = [
        merger.resolver.child(node, node.schema.get(keyword, True), keyword)
        for keyword in ("if", "then", "else")
    ]
    return parts[0], parts[1], parts[2]


def add_dependencies(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    """The older keyword: each value is a list of names or a schema."""
    if not isinstance(value, dict):
        raise node.fail("dependencies", "must be an object")
    for name, dependency in value.items():
        if isinstance(dependency, str):
            dependency = [dependency]
        if isinstance(dependency, list):
            _depend_on_names(node, "dependencies", name, dependency, branch)
        else:
            _depend(
                node,
                "dependencies",
                name,
                [(merger.resolver.child(node, dependency, "dependencies", name), True)],
                branch,
            )


def add_dependent_required(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    """`dependentRequired`: a split on whether each name is present."""
    if not isinstance(value, dict):
        raise node.fail("dependentRequired", "must be an object")
    for name, names in value.items():
        _depend_on_names(node, "dependentRequired", name, names, branch)


def add_dependent_schemas(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    """`dependentSchemas`: a split on whether each name is present."""
    for name, child in read_schema_map(merger, node, "dependentSchemas").items():
        _depend(node, "dependentSchemas", name, [(child, True)], branch)


def _depend_on_names(node: SchemaNode, keyword: str, name: str, names: Any, branch: Branch) -> None:
    needed = [other for other in read_names(node, keyword, names) if other != name]
    if needed:
        _depend(node, keyword, name, [Fact("require", tuple(needed))], branch)


def _depend(node: SchemaNode, keyword: str, name: str, consequence: list[Any], branch: Branch) -> None:
    """Where the value is an object: `name` is absent, or present and the consequence holds."""
    absent: Alternative = (Fact("forbid", (name,)),)
    present: Alternative = (Fact("require", (name,)), *consequence)
    branch.add_split(Split(f"#{node.path}: {keyword}", OBJECT, (absent, present), None, 1))
