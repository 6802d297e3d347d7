"""Expressions: immutable descriptions of sets of byte strings, which every front end builds.

A grammar is one expression plus named rules that `Reference`s point to; recursion goes through
rules only. Bounded repeats stay `Repeat`, never unrolled. `Intersection` and `Difference` are for
regular parts only (no recursion below them): they become one explicit automaton with live states
only, so that no reachable state is a dead end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Union

Expression = Union[
    "Literal",
    "ByteSet",
    "Sequence",
    "Choice",
    "Repeat",
    "Reference",
    "Intersection",
    "Difference",
    "ExplicitAutomaton",
    "TextExcept",
]


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly these bytes; Literal(b"") is the empty text."""

    data: bytes


@dataclass(frozen=True, slots=True)
class ByteSet:
    """One byte out of a set. Bit b of `bits` (a 256-bit integer) says whether byte b belongs."""

    bits: int

    @staticmethod
    def of(members: Iterable[int]) -> ByteSet:
        bits = 0
        for byte in members:
            bits |= 1 << byte
        return ByteSet(bits)

    @staticmethod
    def span(low: int, high: int) -> ByteSet:
        """The bytes low..high, both included."""
        return ByteSet(((1 << (high - low + 1)) - 1) << low)

    def __contains__(self, byte: int) -> bool:
        return bool(self.bits >> byte & 1)


@dataclass(frozen=True, slots=True)
class Sequence:
    """The parts one after the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of the parts; Choice(()) matches nothing at all."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`inner` from low to high times, both included; high None is without end."""

    inner: Expression
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """The rule of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Intersection:
    """The texts that every part matches. Parts are regular (References below must not recurse)."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The texts that `include` matches and `exclude` does not. Both are regular."""

    include: Expression
    exclude: Expression


@dataclass(frozen=True, slots=True)
class ExplicitAutomaton:
    """An explicit deterministic automaton over bytes, for what no short expression says (multiples of 7).

    State 0 is the start. `transitions[s]` holds disjoint (byte set as in ByteSet.bits, next state)
    pairs; `accepting[s]` says whether the text may end in s. Every state is reachable and reaches an
    accepting one.
    """

    transitions: tuple[tuple[tuple[int, int], ...], ...]
    accepting: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TextExcept:
    """Free text that is none of the `words`, for the undeclared keys of an object.

    `text` is all free text; `plain` (bits as in ByteSet) are the bytes that are a whole character each;
    `not_plain` is the free text that does not start with one. The words hold plain bytes only, sorted.
    The same language as `difference`, but a program can write it down as a trie turned inside out.
    """

    words: tuple[bytes, ...]
    plain: int
    text: Expression
    not_plain: Expression

    @property
    def difference(self) -> Difference:
        return Difference(self.text, Choice(tuple(map(Literal, self.words))))


@dataclass(frozen=True)
class RuleSet:
    """A start expression and the rules its References name."""

    start: Expression
    rules: Mapping[str, Expression] = field(default_factory=dict)


EMPTY = Literal(b"")
NOTHING = Choice(())


def literal(text: str | bytes) -> Literal:
    """A literal from text (as UTF-8) or bytes."""
    return Literal(text.encode("utf-8") if isinstance(text, str) else text)


def sequence(*parts: Expression) -> Expression:
    """`Sequence`, flattened; neighbouring literals joined; NOTHING if any part is NOTHING."""
    flat: list[Expression] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Sequence) else (part,):
            if isinstance(piece, Literal):
                if not piece.data:
                    continue
                if flat and isinstance(flat[-1], Literal):
                    flat[-1] = Literal(flat[-1].data + piece.data)
                    continue
            if piece == NOTHING:
                return NOTHING
            flat.append(piece)
    if not flat:
        return EMPTY
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(*parts: Expression) -> Expression:
    """`Choice`, flattened, doubles removed, NOTHING dropped; a single part stands for itself.

    Doubles of composite parts are known by identity: hashing whole trees at every level is quadratic.
    """
    flat: list[Expression] = []
    seen: set[Expression | int] = set()
    for part in parts:
        for piece in part.parts if isinstance(part, Choice) else (part,):
            key = piece if isinstance(piece, Literal | ByteSet | Reference) else id(piece)
            if key not in seen:
                seen.add(key)
                flat.append(piece)
    return flat[0] if len(flat) == 1 else Choice(tuple(flat))


def optional(inner: Expression) -> Expression:
    """`inner` or the empty text."""
    return Repeat(inner, 0, 1)


def repeat(inner: Expression, low: int = 0, high: int | None = None) -> Expression:
    """`Repeat`, with the trivial cases made plain."""
    if high is not None and high < low:
        return NOTHING
    if high == 0:
        return EMPTY
    if inner == EMPTY:
        return EMPTY
    if inner == NOTHING:
        return EMPTY if low == 0 else NOTHING
    return inner if (low, high) == (1, 1) else Repeat(inner, low, high)
