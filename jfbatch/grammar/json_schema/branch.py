"""A branch of merging: a shape in the making, what is still to be read, and what is still to be split.

Keywords do not act on shapes directly where a choice is involved; they say what holds as values (a Fact,
a subschema, a Split), which is what can be put off, copied and chosen among.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jfbatch.grammar.json_schema.resolve import SchemaNode
from jfbatch.grammar.json_schema.shape import ANY_TYPE, Atom, Conjunction, Shape


@dataclass(frozen=True, slots=True)
class Fact:
    """A call of one of Shape's methods, as a value."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """One of the alternatives holds, where the value is of a type in `mask`; other types are free.

    `expand` makes the alternatives when the branch is taken apart, for those that depend on its shape;
    None from it leaves the split to the check. Splits are taken in the order of `cost`, cheap ones first.
    `excluded`: the alternatives are the ways not to satisfy this node, so a branch in which it cannot
    hold anyway needs none of them.
    """

    label: str
    mask: int
    alternatives: tuple[Alternative, ...] = ()
    expand: Callable[[Branch], list[Alternative] | None] | None = None
    cost: int = 0
    excluded: SchemaNode | None = None


Formula = Atom | Fact | Split
Alternative = tuple[Formula, ...]

LATE = 100
"""The cost from which on a split speaks about what the other splits have brought together."""


Position = tuple[int, ...]
"""Where in the text of the schema something was said: compared, it gives the order of first mention."""


class Branch:
    """A shape in the making: what is still to be read, and what is still to be split."""

    __slots__ = ("pending", "position", "shape", "splits", "visited")

    def __init__(
        self,
        shape: Shape,
        pending: list[tuple[Position, Formula]],
        visited: set[Atom],
        splits: list[tuple[Position, Split]],
    ) -> None:
        self.shape = shape
        self.pending = pending
        self.visited = visited
        self.splits = splits
        self.position: Position = ()

    @staticmethod
    def of(conjunction: Conjunction, shape: Shape | None = None, visited: set[Atom] | None = None) -> Branch:
        """A branch that has a conjunction still to read."""
        pending: list[tuple[Position, Formula]] = [((index,), atom) for index, atom in enumerate(conjunction)]
        return Branch(shape or Shape(), pending, visited or set(), [])

    def copy(self) -> Branch:
        return Branch(self.shape.copy(), list(self.pending), set(self.visited), list(self.splits))

    def add(self, *formulas: Formula) -> None:
        """Read these too, as if they stood at the current position."""
        first = len(self.pending)
        self.pending.extend(((*self.position, first + index), f) for index, f in enumerate(formulas))

    def add_split(self, split: Split) -> None:
        self.splits.append((self.position, split))

    def split(
        self,
        label: str,
        alternatives: list[Alternative],
        mask: int = ANY_TYPE,
        cost: int = 0,
    ) -> None:
        """Add a split; a single alternative needs none, and without any the branch is dead."""
        if not alternatives:
            self.shape.limit_types(ANY_TYPE & ~mask)
        elif len(alternatives) == 1 and mask == ANY_TYPE:
            self.add(*alternatives[0])
        else:
            self.add_split(Split(label, mask, tuple(alternatives), None, cost))
