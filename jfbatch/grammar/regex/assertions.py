"""Trees with assertions to plain trees: what ^ $ \\b and look-arounds say moves into the texts beside them.

Conditions on one character are the business of `entries`. Longer look-aheads are resolved from the
end of the pattern backwards, where all that can follow is known, as an intersection or a difference
with it; look-behinds are look-aheads of the mirrored tree.
"""

from __future__ import annotations

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.regex.characters import complemented
from jfbatch.grammar.regex.entries import MAX_UNROLLED, Entry, entries_of, joined, merged_entries, mirrored
from jfbatch.grammar.regex.syntax import (
    ANY,
    ANY_TEXT,
    ANYTHING,
    AT_END,
    AT_START,
    EPSILON,
    Alternation,
    Characters,
    Concatenation,
    Context,
    Look,
    Node,
    Repetition,
    alternation,
    concatenation,
    conjunction,
    is_plain,
    nullable,
    repetition,
    subtraction,
    width,
)


def without_assertions(node: Node, search: bool) -> Node:
    """The plain tree of the whole texts that a pattern matches (search: in which it is found).

    Raises InvalidGrammar for look-arounds in places where they cannot be resolved.
    """
    branches = node.parts if isinstance(node, Alternation) else (node,)
    outer = [_without_outer_anchors(branch, search) for branch in branches]
    if all(branch is not None for branch in outer):
        return alternation([_absorbed(branch) for branch in outer if branch is not None])
    kinds = _long_looks(node)
    if kinds == {True, False}:
        raise InvalidGrammar(
            "look-ahead and look-behind of several characters in one pattern are not supported"
        )
    if kinds == {False}:
        return mirrored(_resolved(mirrored(node), search))
    return _resolved(node, search)


def _without_outer_anchors(node: Node, search: bool) -> Node | None:
    """The whole texts of a tree with no assertions but ^ before and $ behind it, else None."""
    parts = node.parts if isinstance(node, Concatenation) else (node,)
    starts = bool(parts) and parts[0] == AT_START
    ends = bool(parts) and parts[-1] == AT_END
    inner = parts[starts : len(parts) - ends]
    if not all(map(is_plain, inner)):
        return None
    free = [ANY_TEXT] if search else []
    return concatenation([*([] if starts else free), *inner, *([] if ends else free)])


def _resolved(node: Node, search: bool) -> Node:
    rest = [Entry(ANYTHING, ANY_TEXT if search else EPSILON, ANYTHING)]
    found = _before(node, rest)
    if search:
        found = joined([Entry(ANYTHING, ANY_TEXT, ANYTHING)], found)
    return alternation([_absorbed(entry.text) for entry in found if entry.left.edge])


def _absorbed(node: Node) -> Node:
    """The same texts, without what adds nothing beside "any text": optional parts and further rounds."""
    if isinstance(node, Alternation):
        return alternation([_absorbed(part) for part in node.parts])
    if not isinstance(node, Concatenation) or ANY_TEXT not in node.parts:
        return node
    parts = list(node.parts)
    for _ in range(2):  # what stands behind it, then (mirrored) before it
        kept: list[Node] = []
        for part in parts:
            if kept and kept[-1] == ANY_TEXT:
                if nullable(part):
                    continue
                if isinstance(part, Repetition):
                    part = repetition(part.inner, part.low, part.low)
            elif part == ANY_TEXT and kept:
                while kept and nullable(kept[-1]):
                    kept.pop()
            kept.append(part)
        parts = kept[::-1]
    return concatenation(parts)


def _long_looks(node: Node) -> set[bool]:
    """The directions (ahead or not) of the `Look`s in a tree."""
    match node:
        case Look(ahead, _, inner):
            return {ahead} | _long_looks(inner)
        case Concatenation(parts) | Alternation(parts):
            return {ahead for part in parts for ahead in _long_looks(part)}
        case Repetition(inner):
            return _long_looks(inner)
    return set()


