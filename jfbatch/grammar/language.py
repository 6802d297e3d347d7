"""Regular languages as explicit automata: the leaves of set operations.

Intersections, differences and emptiness need a complete automaton, so the pieces they are made of
are explored to the end within a budget of states. Only live states are kept (those that can still
reach acceptance, by a backward pass): whoever walks the result never enters a dead end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.deadline import check_deadline
from jfbatch.grammar.expression import (
    Choice,
    Difference,
    ExplicitAutomaton,
    Expression,
    Intersection,
    Reference,
    Repeat,
    RuleSet,
    Sequence,
)
from jfbatch.grammar.listing import byte_classes
from jfbatch.grammar.products import distances_to_acceptance, product
from jfbatch.grammar.program import compile_program

MAX_STATES = 50_000  # of one operand
MAX_PRODUCT = 200_000  # live or not, of one product
MAX_GRID = 400_000_000  # pairs of states of a product (4 bytes each while it is made)

RuleLookup = Callable[[str], Expression]


@dataclass(frozen=True, eq=False)
class Dfa:
    """A trimmed deterministic automaton. Q states, C classes of bytes; no states = the empty language.

    transitions   int32[Q, C]   next state, -1 = none
    class_of_byte uint8[256]
    accepting     bool[Q]
    distance      int32[Q]      fewest bytes to acceptance
    """

    transitions: NDArray[np.int32]
    class_of_byte: NDArray[np.uint8]
    accepting: NDArray[np.bool_]
    distance: NDArray[np.int32]
    start: int

    @property
    def is_empty(self) -> bool:
        return len(self.accepting) == 0

    @property
    def accepts_empty_text(self) -> bool:
        return not self.is_empty and bool(self.accepting[self.start])

    def accepts(self, text: bytes) -> bool:
        """Whether `text` belongs to the language."""
        if self.is_empty:
            return False
        state = self.start
        for byte in text:
            state = int(self.transitions[state, self.class_of_byte[byte]])
            if state < 0:
                return False
        return bool(self.accepting[state])


def dfa_of(
    expression: Expression, rule: RuleLookup | None = None, _character: Expression | None = None
) -> Dfa:
    """The explicit automaton of a regular expression tree.

    `rule` resolves References below it, which must not recur. A length is multiplied out here, whatever
    its character: counted.leaf_of is for programs. Raises GrammarTooLarge past the budget.
    """
    return _dfa(resolved(expression, rule) if rule else expression)


def is_empty(expression: Expression) -> bool:
    """Whether no text at all matches a regular expression tree."""
    return dfa_of(expression).is_empty


@lru_cache(maxsize=512)
def _dfa(expression: Expression) -> Dfa:
    match expression:
        case Intersection(parts):
            check_deadline()
            result = _dfa(parts[0])
            for part in parts[1:]:
                check_deadline()
                result = _product(result, _dfa(part), exclude=False)
            return result
        case Difference(include, exclude):
            return _product(_dfa(include), _dfa(exclude), exclude=True)
        case ExplicitAutomaton(transitions, accepting):
            return _tabulated(transitions, accepting)
    return _explored(expression)


def _tabulated(transitions: tuple[tuple[tuple[int, int], ...], ...], accepting: tuple[bool, ...]) -> Dfa:
    """An ExplicitAutomaton as a table."""
    sets = list({bits for row in transitions for bits, _ in row})
    packed = b"".join(bits.to_bytes(32, "little") for bits in sets) or bytes(32)
    members = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(-1, 32), axis=1, bitorder="little")
    _, sample, class_of_byte = np.unique(members, axis=1, return_index=True, return_inverse=True)
    classes_of_set = {bits: np.flatnonzero(members[index, sample]) for index, bits in enumerate(sets)}
    table = np.full((len(transitions), len(sample)), -1, np.int32)
    for state, row in enumerate(transitions):
        for bits, target in row:
            table[state, classes_of_set[bits]] = target
    return _trimmed(
        table, class_of_byte.reshape(256).astype(np.uint8), np.array(accepting, np.bool_), start=0
    )


def _explored(expression: Expression) -> Dfa:
    try:
        program = compile_program(RuleSet(expression), dfa_of)
    except GrammarTooLarge:
        raise
    except InvalidGrammar:  # nothing matches
        return _trimmed(
            np.full((1, 1), -1, np.int32), np.zeros(256, np.uint8), np.zeros(1, np.bool_), start=0
        )
    automaton = Automaton(program)
    limit = 4_096
    while not automaton.explore(limit):
        check_deadline()
        if limit >= MAX_STATES:
            raise GrammarTooLarge(f"a set operation on a pattern of more than {MAX_STATES:,} states")
        limit = min(2 * limit, MAX_STATES)
    count = automaton.state_count
    return _trimmed(
        automaton.store.rows[:count].copy(),
        program.code.class_of_byte,
        automaton.store.accepting[:count].astype(np.bool_),
        automaton.start,
    )


def _product(one: Dfa, other: Dfa, exclude: bool) -> Dfa:
    """Both, or (exclude) the first without the second; pairs of states, reachable ones only."""
    if one.is_empty or (other.is_empty and exclude):
        return one
    if other.is_empty:
        return other
    if (len(one.accepting) + 1) * (len(other.accepting) + 1) > MAX_GRID:
        raise GrammarTooLarge("a set operation on two patterns of too many states")
    paired = np.stack([one.class_of_byte, other.class_of_byte])
    class_of_byte, sample = byte_classes(paired)
    left = np.ascontiguousarray(one.transitions[:, one.class_of_byte[sample]])
    right = np.ascontiguousarray(other.transitions[:, other.class_of_byte[sample]])
    transitions, pairs, count = product(left, right, one.start, other.start, int(exclude), MAX_PRODUCT)
    if count < 0:
        raise GrammarTooLarge(f"a set operation with more than {MAX_PRODUCT:,} states")
    pairs = pairs[:count]
    accepting = one.accepting[pairs[:, 0]].copy()
    second = np.zeros(count, np.bool_)
    alive = pairs[:, 1] >= 0
    second[alive] = other.accepting[pairs[alive, 1]]
    accepting &= ~second if exclude else second
    return _trimmed(transitions[:count], class_of_byte, accepting, start=0)


def _trimmed(
    transitions: NDArray[np.int32], class_of_byte: NDArray[np.uint8], accepting: NDArray[np.bool_], start: int
) -> Dfa:
    """Without the states that cannot reach acceptance."""
    distance = distances_to_acceptance(transitions, accepting)
    live = distance >= 0
    number = np.where(live, np.cumsum(live) - 1, -1).astype(np.int32)
    if not live[start]:
        live[:] = False
        number[:] = -1
    kept = transitions[live]
    kept = np.where(kept >= 0, number[kept], -1).astype(np.int32)
    return Dfa(kept, class_of_byte, accepting[live], distance[live], max(int(number[start]), 0))


def resolved(expression: Expression, rule: RuleLookup, depth: int = 0) -> Expression:
    """With References replaced by what they name."""
    if depth > 200:
        raise InvalidGrammar("a set operation on a recursive rule")
    match expression:
        case Reference(name):
            return resolved(rule(name), rule, depth + 1)
        case Sequence(parts):
            return Sequence(tuple(resolved(part, rule, depth) for part in parts))
        case Choice(parts):
            return Choice(tuple(resolved(part, rule, depth) for part in parts))
        case Repeat(inner, low, high):
            return Repeat(resolved(inner, rule, depth), low, high)
        case Intersection(parts):
            return Intersection(tuple(resolved(part, rule, depth) for part in parts))
        case Difference(include, exclude):
            return Difference(resolved(include, rule, depth), resolved(exclude, rule, depth))
    return expression
