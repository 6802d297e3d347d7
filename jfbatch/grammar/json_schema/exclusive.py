"""oneOf: as anyOf where the branches provably exclude each other, otherwise by subtracting.

Branch i is `S_i and not S_j` for exactly those j whose conjunction with S_i is not provably empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jfbatch.grammar.json_schema.branch import Alternative, Branch, Fact, Split
from jfbatch.grammar.json_schema.properties import property_conjunction
from jfbatch.grammar.json_schema.reading import read_schemas
from jfbatch.grammar.json_schema.resolve import SchemaNode
from jfbatch.grammar.json_schema.shape import ANY_TYPE, OBJECT, Shape, value_key

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger

PAIR_LIMIT = 2_000
"""Pairs of branches that are compared; a oneOf with more is left to the check."""


def add_one_of(merger: Merger, node: SchemaNode, value: Any, branch: Branch) -> None:
    """`oneOf`: exactly one of the subschemas holds."""
    parts = read_schemas(merger, node, "oneOf", value)
    label = f"#{node.path}: oneOf"
    if len(parts) == 1:
        branch.add((parts[0], True))
        return

    def expand(current: Branch) -> list[Alternative] | None:
        return _alternatives(merger, label, parts, current)

    branch.add_split(Split(label, ANY_TYPE, (), expand, 0))


def _alternatives(merger: Merger, label: str, parts: list[SchemaNode], branch: Branch) -> list[Alternative]:
    living = [part for part in parts if _can_join(merger, branch, (part,))]
    if _are_discriminated(merger, living, branch):
        return [((part, True),) for part in living]
    if len(living) * (len(living) - 1) // 2 > PAIR_LIMIT:
        return [((part, True), Fact("unenforce", (ANY_TYPE, label))) for part in living]
    overlaps: dict[int, list[int]] = {index: [] for index in range(len(living))}
    for left in range(len(living)):
        for right in range(left + 1, len(living)):
            if _can_join(merger, branch, (living[left], living[right])):
                overlaps[left].append(right)
                overlaps[right].append(left)
    alternatives: list[Alternative] = []
    for index, part in enumerate(living):
        formulas: list[Any] = [(part, True)]
        for other in overlaps[index]:
            negations = tuple(merger.negated(living[other]))
            formulas.append(Split(label, ANY_TYPE, negations, None, 3, living[other]))
        alternatives.append(tuple(formulas))
    return alternatives


def _can_join(merger: Merger, branch: Branch, parts: tuple[SchemaNode, ...]) -> bool:
    """Whether the parts may hold together in this branch; False is proven."""
    conjunction = tuple((part, True) for part in parts)
    if len(parts) > 1 and merger.is_empty(conjunction):
        return False
    return merger.is_possible(
        type(branch).of(conjunction, branch.shape.copy(), set(branch.visited)), conjunction
    )


def _are_discriminated(merger: Merger, parts: list[SchemaNode], branch: Branch) -> bool:
    """Whether one required property has other values in each part: a tagged union, found in one pass."""
    if len(parts) < 2:
        return True
    candidates: list[str] | None = None
    facts: list[list[Shape]] = []
    for part in parts:
        shapes = merger.shapes_ahead(((part, True),))
        if shapes is None:
            return False
        for shape in shapes:
            if branch.shape.types & shape.types & ~OBJECT or shape.values is not None:
                return False
            required = {**branch.shape.object.required, **shape.object.required}
            names = [name for name in required if any(name in s.properties for s in shape.object.scopes)]
            candidates = names if candidates is None else [name for name in candidates if name in names]
        facts.append(shapes)
    return any(_tells_apart(merger, name, facts) for name in candidates or ())


def _tells_apart(merger: Merger, name: str, facts: list[list[Shape]]) -> bool:
    seen: set[Any] = set()
    for shapes in facts:
        mine: set[Any] = set()
        for shape in shapes:
            conjunction = property_conjunction(merger, shape.object, name)
            for value_shape in merger.shapes_ahead(conjunction) or [Shape()]:
                if value_shape.values is None:
                    return False
                mine.update(value_key(value) for value in value_shape.values)
        if not mine.isdisjoint(seen):
            return False
        seen |= mine
    return True
