"""Short endings for engines that have no call for them, found on a twin of the grammar over single bytes.

Three sources, each confirmed by the engine itself: the ending known before the last tokens, shortened or
as it was; our own automaton of the same pattern, where there is one; a bounded best-first search.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar.backends.oracle import Oracle

MOST_STEPS = 20_000
"""Bytes that one search tries; a few microseconds each."""

_SHORTENED = 8  # first bytes of the last ending that may have become needless
_ALL = 40  # allowed bytes that are all tried; of more, only some of each sort
_TWINS = 3  # positions of one depth and one mask that are looked at: they are mostly the same one
_SPLICED = 32  # first positions of a search at which the last ending is tried, too

# What a byte costs in a search. Choices count, forced bytes hardly: so an ending with few choices is
# found first, and the many texts that a free string could hold are looked at late.
_FORCED, _CHOICE, _AGAIN = 0.05, 1.0, 3.0


class ByteWalk(Protocol):
    """A place in a grammar, moved by single bytes."""

    def allowed(self) -> bytes:
        """The bytes that may come next, in order."""
        ...

    def step(self, byte: int) -> bool:
        """Move past a byte; False, and not moved, if it is not allowed."""
        ...

    def undo(self, count: int) -> None:
        """Take back the last `count` bytes."""
        ...

    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        ...

    def completes(self, text: bytes) -> bool:
        """Whether the text so far and `text` are complete together. Does not move."""
        ...

    def copy(self) -> ByteWalk:
        """A walk of its own at the same place."""
        ...


class Endings:
    """What the rows of one grammar share: the twin's start, our own automaton, the first ending.

    They are made on first use (`prepare` does it ahead): the engine's grammar is ready before.
    """

    def __init__(self, twin: Callable[[], ByteWalk], oracle: Oracle) -> None:
        self.oracle = oracle
        self.first: bytes | None = None
        self._make_twin = twin
        self._lock = threading.Lock()
        self._start: ByteWalk | None = None

    def prepare(self) -> ByteWalk:
        """The twin at its start; not to be moved. Raises InvalidGrammar if it cannot be made."""
        with self._lock:
            if self._start is None:
                walk = self._make_twin()
                self.first = self.from_oracle(b"", walk)
                if self.first is None and (found := search(walk)) is not None:
                    self.first = shortened(walk, found)
                self._start = walk
            return self._start

    def from_oracle(self, text: bytes, walk: ByteWalk) -> bytes | None:
        """The ending of `text` that our own automaton knows, if `walk`, which stands after it, agrees."""
        ending = self.oracle.ending(text)
        return ending if ending is not None and walk.completes(ending) else None


class RowEndings:
    """The endings of one row: a twin that follows its text, and the endings met on the way."""

    def __init__(self, shared: Endings) -> None:
        self._shared = shared
        self._walk: ByteWalk | None = None
        self._text = b""  # where the walk stands
        self._known: list[tuple[int, bytes]] = []  # (length of text, its ending), ascending

    def ending(self, text: bytes) -> bytes:
        """A short text that completes `text`. Raises GrammarError if none is found."""
        walk = self._follow(text)
        if walk.accepting():
            return b""
        length, last = self._known[-1] if self._known else (0, b"")
        if self._known and length == len(text):
            return last
        found = None
        if self._known:
            found = _reuse(walk, text[length:], last)
        if found is None:
            found = self._shared.from_oracle(text, walk)
        if found is None:
            found = search(walk, last)
        if found is None:
            raise GrammarError(f"no ending of the output was found within {MOST_STEPS:,} steps")
        self._known.append((len(text), found))
        return found

    def copy(self) -> RowEndings:
        """The same, for a copy of the row."""
        other = RowEndings(self._shared)
        other._walk = self._walk.copy() if self._walk is not None else None
        other._text, other._known = self._text, self._known.copy()
        return other

    def _follow(self, text: bytes) -> ByteWalk:
        """The walk, brought to the end of `text`."""
        if self._walk is None:
            try:
                self._walk = self._shared.prepare().copy()
            except InvalidGrammar as error:
                raise GrammarError(f"no ending can be looked for: {error}") from None
            if self._shared.first is not None:
                self._known = [(0, self._shared.first)]
        walk = self._walk
        if not text.startswith(self._text):
            same = _common(text, self._text)
            walk.undo(len(self._text) - same)
            self._text = self._text[:same]
            while self._known and self._known[-1][0] > same:
                self._known.pop()
        for number, byte in enumerate(text[len(self._text) :]):
            if not walk.step(byte):
                walk.undo(number)
                raise GrammarError("the backend refuses, byte by byte, what it allowed as tokens")
        self._text = text
        return walk


def _common(left: bytes, right: bytes) -> int:
    """How many first bytes are the same."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


