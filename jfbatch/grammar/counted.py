"""Patterns with a bounded length, without multiplying states by lengths.

A string that must match a pattern and have at most 5000 characters is a product; its states are
(pattern state, characters so far). Only the pattern's states are made: the machine counts in a stack
frame, and a bitmap (states x lengths) says which pairs can still be completed, so that none of the
others is ever entered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar.expression import Expression, Intersection, Repeat
from jfbatch.grammar.language import Dfa, RuleLookup, dfa_of, resolved
from jfbatch.grammar.products import characters_to_acceptance, live_counts, paired_states

WORTH_COUNTING = 4096  # pairs of state and length from which on counting beats the product
MAX_PAIRS = 64_000_000  # bytes of the bitmap


@dataclass(frozen=True, eq=False)
class CountedDfa:
    """A pattern's automaton over whole characters and how many of them there may be.

    dfa        Q states; reads characters only
    boundary   uint8[Q]            whether a character has just been completed (or none begun)
    reach      uint8[high + 1, Q]  reach[k, q]: from q, k more completed characters can end at acceptance
    live       uint8[high + 1, Q]  live[n, q]: after n characters in q, some completion stays in bounds
    spread     most over q of the fewest characters that q needs
    """

    dfa: Dfa
    low: int
    high: int
    boundary: NDArray[np.uint8]
    reach: NDArray[np.uint8]
    live: NDArray[np.uint8]
    spread: int

    @property
    def is_empty(self) -> bool:
        return self.dfa.is_empty or not self.live[0, self.dfa.start]

    @property
    def accepts_empty_text(self) -> bool:
        return not self.is_empty and self.low == 0 and self.dfa.accepts_empty_text


def leaf_of(
    expression: Expression, rule: RuleLookup | None = None, character: Expression | None = None
) -> Dfa | CountedDfa:
    """The explicit automaton of a set operation, counting where a length meets a pattern.

    `character` is the expression of one free character: what a length counts. `rule` as in dfa_of.
    """
    return _leaf(resolved(expression, rule) if rule else expression, character)


@lru_cache(maxsize=256)
def _leaf(expression: Expression, character: Expression | None) -> Dfa | CountedDfa:
    parts = _flattened(expression)
    lengths = [part for part in parts if _is_length(part, character)]
    patterns = [part for part in parts if not _is_length(part, character)]
    if not lengths or not patterns or character is None:
        return dfa_of(expression)
    low = max(length.low for length in lengths)
    highs = [length.high for length in lengths if length.high is not None]
    characters = Repeat(character, 0, None)
    pattern = dfa_of(Intersection((*patterns, characters)))
    if not highs or len(pattern.accepting) * (min(highs) + 1) < WORTH_COUNTING:
        return dfa_of(expression)
    return counted(pattern, dfa_of(characters), low, min(highs))


def _flattened(expression: Expression) -> list[Expression]:
    if isinstance(expression, Intersection):
        return [piece for part in expression.parts for piece in _flattened(part)]
    return [expression]


def _is_length(part: Expression, character: Expression | None) -> TypeGuard[Repeat]:
    return isinstance(part, Repeat) and part.inner == character


def counted(pattern: Dfa, characters: Dfa, low: int, high: int) -> CountedDfa:
    """`pattern` (texts of whole characters only) with low..high characters.

    `characters` is the automaton of any number of characters. Raises GrammarTooLarge past MAX_PAIRS.
    """
    states = len(pattern.accepting)
    if states * (high + 1) > MAX_PAIRS:
        raise GrammarTooLarge(f"a pattern of {states:,} states with up to {high:,} characters")
    if pattern.is_empty:
        nothing = np.zeros((1, 1), np.uint8)
        return CountedDfa(pattern, low, high, nothing[0], nothing, nothing, 0)
    at = paired_states(
        pattern.transitions,
        np.ascontiguousarray(characters.transitions),
        pattern.class_of_byte,
        characters.class_of_byte,
        pattern.start,
        characters.start,
    )
    boundary = (characters.accepting[at]).astype(np.uint8)
    reach = characters_to_acceptance(pattern.transitions, pattern.accepting, boundary, high)
    fewest = np.where(reach.any(axis=0), reach.argmax(axis=0), 0)
    return CountedDfa(
        pattern, low, high, boundary, reach, live_counts(reach, low, high), int(fewest.max(initial=0))
    )
