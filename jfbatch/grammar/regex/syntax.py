"""Regular expressions as trees over characters, before anything is said about bytes.

Nodes are immutable values; the functions that build them keep them small. A zero-width assertion is
either a `Condition` on the one character beside a place or a general `Look`; trees without either are
called plain, and the questions below (nullable, width, first and last characters) are about those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

from jfbatch.grammar.regex.characters import ANY_CHARACTER, Ranges, intersected, normalised

Node = Union[
    "Characters",
    "Concatenation",
    "Alternation",
    "Repetition",
    "Conjunction",
    "Subtraction",
    "Condition",
    "Look",
]


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concatenation:
    """The parts one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Any one of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """`inner` from low to high times; high None is without end."""

    inner: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Conjunction:
    """The texts of both."""

    first: Node
    second: Node


@dataclass(frozen=True, slots=True)
class Subtraction:
    """The texts of `include` that are not texts of `exclude`."""

    include: Node
    exclude: Node


@dataclass(frozen=True, slots=True)
class Context:
    """What may stand beside a place: a character of `ranges`, or (`edge`) the end of the text."""

    ranges: Ranges
    edge: bool

    def both(self, other: Context) -> Context:
        if other is ANYTHING:
            return self
        return Context(intersected(self.ranges, other.ranges), self.edge and other.edge)


ANYTHING = Context(ANY_CHARACTER, True)


@dataclass(frozen=True, slots=True)
class Condition:
    """No text, at a place where `context` holds on its left (ahead False) or right (ahead True)."""

    ahead: bool
    context: Context


@dataclass(frozen=True, slots=True)
class Look:
    """No text, at a place that `inner` does (negative: does not) match up to or from."""

    ahead: bool
    negative: bool
    inner: Node


EPSILON = Concatenation(())
NOTHING = Alternation(())
ANY = Characters(ANY_CHARACTER)
ANY_TEXT = Repetition(ANY, 0, None)
AT_START = Condition(False, Context((), True))
AT_END = Condition(True, Context((), True))


@lru_cache(maxsize=4096)
def characters(ranges: Ranges) -> Node:
    """`Characters`; the empty set is NOTHING."""
    return Characters(ranges) if ranges else NOTHING


def concatenation(parts: Iterable[Node]) -> Node:
    """`Concatenation`, flattened; NOTHING if any part is."""
    flat: list[Node] = []
    for part in parts:
        if isinstance(part, Concatenation):
            flat.extend(part.parts)
        elif part is NOTHING or part == NOTHING:
            return NOTHING
        else:
            flat.append(part)
    return flat[0] if len(flat) == 1 else Concatenation(tuple(flat)) if flat else EPSILON


def alternation(parts: Iterable[Node]) -> Node:
    """`Alternation`, flattened, sets of characters joined, equal parts once."""
    flat: list[Node] = []
    seen: set[int] = set()
    ranges: list[tuple[int, int]] = []
    place = -1  # where the joined set of characters stands
    for part in parts:
        for piece in part.parts if isinstance(part, Alternation) else (part,):
            if isinstance(piece, Characters):
                ranges.extend(piece.ranges)
                if place < 0:
                    place = len(flat)
                    flat.append(piece)
            elif isinstance(piece, Repetition) and piece == ANY_TEXT:
                return ANY_TEXT
            else:
                key = id(EPSILON if piece == EPSILON else piece)
                if key not in seen:
                    seen.add(key)
                    flat.append(piece)
    if place >= 0:
        flat[place] = characters(normalised(ranges))
    return flat[0] if len(flat) == 1 else Alternation(tuple(flat)) if flat else NOTHING


def repetition(inner: Node, low: int, high: int | None) -> Node:
    """`Repetition` of a plain or conditioned node, with the trivial cases made plain."""
    if high is not None and high < low:
        return NOTHING
    if high == 0 or inner == EPSILON:
        return EPSILON
    if inner == NOTHING:
        return EPSILON if low == 0 else NOTHING
    if (low, high) == (1, 1):
        return inner
    if isinstance(inner, Repetition) and high is None and inner.low <= 1 and inner.high is None:
        return Repetition(inner.inner, low * inner.low, None)
    if isinstance(inner, Condition | Look):
        return inner if low else EPSILON
    return Repetition(inner, low, high)


def conjunction(first: Node, second: Node) -> Node:
    """`Conjunction` of plain nodes, done away with where the tree itself can say it."""
    if second == ANY_TEXT or first == second:
        return first
    if first == ANY_TEXT:
        return second
    low, high = width(first)
    other_low, other_high = width(second)
    if NOTHING in (first, second) or _less(high, other_low) or _less(other_high, low):
        return NOTHING
    for one, other in ((first, second), (second, first)):
        if isinstance(other, Repetition) and isinstance(other.inner, Characters):
            kept = over(one, other.inner.ranges)
            bounded = with_width(kept, other.low, other.high)
            if bounded is not None:
                return bounded
            if other.inner == ANY:  # a length: only the sides that do not hold anyway
                least, most = width(kept)
                low = 0 if least >= other.low else other.low
                is_within = most is not None and other.high is not None and most <= other.high
                return Conjunction(kept, Repetition(ANY, low, None if is_within else other.high))
    return Conjunction(first, second)