def _before(node: Node, rest: list[Entry]) -> list[Entry]:
    """`node` followed by `rest`, which runs to the end of the text (so its right side is free)."""
    if not _long_looks(node):
        return _closed(joined(entries_of(node), rest))
    match node:
        case Concatenation(parts):
            for part in reversed(_grouped(parts)):
                rest = _before(part, rest)
            return rest
        case Alternation(parts):
            return merged_entries(entry for part in parts for entry in _before(part, rest))
        case Look(_, negative, inner):
            return _restricted(rest, _before(inner, [Entry(ANYTHING, ANY_TEXT, ANYTHING)]), negative)
        case Repetition(inner, low, high):
            return _unrolled(inner, low, high, rest)
    raise TypeError(f"not a tree with look-arounds: {node}")


def _closed(entries: list[Entry]) -> list[Entry]:
    """At the end of the text, right conditions are decided."""
    return merged_entries(Entry(entry.left, entry.text, ANYTHING) for entry in entries if entry.right.edge)


def _grouped(parts: tuple[Node, ...]) -> list[Node]:
    """Neighbours without long look-arounds as one part."""
    groups: list[Node] = []
    run: list[Node] = []
    for part in parts:
        if _long_looks(part):
            if run:
                groups.append(Concatenation(tuple(run)))
                run = []
            groups.append(part)
        else:
            run.append(part)
    if run:
        groups.append(Concatenation(tuple(run)))
    return groups


def _restricted(rest: list[Entry], seen: list[Entry], negative: bool) -> list[Entry]:
    """What follows a look-ahead: `rest` with (negative: without) the texts that start as `seen`."""
    if not negative:
        return merged_entries(
            Entry(one.left.both(other.left), conjunction(one.text, other.text), ANYTHING)
            for one in rest
            for other in seen
        )
    for other in seen:
        opposite = Context(complemented(other.left.ranges), not other.left.edge)
        rest = merged_entries(
            entry
            for one in rest
            for entry in (
                Entry(one.left.both(other.left), subtraction(one.text, other.text), ANYTHING),
                Entry(one.left.both(opposite), one.text, ANYTHING),
            )
        )
    return rest


def _unrolled(inner: Node, low: int, high: int | None, rest: list[Entry]) -> list[Entry]:
    tempered = _tempered(inner, low, high, rest)
    if tempered is not None:
        return [Entry(ANYTHING, tempered, ANYTHING)]
    if high is None or high > MAX_UNROLLED:
        raise InvalidGrammar("a look-around of several characters inside a repeat is not supported")
    result = rest if low == 0 else []
    for count in range(1, high + 1):
        rest = _before(inner, rest)
        if count >= low:
            result = merged_entries([*result, *rest])
    return result


def _tempered(inner: Node, low: int, high: int | None, rest: list[Entry]) -> Node | None:
    """(?:(?!B)C)* before the end of the text, or before B itself; None for anything else.

    Before the end no B stands anywhere; before B, of one width, this B is the first.
    """
    match inner:
        case Concatenation((Look(True, True, barred), Characters() as character)) if is_plain(barred):
            pass
        case _:
            return None
    if len(rest) != 1 or rest[0].left != ANYTHING or nullable(barred):
        return None
    run, following = repetition(character, low, high), rest[0].text
    if following == EPSILON:
        return subtraction(run, concatenation([ANY_TEXT, barred, ANY_TEXT]))
    parts = following.parts if isinstance(following, Concatenation) else (following,)
    start = barred.parts if isinstance(barred, Concatenation) else (barred,)
    least, most = width(barred)
    if least != most or parts[: len(start)] != start:
        return None
    earlier = concatenation([ANY_TEXT, barred, repetition(ANY, 1, None)])
    return concatenation([subtraction(concatenation([run, barred]), earlier), *parts[len(start) :]])
