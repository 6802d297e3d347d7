"""Arrays: items by position, then all the rest; `contains` and uniqueItems by counting over kinds of items.

Counting walks a small product: how many items so far, how many of them answered each `contains`, which
of the finitely many values were used. Where that product is too large, the constraint is left to the check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jfbatch.grammar.expression import (
    NOTHING,
    Expression,
    Reference,
    choice,
    literal,
    repeat,
    sequence,
)
from jfbatch.grammar.json_schema.shape import ArrayFacts, Atom, Conjunction, Contains, Shape, value_key
from jfbatch.grammar.json_schema.values import value_texts

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.compiler import SchemaCompiler
    from jfbatch.grammar.json_schema.merge import Merger

STATE_LIMIT = 3_000
"""Rules that counting the items of one array may take."""

KIND_LIMIT = 64
"""Kinds of items (sets of `contains` that one item answers) that are told apart."""

VALUE_LIMIT = 12
"""Distinct values up to which uniqueItems is enforced whatever the number of items."""


def item_conjunction(merger: Merger, facts: ArrayFacts, index: int) -> Conjunction:
    """All that is said of the item at a position; canonical."""
    atoms: list[Atom] = []
    for scope in facts.scopes:
        atom = scope.prefix[index] if index < len(scope.prefix) else scope.rest
        if atom is not None:
            atoms.append(atom)
    return merger.canonical(tuple(atoms))


def prefix_length(facts: ArrayFacts) -> int:
    """How many leading positions have schemas of their own."""
    return max((len(scope.prefix) for scope in facts.scopes), default=0)


@dataclass(frozen=True)
class _State:
    """Items so far (clamped), answers so far per `contains` (clamped), values used."""

    items: int
    answers: tuple[int, ...]
    used: frozenset[Any]


class ArrayBuilder:
    """Builds the rules of one array shape. `name` is the rule to define, `depth` that of the array."""

    def __init__(self, compiler: SchemaCompiler, name: str, shape: Shape, depth: int) -> None:
        self.compiler = compiler
        self.name = name
        self.facts = shape.array
        self.depth = depth
        layout = compiler.layout
        self.opening = literal(layout.opening(depth))
        self.separator = literal(layout.separator(depth))
        self.close = literal(layout.closing(depth) + "]")
        self.contains = list(self.facts.contains)
        self.unique = self.facts.unique is not None and self.facts.max_items not in (0, 1)

    def build(self) -> None:
        if self.contains or self.unique:
            if self._counted():
                return
            for contains in self.contains:
                self.compiler.leave_to_check(contains.label)
            if self.unique and self.facts.unique:
                self.compiler.leave_to_check(self.facts.unique)
        self._define(self._plain())

    def _define(self, body: Expression) -> None:
        self.compiler.define(self.name, body if body == NOTHING else sequence(literal("["), body))

    def _item(self, conjunction: Conjunction) -> Expression:
        return self.compiler.expression(conjunction, self.depth + 1)

    # Without counting answers or values

    def _plain(self) -> Expression:
        facts = self.facts
        length = prefix_length(facts)
        low, high = facts.min_items, facts.max_items
        if high is not None:
            length = min(length, high)
        prefix: list[Expression] = []
        for index in range(length):
            item = self._item(item_conjunction(self.compiler.merger, facts, index))
            if item == NOTHING:
                high = index
                break
            prefix.append(item)
        if high is not None and high < low:
            return NOTHING
        tail: Expression = NOTHING
        if high is None or high > len(prefix):
            tail = self._item(item_conjunction(self.compiler.merger, facts, length))
        if tail == NOTHING:
            high = len(prefix)
            if high < low:
                return NOTHING
        return self._positions(prefix, tail, low, high)

    def _positions(
        self, prefix: list[Expression], tail: Expression, low: int, high: int | None
    ) -> Expression:
        """The items after the opening bracket, and the closing one."""
        count = len(prefix)
        if not prefix:
            if high == 0:
                return literal("]")
            others = repeat(
                sequence(self.separator, tail), max(0, low - 1), None if high is None else high - 1
            )
            some = sequence(self.opening, tail, others, self.close)
            return choice(literal("]"), some) if low == 0 else some
        rest = repeat(
            sequence(self.separator, tail), max(0, low - count), None if high is None else high - count
        )
        following: Expression = sequence(rest, self.close)
        for index in range(count - 1, 0, -1):
            member = sequence(self.separator, prefix[index], following)
            # Leaving out an item leaves out all that come after it.
            if index >= low:
                following = self.compiler.define(f"{self.name}.{index}", choice(member, self.close))
            else:
                following = member
        some = sequence(self.opening, prefix[0], following)
        return choice(literal("]"), some) if low == 0 else some

    # With counting

    def _counted(self) -> bool:
        """Define the rules by walking the product of counts; False if it is too large or not exact."""
        alphabet = self._alphabets()
        if alphabet is None:
            return False
        facts = self.facts
        length = len(alphabet) - 1
        floor = max(facts.min_items, length, 1)
        start = _State(0, (0,) * len(self.contains), frozenset())
        ways: dict[_State, list[tuple[Expression, _State]]] = {}
        pending = [start]
        while pending:
            state = pending.pop()
            if state in ways:
                continue
            ways[state] = []
            if len(ways) > STATE_LIMIT:
                return False
            if facts.max_items is not None and state.items >= facts.max_items:
                continue
            for kind in alphabet[min(state.items, length)]:
                following = self._step(state, kind, floor)
                if following is not None:
                    ways[state].append((kind.text, following))
                    pending.append(following)
        self._define_states(start, ways)
        return True

    def _step(self, state: _State, kind: _Kind, floor: int) -> _State | None:
        """The state after one more item of a kind; None if that cannot be."""
        if self.unique and kind.value in state.used:
            return None
        items = state.items + 1
        if self.facts.max_items is None:
            items = min(items, floor)
        answers: list[int] = []
        for contains, count, answered in zip(self.contains, state.answers, kind.answers, strict=True):
            count += answered
            if contains.high is not None and count > contains.high:
                return None
            answers.append(min(count, contains.low if contains.high is None else contains.high))
        if self.facts.max_items is not None:
            missing = max((c.low - a for c, a in zip(self.contains, answers, strict=True)), default=0)
            if missing > self.facts.max_items - items:
                return None
        used = state.used | {kind.value} if self.unique else state.used
        return _State(items, tuple(answers), used)

    def _define_states(self, start: _State, ways: dict[_State, list[tuple[Expression, _State]]]) -> None:
        names = {state: f"{self.name}.{index}" for index, state in enumerate(ways)}
        for state, steps in ways.items():
            lead = self.separator if state != start else self.opening
            parts: list[Expression] = [sequence(lead, text, Reference(names[after])) for text, after in steps]
            if self._may_end(state):
                parts.append(self.close if state != start else literal("]"))
            self.compiler.define(names[state], choice(*parts))
        self._define(Reference(names[start]))

    def _may_end(self, state: _State) -> bool:
        enough = all(c.low <= a for c, a in zip(self.contains, state.answers, strict=True))
        return enough and state.items >= self.facts.min_items

    def _alphabets(self) -> list[list[_Kind]] | None:
        """The kinds of items at each position of the prefix and, last, beyond it."""
        positions: list[list[_Kind]] = []
        for index in range(prefix_length(self.facts) + 1):
            conjunction = item_conjunction(self.compiler.merger, self.facts, index)
            kinds = self._kinds(conjunction)
            if kinds is None:
                return None
            positions.append(kinds)
        if self.unique and len({kind.value for kinds in positions for kind in kinds}) > VALUE_LIMIT:
            limit = self.facts.max_items
            if limit is None or limit > 3:
                return None
        return positions

    def _kinds(self, conjunction: Conjunction) -> list[_Kind] | None:
        found: list[_Kind] = []
        for answers, together in self._answer_sets(conjunction) or ():
            if self.unique:
                values = self.compiler.finite_values(together)
                if values is None:
                    return None
                for value in values:
                    texts = choice(*value_texts(self.compiler.layout, value, self.depth + 1))
                    found.append(_Kind(texts, answers, value_key(value)))
            else:
                if not self.compiler.is_exact(together):
                    return None
                text = self._item(together)
                if text != NOTHING:
                    found.append(_Kind(text, answers, None))
            if len(found) > 4 * KIND_LIMIT:
                return None
        return found

    def _answer_sets(self, conjunction: Conjunction) -> list[tuple[tuple[int, ...], Conjunction]]:
        """Which sets of `contains` one item may answer, each with what it then has to satisfy."""
        merger = self.compiler.merger
        sets: list[tuple[tuple[int, ...], Conjunction]] = [((), conjunction)]
        for contains in self.contains:
            longer: list[tuple[tuple[int, ...], Conjunction]] = []
            for answers, together in sets:
                yes = merger.canonical((*together, contains.atom))
                no = merger.canonical((*together, self._otherwise(contains)))
                if not merger.is_empty(yes):
                    longer.append(((*answers, 1), yes))
                if not merger.is_empty(no):
                    longer.append(((*answers, 0), no))
            sets = longer
            if len(sets) > KIND_LIMIT:
                break
        return sets

    def _otherwise(self, contains: Contains) -> Atom:
        """An item that does not answer; where only a lower bound counts, any item may be left uncounted."""
        node, positive = contains.atom
        if contains.high is None:
            return (self.compiler.resolver.always, True)
        return (node, not positive)


@dataclass(frozen=True)
class _Kind:
    """Items that answer the same `contains`; with uniqueItems, one single value."""

    text: Expression
    answers: tuple[int, ...]
    value: Any
