"""Reasoning before an output: a matcher that lets a model think until its end tag and then obeys another.

The thinking is free text up to the first end tag, held by an automaton of ours; the output's own matcher, of
whatever backend, begins behind it. So every kind of pattern and every backend can be reasoned about first.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarError
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.matcher import Matcher
from jfbatch.grammar.vocabulary import Vocabulary

CIRCLE = 120  # tokens of thinking that repeat the same few, after which the end tag is forced
PERIOD = 20  # tokens: the longest circle that is looked for


@dataclass(frozen=True, eq=False)
class Reasoning:
    """How outputs are thought about first.

    `grammar` is of a "reasoning" pattern; the end tag is forced after `limit` tokens of thinking.
    """

    grammar: Grammar
    limit: int

    def matcher(self, inner: Matcher) -> ReasoningMatcher:
        """A position at the start of the thinking; `inner` stands at the start of the output."""
        return ReasoningMatcher(self, inner)

    @cached_property
    def most_tokens(self) -> int:
        """The most tokens of the thinking and its end tag."""
        return self.limit + len(self.grammar.matcher().shortest_ending()) + 3  # a character may be unfinished


class ReasoningMatcher:
    """One row's position: in its thinking, or behind the end tag where `inner` goes on (see `Matcher`).

    A mask of the thinking holds no token that ends behind the end tag. But such a token is accepted, for
    the sake of texts that are tokenized as a whole: the rest of it is given to `inner` in tokens of its own.
    So is thinking past the limit, which only the masks and the forced bytes know of.
    """

    def __init__(self, reasoning: Reasoning, inner: Matcher) -> None:
        self._grammar = reasoning.grammar
        self._limit, self._most = reasoning.limit, reasoning.most_tokens
        self._inner = inner
        self._states = [self._grammar.automaton.start]
        self._thought: list[int] = []  # the tokens of the thinking; the last may end behind it
        self._steps: list[int] = []  # of each accepted token: how many `inner` took for it
        self._closing_from: int | None = None  # the length of the thinking at which a circle was noticed
        self._ending: bytes | None = None  # of the whole output, from its start

    @property
    def _is_thinking(self) -> bool:
        return not self._grammar.is_last(self._states[-1])

    @property
    def _must_close(self) -> bool:
        return len(self._thought) >= self._limit or self._closing_from is not None

    def unused_tokens(self) -> int:
        """How many tokens of `Reasoning.most_tokens` the thinking has left over; 0 while it goes on."""
        return 0 if self._is_thinking else max(self._most - len(self._thought), 0)

    def token_mask(self) -> NDArray[np.uint32]:
        if not self._is_thinking:
            return self._inner.token_mask()
        if self._must_close:
            mask = _tokens_along(self._grammar.vocabulary, self._closing())
            if mask.any():  # a vocabulary that cannot write the tag from here goes on until it can
                return mask
        return self._grammar.masks.mask(self._states[-1])

    def state_key(self) -> Hashable | None:
        """None while it thinks: what may come depends on all the thinking so far."""
        return None if self._is_thinking else self._inner.state_key()

    def accept_token(self, token_id: int) -> None:
        if not self._is_thinking:
            self._inner.accept_token(token_id)
            self._steps.append(1)
            return
        vocabulary = self._grammar.vocabulary
        content = 0 <= token_id < vocabulary.size and token_id not in vocabulary.end_ids
        data = vocabulary.token_bytes[token_id] if content else None
        if not data:
            raise GrammarError(f"token {token_id} is not allowed before the end of the reasoning")
        state = self._grammar.automaton.advance(self._states[-1], data)
        taken = 0
        if state < 0:
            state, taken = self._accept_across(data, token_id)
        self._states.append(state)
        self._thought.append(token_id)
        self._steps.append(taken)
        if self._closing_from is None and _goes_round(self._thought):
            self._closing_from = len(self._thought)

    def _accept_across(self, data: bytes, token_id: int) -> tuple[int, int]:
        """A token that ends behind the end tag: the state after the tag, and how many tokens `inner` took."""
        automaton, state = self._grammar.automaton, self._states[-1]
        for place in range(1, len(data)):
            state = automaton.advance(state, data[place - 1 : place])
            if state < 0:
                break
            if self._grammar.is_last(state):
                ids = _in_tokens(self._grammar.vocabulary, data[place:])
                for count, inner_id in enumerate(ids):
                    try:
                        self._inner.accept_token(inner_id)
                    except GrammarError:
                        self._inner.rollback(count)
                        raise
                return state, len(ids)
        raise GrammarError(f"token {token_id} ({data!r}) is not allowed here")

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._steps):
            raise GrammarError(f"cannot undo {count} tokens of {len(self._steps)}")
        inner = 0
        for _ in range(count):
            inner += self._steps.pop()
            if len(self._thought) > len(self._steps):
                self._thought.pop()
                self._states.pop()
        self._inner.rollback(inner)
        if self._closing_from is not None and len(self._thought) < self._closing_from:
            self._closing_from = None

    def forced_bytes(self) -> bytes:
        if not self._is_thinking:
            return self._inner.forced_bytes()
        if self._must_close:
            return self._closing() + self._inner.forced_bytes()
        forced = self._grammar.forced(self._states[-1])
        if forced and self._grammar.is_last(self._grammar.automaton.advance(self._states[-1], forced)):
            forced += self._inner.forced_bytes()
        return forced

    def is_accepting(self) -> bool:
        return not self._is_thinking and self._inner.is_accepting()

    def is_finished(self) -> bool:
        return not self._is_thinking and self._inner.is_finished()

    def shortest_ending(self) -> bytes:
        if not self._is_thinking:
            return self._inner.shortest_ending()
        if self._ending is None:
            self._ending = self._inner.shortest_ending()
        return self._closing() + self._ending

    def _closing(self) -> bytes:
        """The bytes that end the thinking from here."""
        return self._grammar.automaton.shortest_ending(self._states[-1])


def _goes_round(token_ids: list[int]) -> bool:
    """Whether the last CIRCLE tokens repeat with a period of at most PERIOD."""
    first = len(token_ids) - CIRCLE
    if first < 0:
        return False
    return any(
        token_ids[-1 - period] == token_ids[-1] and token_ids[first + period :] == token_ids[first:-period]
        for period in range(1, PERIOD + 1)
    )


@lru_cache(maxsize=4)
def _ids_by_text(vocabulary: Vocabulary) -> dict[bytes, list[int]]:
    ids: dict[bytes, list[int]] = {}
    for token_id, text in enumerate(vocabulary.token_bytes):
        if text:
            ids.setdefault(text, []).append(token_id)
    return ids


@lru_cache(maxsize=256)
def _tokens_along(vocabulary: Vocabulary, text: bytes) -> NDArray[np.uint32]:
    """uint32[words]: the tokens with which `text` can begin."""
    mask = np.zeros(vocabulary.words, np.uint32)
    ids = _ids_by_text(vocabulary)
    for length in range(1, len(text) + 1):
        for token_id in ids.get(text[:length], ()):
            mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    mask.setflags(write=False)
    return mask


def _in_tokens(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """`text` cut into the longest tokens, from the left. Raises GrammarError where no token fits."""
    ids, found, start = _ids_by_text(vocabulary), [], 0
    while start < len(text):
        stop = next((stop for stop in range(len(text), start, -1) if text[start:stop] in ids), None)
        if stop is None:
            raise GrammarError(f"no token writes {text[start:]!r}")
        found.append(ids[text[start:stop]][0])
        start = stop
    return found
