"""The Matcher protocol over outlines-core (a complete DFA with a token list per state, in Rust).

Its index is walked by state, so everything that a position knows is remembered per state and shared by
all rows; endings are exact.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar.backends.oracle import Oracle
from jfbatch.grammar.backends.position import PositionMatcher, bitmask
from jfbatch.grammar.backends.protocol import BackendName, Capabilities, literal_regex, one_line
from jfbatch.grammar.grammar import JsonStyle, Objects
from jfbatch.grammar.matcher import new_serial
from jfbatch.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from outlines_core import Index
    from outlines_core import Vocabulary as IndexVocabulary

CAPABILITIES = Capabilities(
    name="outlines",
    title="outlines-core",
    tested_version="0.2.14",
    kinds={
        "schema": "turned into one regular expression; passes over keywords it does not implement",
        "regex": "Rust's syntax: no look-around, no back-references, no \\b, no anchors; "
        "the first alternative that matches wins",
        "choice": "",
    },
    styles=("compact",),
    vouches=False,
    recursion="three levels",
    undeclared_properties="never",
    forced_bytes="by walking its index",
    endings="exact, from its index",
    rollback="a state per token; any number of tokens",
    notes=(
        "It makes a token list for every state of the whole automaton: compiling takes seconds to minutes "
        "with a vocabulary of 100,000 tokens, so raise `--compile-timeout`.",
    ),
)

_MASK_MEMORY = 64 * 2**20  # bytes of masks that one grammar keeps
_Result = TypeVar("_Result")
_LONGEST_FORCED = 4096  # a pattern such as a{1000000} forces more than anyone will take at once


class OutlinesBackend:
    """outlines-core with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @cached_property
    def _tokens(self) -> IndexVocabulary:
        """Our vocabulary as outlines-core's. It has one id more, which ends an output (position.py)."""
        from outlines_core import Vocabulary as IndexVocabulary

        ids: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(self.vocabulary.token_bytes):
            if text:
                ids.setdefault(text, []).append(token_id)
        return IndexVocabulary(self.vocabulary.size, ids)

    def compile(self, kind: str, text: str, style: JsonStyle, objects: Objects) -> OutlinesGrammar:
        """See `protocol.Backend`."""
        from outlines_core import Index

        regex = _call(lambda: regex_of(kind, text))
        index = _call(lambda: Index(regex, self._tokens))
        return OutlinesGrammar(index, self.vocabulary, Oracle(kind, text, style, objects))


class OutlinesGrammar:
    """A pattern compiled by outlines-core, and what was learnt of its states."""

    def __init__(self, index: Index, vocabulary: Vocabulary, oracle: Oracle) -> None:
        self.serial = new_serial()
        self.index = index
        self.vocabulary = vocabulary
        self.oracle = oracle
        self.unenforced: tuple[str, ...] = (f"what {CAPABILITIES.title} leaves out",)
        self.warnings: tuple[str, ...] = ()
        self.start: int = index.get_initial_state()
        self._lock = threading.Lock()
        self._masks: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        self._forced: dict[int, bytes] = {}
        self._next: dict[int, tuple[bytes, int]] = {}  # state -> first step of a shortest ending, its target
        texts = vocabulary.token_bytes
        self._first_byte = np.array([text[0] if text else 0 for text in texts], np.uint8)
        self._single = {text[0]: id_ for id_, text in enumerate(texts) if text and len(text) == 1}

    @property
    def backend(self) -> BackendName:
        return "outlines"

    def matcher(self) -> PositionMatcher:
        """A new position at the start of an output."""
        return PositionMatcher(_Position(self, [self.start]), self.vocabulary)

    def prepare(self) -> None:
        """Find the first ending ahead."""
        self.ending(self.start)

    def fault(self, text: bytes) -> str | None:
        """See `protocol.CompiledGrammar`."""
        return self.oracle.fault(text)

    def mask(self, state: int) -> NDArray[np.uint32]:
        """uint32[ceil(V/32)], shared: not to be written to."""
        with self._lock:
            mask = self._masks.get(state)
            if mask is None:
                mask = self._masks[state] = bitmask(self._allowed(state), self.vocabulary.words)
                while len(self._masks) * mask.nbytes > _MASK_MEMORY and len(self._masks) > 1:
                    self._masks.popitem(last=False)
            else:
                self._masks.move_to_end(state)
            return mask

    def forced(self, state: int) -> bytes:
        """The bytes that all tokens of this state and the following ones begin with, one after another."""
        found = self._forced.get(state)
        if found is None:
            text, here = bytearray(), state
            while len(text) < _LONGEST_FORCED and not self.index.is_final_state(here):
                first = np.unique(self._first_byte[self._allowed(here)])
                token_id = self._single.get(int(first[0])) if len(first) == 1 else None
                if token_id is None:
                    break
                text.append(int(first[0]))
                here = self.index.get_next_state(here, token_id)
            found = self._forced[state] = bytes(text)
        return found

    def ending(self, state: int) -> bytes | None:
        """A shortest text from this state to a final one; None if there is none."""
        text = b""
        while not self.index.is_final_state(state):
            with self._lock:
                if state not in self._next:  # some are reached by longer tokens only
                    self._next.update(shortest_steps(self.index, state, self._steps))
            if state not in self._next:
                return None
            step, state = self._next[state]
            text += step
        return text

    @cached_property
    def _steps(self) -> list[tuple[int, bytes]]:
        """Tokens that lead everywhere: single bytes, and all that hold a byte without a token of its own."""
        single = set(self._single)
        return [
            (token_id, text)
            for token_id, text in enumerate(self.vocabulary.token_bytes)
            if text
            and ((len(text) == 1 and self._single[text[0]] == token_id) or not single.issuperset(text))
        ]

    def _allowed(self, state: int) -> NDArray[np.int64]:
        """The ids of the content tokens that this state allows."""
        ids = np.array(self.index.get_allowed_tokens(state) or [], np.int64)
        return ids[ids < self.vocabulary.size]


