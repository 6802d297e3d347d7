"""From one schema document to rules: a work list of objects and arrays, everything else in place.

A conjunction of subschemas is expanded into shapes once. Its scalar shapes become expressions on the
spot, its object and array shapes a Reference to a rule that is built later; so nothing here recurses,
however deep the schema, and a recursive schema meets its own rule again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Literal

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar.deadline import check_deadline
from jfbatch.grammar.expression import NOTHING, Expression, Reference, choice
from jfbatch.grammar.json_schema.arrays import ArrayBuilder
from jfbatch.grammar.json_schema.layout import Layout
from jfbatch.grammar.json_schema.merge import Merger
from jfbatch.grammar.json_schema.numbers import held_to_columns
from jfbatch.grammar.json_schema.objects import ObjectBuilder
from jfbatch.grammar.json_schema.resolve import Resolver
from jfbatch.grammar.json_schema.shape import (
    ARRAY,
    FALSE,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    TRUE,
    Atom,
    Conjunction,
    Shape,
)
from jfbatch.grammar.json_schema.values import (
    excluded_left_over,
    is_known_format,
    remaining_values,
    scalar_expressions,
    values_expression,
)

Integers = Literal["int64", "any"]
"""Whether an integer keeps to what its table column holds where a bound is missing, or is of any size."""

RULE_LIMIT = 150_000
"""Rules that one schema may become."""

PRETTY_DEPTHS = 20
"""Depths at which the pretty style writes one and the same subschema: its rules differ by depth, so a
recursive schema has no end of them."""


class SchemaCompiler:
    """Turns the nodes of one document into rules."""

    def __init__(
        self,
        resolver: Resolver,
        layout: Layout,
        objects: str,
        max_string: int | None = None,
        integers: Integers = "any",
        prefix: str = "",
    ) -> None:
        self.resolver = resolver
        self.merger = Merger(resolver)
        self.layout = layout
        self.objects = objects
        self.max_string = max_string
        self.integers = integers
        self.prefix = prefix  # of the rules' names
        self.rules: dict[str, Expression] = {}
        self.unenforced: dict[str, None] = {}
        self.warnings: dict[str, None] = {}
        self._expressions: dict[tuple[frozenset[Atom], int], Expression] = {}
        self._queue: deque[tuple[str, int, Shape, int]] = deque()
        self._depths: dict[frozenset[Atom], set[int]] = {}
        self._count = 0

    def compile(self) -> Expression:
        """The start expression; `rules` holds the rest."""
        start = self.expression(self.merger.canonical(((self.resolver.root, True),)), 0)
        while self._queue:
            check_deadline()
            name, kind, shape, depth = self._queue.popleft()
            if kind == OBJECT:
                ObjectBuilder(self, name, shape, depth).build()
            else:
                ArrayBuilder(self, name, shape, depth).build()
        return start

    def define(self, name: str, expression: Expression) -> Reference:
        """Add a rule."""
        self.rules[name] = expression
        if len(self.rules) > RULE_LIMIT:
            raise GrammarTooLarge(f"the schema becomes more than {RULE_LIMIT} rules")
        return Reference(name)

    def leave_to_check(self, label: str) -> None:
        """Note a constraint that the rules do not enforce."""
        self.unenforced[label] = None

    def expression(self, conjunction: Conjunction, depth: int) -> Expression:
        """The texts of the values that satisfy a canonical conjunction, at a depth of containers."""
        key = (frozenset(conjunction), depth if self.layout.depends_on_depth else 0)
        found = self._expressions.get(key)
        if found is None:
            if self.layout.depends_on_depth and self._is_too_deep(key[0], depth):
                return NOTHING
            parts: list[Expression] = []
            for shape in self.merger.shapes(conjunction):
                parts += self._shape_expressions(shape, conjunction, depth)
            found = choice(*parts) if parts else NOTHING
            self._expressions[key] = found
        return found

    def _shape_expressions(self, shape: Shape, conjunction: Conjunction, depth: int) -> list[Expression]:
        if shape.values is not None:
            values = remaining_values(self.merger, shape, conjunction)
            return [values_expression(self.layout, values, depth)] if values else []
        for mask, label in shape.unenforced:
            if mask & shape.types:
                self.leave_to_check(label)
        for name in (*shape.string.formats, *shape.string.not_formats):
            if not is_known_format(name):
                self.warnings[f"format {name!r} is unknown and checks nothing"] = None
        for label in excluded_left_over(shape, shape.types & (ARRAY | OBJECT)):
            self.leave_to_check(label)
        bounded = self._with_held_integers(self._with_bounded_string(shape))
        parts = scalar_expressions(self.merger, bounded, self.leave_to_check)
        for kind, word in ((ARRAY, "array"), (OBJECT, "object")):
            if shape.types & kind:
                parts.append(self._container(word, kind, shape, depth))
        return parts

    def _with_bounded_string(self, shape: Shape) -> Shape:
        """The shape, its strings at most `max_string` long if nothing else bounds or describes them."""
        facts = shape.string
        described = facts.patterns or any(is_known_format(name) for name in facts.formats)
        if self.max_string is None or facts.max_length is not None or described:
            return shape
        bounded = shape.copy()
        bounded.string = replace(facts, max_length=max(self.max_string, facts.min_length))
        return bounded

    def _with_held_integers(self, shape: Shape) -> Shape:
        """The shape, its integers within what their table column holds."""
        if self.integers == "any" or shape.types & NUMBER != INTEGER:
            return shape
        held = shape.copy()
        held.number = held_to_columns(shape.number)
        return held

    def _is_too_deep(self, conjunction: frozenset[Atom], depth: int) -> bool:
        depths = self._depths.setdefault(conjunction, set())
        depths.add(depth)
        if len(depths) <= PRETTY_DEPTHS:
            return False
        self.warnings[f"pretty: a recursive part nests at most {PRETTY_DEPTHS} levels deep"] = None
        return True

    def _container(self, word: str, kind: int, shape: Shape, depth: int) -> Expression:
        name = f"{self.prefix}{word}{self._count}"
        self._count += 1
        self._queue.append((name, kind, shape, depth))
        return Reference(name)

    def is_exact(self, conjunction: Conjunction) -> bool:
        """Whether the expression of a conjunction holds its valid values only, as far as is known yet."""
        return not any(
            mask & shape.types for shape in self.merger.shapes(conjunction) for mask, _ in shape.unenforced
        )

    def finite_values(self, conjunction: Conjunction) -> list[Any] | None:
        """All values of a conjunction where they are few: enum, const, booleans, null."""
        found: list[Any] = []
        for shape in self.merger.shapes(conjunction):
            if shape.values is not None:
                found += remaining_values(self.merger, shape, conjunction)
                continue
            if shape.types & ~(NULL | TRUE | FALSE):
                return None
            found += [
                value for bit, value in ((NULL, None), (TRUE, True), (FALSE, False)) if shape.types & bit
            ]
        return found
