"""Code that is made once per process: expressions that stand in many grammars, such as a JSON string.

Real schemas differ in their keys; what stands between them is mostly the same constants. Copying
their instructions with the addresses moved takes a tenth of compiling them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from jfbatch.grammar.analysis import Facts
from jfbatch.grammar.expression import Expression

LIBRARY_SIZE = 2048


@dataclass(frozen=True)
class Template:
    """Ready-made code of an expression that stands in many grammars, to be copied with its addresses moved.

    Addresses are relative to its first instruction; `after` (-1) stands for what follows it. x_kinds: -1 a
    number in `sets`, 0 no address, 1 an instruction, 2 a place in `targets`.
    """

    expression: Expression  # kept, because its id is the key
    size: int
    facts: Facts
    entry: int
    op: list[int]
    x: list[int]
    x_kinds: list[int]
    y: list[int]
    y_is_address: list[bool]
    loop_of: list[int]
    targets: list[int]
    sets: list[int]
    bounds: dict[int, tuple[int, int]]
    free: dict[int, int]
    after: int = -1


class Library:
    """Templates of the expressions that came up in more than one compilation, by identity."""

    def __init__(self, make: Callable[[Expression], Template]) -> None:
        self.make = make
        self.entries: OrderedDict[int, Template | Expression] = OrderedDict()

    def get(self, expression: Expression) -> Template | None:
        found = self.entries.get(id(expression))
        return found if isinstance(found, Template) else None

    def note(self, expression: Expression) -> None:
        """An expression fit for a template was met: remembered once, made into a template the next time."""
        key = id(expression)
        if key in self.entries:
            self.entries[key] = self.make(expression)
        else:
            self.entries[key] = expression
            if len(self.entries) > LIBRARY_SIZE:
                self.entries.popitem(last=False)