def _reuse(walk: ByteWalk, since: bytes, last: bytes) -> bytes | None:
    """What is left of the last known ending after `since` was written; None if it has become useless."""
    if last.startswith(since):
        return last[len(since) :]
    for start in range(min(len(since), len(last), _SHORTENED), -1, -1):
        if walk.completes(last[start:]):
            return last[start:]
    return None


def search(start: ByteWalk, last: bytes = b"") -> bytes | None:
    """A short text that completes the output from `start`; None if MOST_STEPS bytes did not lead to one.

    Best-first over bytes. An engine's positions cannot be compared, so those that are as deep and allow the
    same bytes are taken for the same after the first few. `last` is an ending that was right a few bytes
    ago: the rest of the new one is often a part of it.
    """
    order = count()
    heap: list[tuple[float, int, ByteWalk, bytes]] = [(0.0, next(order), start.copy(), b"")]
    met: Counter[tuple[int, bytes]] = Counter()
    steps = looked_at = 0
    while heap and steps < MOST_STEPS:
        cost, _, walk, text = heapq.heappop(heap)
        if walk.accepting():
            return text
        allowed = walk.allowed()
        looked_at += 1
        if last and looked_at <= _SPLICED:
            for rest in _parts(last, allowed):
                if walk.completes(rest):
                    return text + rest
        for byte in _branches(allowed):
            steps += 1
            child = walk.copy()
            if not child.step(byte):
                continue
            after = child.allowed()
            place = (len(text), after)
            met[place] += 1
            if met[place] <= _TWINS:
                price = _FORCED if len(allowed) == 1 else _AGAIN if after == allowed else _CHOICE
                heapq.heappush(heap, (cost + price, next(order), child, text + bytes([byte])))
    return None


def shortened(start: ByteWalk, ending: bytes) -> bytes:
    """The ending without all pieces, longest first, that can be left out one after another.

    A search counts choices more than bytes; this makes up for it where there is time, in O(length^2) calls.
    """
    length, calls = len(ending) - 1, 0
    while length > 0 and calls < MOST_STEPS:
        for at in range(len(ending) - length + 1):
            calls += 1
            rest = ending[:at] + ending[at + length :]
            if start.completes(rest):
                ending = rest
                break
        else:
            length -= 1
        length = min(length, len(ending))
    return ending


def _parts(last: bytes, allowed: bytes) -> Iterator[bytes]:
    """The ends of `last` that could come next, the shortest first."""
    for start in range(len(last) - 1, -1, -1):
        if last[start] in allowed:
            yield last[start:]


def _branches(allowed: bytes) -> bytes:
    """The bytes to try: all if they are few, else signs and one each of the other sorts."""
    if len(allowed) <= _ALL:
        return allowed
    sorts: dict[str, int] = {}
    for byte in allowed:
        sorts.setdefault(_sort(byte), byte)
    return bytes(sorted(sorts.values()))


def _sort(byte: int) -> str:
    character = chr(byte)
    if byte >= 0x80:
        return "beyond ASCII"
    if character.isdigit():
        return "digit"
    if character.isalpha():
        return "upper" if character.isupper() else "lower"
    return character if character.isprintable() or character == "\n" else "control"