class _Position:
    """See `position.Position`: the state after each token."""

    def __init__(self, grammar: OutlinesGrammar, states: list[int]) -> None:
        self._grammar = grammar
        self._states = states

    def mask(self) -> NDArray[np.uint32]:
        return self._grammar.mask(self._states[-1]).copy()

    def key(self) -> Hashable:
        return self._grammar.serial, self._states[-1]

    def advance(self, token_id: int) -> bool:
        target = self._grammar.index.get_next_state(self._states[-1], token_id)
        if target is None:
            return False
        self._states.append(target)
        return True

    def undo(self, count: int) -> None:
        del self._states[-count:]

    def accepting(self) -> bool:
        return bool(self._grammar.index.is_final_state(self._states[-1]))

    def forced(self) -> bytes:
        return self._grammar.forced(self._states[-1])

    def ending(self, text: bytes) -> bytes:
        ending = self._grammar.ending(self._states[-1])
        if ending is None:
            raise GrammarError("outlines: no text of this vocabulary completes the output")
        return ending

    def copy(self) -> _Position:
        return _Position(self._grammar, self._states.copy())


def shortest_steps(index: Index, start: int, steps: list[tuple[int, bytes]]) -> dict[int, tuple[bytes, int]]:
    """For each state that `steps` (token ids and texts) reach: text and target of a step towards its end.

    Bellman-Ford over all states at once: as many rounds as the longest of the shortest ways has steps.
    """
    states = [start]
    number = {start: 0}
    edges = array("q")  # source, target, step; in the order of sources
    for source, state in enumerate(states):
        for step, (token_id, _) in enumerate(steps):
            target = index.get_next_state(state, token_id)
            if target is None:
                continue
            if target not in number:
                number[target] = len(states)
                states.append(target)
            edges.extend((source, number[target], step))
    sources, targets, chosen = np.array(edges, np.int64).reshape(-1, 3).T
    lengths = np.array([len(text) for _, text in steps], np.int64)[chosen]
    far = np.int64(2**40)
    distance = np.array([0 if index.is_final_state(state) else far for state in states])
    moving, first = np.unique(sources, return_index=True)
    while len(moving):
        best = np.minimum(np.minimum.reduceat(distance[targets] + lengths, first), distance[moving])
        if np.array_equal(best, distance[moving]):
            break
        distance[moving] = best
    good = np.flatnonzero((distance[sources] == distance[targets] + lengths) & (distance[sources] < far))
    return {
        states[sources[edge]]: (steps[chosen[edge]][1], states[targets[edge]]) for edge in good[::-1].tolist()
    }


def regex_of(kind: str, text: str) -> str:
    """A pattern as the regular expression that outlines-core compiles. ValueError is its own."""
    if kind == "schema":
        from outlines_core.json_schema import build_regex_from_schema

        regex: str = build_regex_from_schema(text, whitespace_pattern="")
        return regex
    if kind == "choice":
        # The first alternative that matches wins: a text has to come after those that go on from it.
        return "|".join(map(literal_regex, sorted(json.loads(text), key=len, reverse=True)))
    if kind == "regex":
        return text
    raise InvalidGrammar(f"outlines: patterns of kind {kind!r} are not supported")


def _call(function: Callable[[], _Result]) -> _Result:
    """What `function` of outlines-core gives. Raises InvalidGrammar with its reason, panics included."""
    try:
        return function()
    except ValueError as error:
        raise InvalidGrammar(f"outlines: {one_line(str(error))}") from None
    except BaseException as error:  # a Rust panic derives from nothing else
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidGrammar(f"outlines: it broke off: {one_line(str(error))}") from None