def subtraction(include: Node, exclude: Node) -> Node:
    """`Subtraction` of plain nodes."""
    if NOTHING in (include, exclude):
        return include
    if exclude == ANY_TEXT or include == exclude:
        return NOTHING
    low, high = width(include)
    other_low, other_high = width(exclude)
    if _less(high, other_low) or _less(other_high, low):
        return include
    if include == EPSILON and nullable(exclude):
        return NOTHING
    return Subtraction(include, exclude)


def _less(high: int | None, low: int) -> bool:
    return high is not None and high < low


def is_plain(node: Node) -> bool:
    """Whether a tree has no assertion."""
    match node:
        case Characters():
            return True
        case Concatenation(parts) | Alternation(parts):
            return all(map(is_plain, parts))
        case Repetition(inner):
            return is_plain(inner)
        case Condition() | Look():
            return False
    return True  # set operations are made of plain trees only


def nullable(node: Node) -> bool:
    """Whether a plain tree matches the empty text."""
    match node:
        case Characters():
            return False
        case Concatenation(parts):
            return all(map(nullable, parts))
        case Alternation(parts):
            return any(map(nullable, parts))
        case Repetition(inner, low):
            return low == 0 or nullable(inner)
        case Conjunction(first, second):
            return nullable(first) and nullable(second)
        case Subtraction(include, exclude):
            return nullable(include) and not nullable(exclude)
    raise TypeError(f"an assertion has no text: {node}")


def width(node: Node) -> tuple[int, int | None]:
    """Least and most characters of a tree's texts (bounds, for set operations); assertions have none."""
    match node:
        case Characters():
            return 1, 1
        case Concatenation(parts):
            widths = [width(part) for part in parts]
            highs = [high for _, high in widths if high is not None]
            return sum(low for low, _ in widths), sum(highs) if len(highs) == len(widths) else None
        case Alternation(parts):
            widths = [width(part) for part in parts]
            if not widths:
                return 0, 0
            highs = [high for _, high in widths if high is not None]
            return min(low for low, _ in widths), max(highs) if len(highs) == len(widths) else None
        case Repetition(inner, low_count, high_count):
            low, most = width(inner)
            if most == 0:
                return 0, 0
            return low * low_count, None if high_count is None or most is None else most * high_count
        case Conjunction(first, second):
            (low, most), (other_low, other_most) = width(first), width(second)
            known = [most for most in (most, other_most) if most is not None]
            return max(low, other_low), min(known) if known else None
        case Subtraction(include):
            return width(include)
    return 0, 0


def over(node: Node, ranges: Ranges) -> Node:
    """The texts of a plain tree that are made of these characters only."""
    if ranges == ANY_CHARACTER:
        return node
    match node:
        case Characters(own):
            return characters(intersected(own, ranges))
        case Concatenation(parts):
            return concatenation([over(part, ranges) for part in parts])
        case Alternation(parts):
            return alternation([over(part, ranges) for part in parts])
        case Repetition(inner, low, high):
            return repetition(over(inner, ranges), low, high)
        case Conjunction(first, second):
            return conjunction(over(first, ranges), second)
        case Subtraction(include, exclude):
            return subtraction(over(include, ranges), exclude)
    raise TypeError(f"an assertion has no text: {node}")


MAX_SPREAD = 8  # widths of a part that are told apart when lengths are pushed into a tree


def with_width(node: Node, low: int, high: int | None) -> Node | None:
    """The texts of a plain tree with low..high characters, or None if the tree cannot say it briefly."""
    least, most = width(node)
    if _less(most, low) or _less(high, least):
        return NOTHING
    if low <= least and (high is None or (most is not None and most <= high)):
        return node
    match node:
        case Alternation(parts):
            bounded = [with_width(part, low, high) for part in parts]
            return None if None in bounded else alternation([part for part in bounded if part is not None])
        case Repetition(inner, low_count, high_count):
            size, size_most = width(inner)
            if size != size_most or size == 0:
                return None
            low_count = max(low_count, -(-low // size))
            if high is not None:
                most_count = high // size
                high_count = most_count if high_count is None else min(high_count, most_count)
            return repetition(inner, low_count, high_count)
        case Concatenation(parts):
            return _concatenation_with_width(parts, low, high)
    return None


def _concatenation_with_width(parts: tuple[Node, ...], low: int, high: int | None) -> Node | None:
    widths = [width(part) for part in parts]
    variable = [i for i, (least, most) in enumerate(widths) if least != most]
    fixed = sum(least for least, most in widths if least == most)
    if len(variable) == 1:
        index = variable[0]
        bounded = with_width(parts[index], max(0, low - fixed), None if high is None else high - fixed)
        return None if bounded is None else concatenation([*parts[:index], bounded, *parts[index + 1 :]])
    spreads = [(most - least, i) for i in variable for least, most in (widths[i],) if most is not None]
    if not spreads or len(variable) > 3:
        return None
    spread, index = min(spreads)
    if spread > MAX_SPREAD:
        return None
    options = []
    least = widths[index][0]
    for size in range(least, least + spread + 1):
        part = with_width(parts[index], size, size)
        if part is None:
            return None
        if part != NOTHING:
            whole = with_width(concatenation([*parts[:index], part, *parts[index + 1 :]]), low, high)
            if whole is None:
                return None
            options.append(whole)
    return alternation(options)
