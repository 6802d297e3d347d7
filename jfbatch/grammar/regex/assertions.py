"""Trees with assertions to plain trees: what ^ $ \\b and look-arounds say moves into the texts beside them.

An `Entry` is a plain tree with a condition on the character before its text and one on the character
after it. Entries concatenate and repeat exactly: a condition that faces a neighbour restricts the
neighbour's first or last character, one that faces empty text is handed on. Longer look-aheads are
resolved from the end of the pattern backwards, where all that can follow is known, as an
intersection or a difference with it; look-behinds are look-aheads of the mirrored tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar.regex.characters import complemented, intersected
from jfbatch.grammar.regex.syntax import (
    ANY,
    ANY_TEXT,
    ANYTHING,
    EPSILON,
    NOTHING,
    Alternation,
    Characters,
    Concatenation,
    Condition,
    Conjunction,
    Context,
    Look,
    Node,
    Repetition,
    Subtraction,
    alternation,
    characters,
    concatenation,
    conjunction,
    is_plain,
    nullable,
    repetition,
    subtraction,
    width,
)

MAX_ENTRIES = 64
MAX_UNROLLED = 16  # copies of a repeated group whose rounds have different conditions


@dataclass(frozen=True, slots=True)
class Entry:
    """A plain text with what must stand before (`left`) and after it (`right`)."""

    left: Context
    text: Node
    right: Context


def without_assertions(node: Node, search: bool) -> Node:
    """The plain tree of the whole texts that a pattern matches (search: in which it is found).

    Raises InvalidGrammar for look-arounds in places where they cannot be resolved.
    """
    if is_plain(node):
        return _absorbed(concatenation([ANY_TEXT, node, ANY_TEXT])) if search else node
    kinds = _long_looks(node)
    if kinds == {True, False}:
        raise InvalidGrammar(
            "look-ahead and look-behind of several characters in one pattern are not supported"
        )
    if kinds == {False}:
        return mirrored(_resolved(mirrored(node), search))
    return _resolved(node, search)


def _resolved(node: Node, search: bool) -> Node:
    rest = [Entry(ANYTHING, ANY_TEXT if search else EPSILON, ANYTHING)]
    found = _before(node, rest)
    if search:
        found = _join([Entry(ANYTHING, ANY_TEXT, ANYTHING)], found)
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


# Entries


def _merged(entries: Iterable[Entry]) -> list[Entry]:
    by_context: dict[tuple[Context, Context], list[Node]] = {}
    for entry in entries:
        if entry.text != NOTHING and _possible(entry.left) and _possible(entry.right):
            by_context.setdefault((entry.left, entry.right), []).append(entry.text)
    if len(by_context) > MAX_ENTRIES:
        raise GrammarTooLarge("too many combinations of assertions")
    return [Entry(left, alternation(texts), right) for (left, right), texts in by_context.items()]


def _possible(context: Context) -> bool:
    return context.edge or bool(context.ranges)


def _entries(node: Node) -> list[Entry]:
    """A tree whose assertions are all `Condition`s, as entries."""
    if is_plain(node):
        return [Entry(ANYTHING, node, ANYTHING)]
    match node:
        case Condition(ahead, context):
            if ahead:
                return [Entry(ANYTHING, EPSILON, context)]
            return [Entry(context, EPSILON, ANYTHING)]
        case Concatenation(parts):
            result = [Entry(ANYTHING, EPSILON, ANYTHING)]
            plain: list[Node] = []
            for part in parts:
                if is_plain(part):
                    plain.append(part)
                    continue
                if plain:
                    result = _join(result, [Entry(ANYTHING, concatenation(plain), ANYTHING)])
                    plain = []
                result = _join(result, _entries(part))
            if plain:
                result = _join(result, [Entry(ANYTHING, concatenation(plain), ANYTHING)])
            return result
        case Alternation(parts):
            return _merged(entry for part in parts for entry in _entries(part))
        case Repetition(inner, low, high):
            return _repeated(_entries(inner), low, high)
    raise TypeError(f"not a tree of conditions: {node}")


def _join(first: list[Entry], second: list[Entry]) -> list[Entry]:
    """Every entry of the first followed by every one of the second."""
    return _merged(joined for one in first for other in second for joined in _pair(one, other))


def _pair(one: Entry, other: Entry) -> list[Entry]:
    inner_right, inner_left = one.right, other.left
    if inner_right == ANYTHING and inner_left == ANYTHING:
        return [Entry(one.left, concatenation([one.text, other.text]), other.right)]
    result = []
    ends_free, starts_free = inner_left == ANYTHING, inner_right == ANYTHING
    # An entry that the other's condition does not touch need not be told apart by being empty.
    before = one.text if ends_free else ending_in(one.text, inner_left)
    after = other.text if starts_free else starting_in(other.text, inner_right)
    result.append(Entry(one.left, concatenation([before, after]), other.right))
    if not ends_free and nullable(one.text):
        result.append(Entry(one.left.both(inner_left), after, other.right))
    if not starts_free and nullable(other.text):
        result.append(Entry(one.left, before, inner_right.both(other.right)))
    if not ends_free and not starts_free and nullable(one.text) and nullable(other.text):
        result.append(Entry(one.left.both(inner_left), EPSILON, inner_right.both(other.right)))
    return result


def starting_in(node: Node, context: Context) -> Node:
    """The non-empty texts of a plain tree whose first character may stand in the context."""
    match node:
        case Characters(ranges):
            return characters(intersected(ranges, context.ranges))
        case Concatenation(parts):
            options = []
            for index, part in enumerate(parts):
                options.append(concatenation([starting_in(part, context), *parts[index + 1 :]]))
                if not nullable(part):
                    break
            return alternation(options)
        case Alternation(parts):
            return alternation([starting_in(part, context) for part in parts])
        case Repetition(inner, low, high):
            rest = None if high is None else high - 1
            if nullable(inner):
                low, inner = 0, starting_in(inner, ANYTHING)
            return concatenation([starting_in(inner, context), repetition(inner, max(low - 1, 0), rest)])
        case Conjunction(first, second):
            return conjunction(starting_in(first, context), second)
        case Subtraction(include, exclude):
            return subtraction(starting_in(include, context), exclude)
    raise TypeError(f"an assertion has no text: {node}")


def ending_in(node: Node, context: Context) -> Node:
    """The non-empty texts of a plain tree whose last character may stand in the context."""
    return mirrored(starting_in(mirrored(node), context))


def mirrored(node: Node) -> Node:
    """The tree of the reversed texts."""
    match node:
        case Concatenation(parts):
            return concatenation([mirrored(part) for part in reversed(parts)])
        case Alternation(parts):
            return alternation([mirrored(part) for part in parts])
        case Repetition(inner, low, high):
            return Repetition(mirrored(inner), low, high)
        case Conjunction(first, second):
            return Conjunction(mirrored(first), mirrored(second))
        case Subtraction(include, exclude):
            return Subtraction(mirrored(include), mirrored(exclude))
        case Condition(ahead, context):
            return Condition(not ahead, context)
        case Look(ahead, negative, inner):
            return Look(not ahead, negative, mirrored(inner))
    return node


# Repeats of entries


def _repeated(entries: list[Entry], low: int, high: int | None) -> list[Entry]:
    empty = Entry(ANYTHING, EPSILON, ANYTHING)
    if any(e.left == ANYTHING == e.right and nullable(e.text) for e in entries):
        low = 0  # empty rounds may always make up the count
    has_empty_round = any(nullable(entry.text) for entry in entries)
    solid = _merged(
        Entry(e.left, starting_in(e.text, ANYTHING) if nullable(e.text) else e.text, e.right) for e in entries
    )
    if low > 0 and (has_empty_round or len(solid) > 1):
        # Rounds that must happen are written out: which of them are empty, under which condition, matters.
        if low > MAX_UNROLLED:
            raise GrammarTooLarge(f"more than {MAX_UNROLLED} repeats of a group with assertions")
        rest = _repeated(entries, 0, None if high is None else high - low)
        for _ in range(low):
            rest = _join(entries, rest)
        return rest
    if not solid:
        return [empty] if low == 0 else []
    if len(solid) == 1:
        return _merged([*_rounds_of_one(solid[0], low, high), *([empty] if low == 0 else [])])
    if high is None:
        return _merged([*_rounds_without_end(solid), empty])
    if high > MAX_UNROLLED:
        raise GrammarTooLarge(f"more than {MAX_UNROLLED} repeats of a group with assertions")
    result = [empty]
    for _ in range(high):
        result = _merged([*_join(solid, result), empty])
    return result


def _rounds_of_one(entry: Entry, low: int, high: int | None) -> list[Entry]:
    """low..high (at least one) rounds of one non-empty entry: neighbours restrict each other."""
    left, text, right = entry.left, entry.text, entry.right
    if left == ANYTHING == right:
        return [Entry(left, repetition(text, max(low, 1), high), right)]
    result = []
    if low <= 1:
        result.append(entry)
    if high is None or high >= 2:
        first, last = ending_in(text, left), starting_in(text, right)
        middle = starting_in(first, right)
        more = repetition(middle, max(low - 2, 0), None if high is None else high - 2)
        result.append(Entry(left, concatenation([first, more, last]), right))
    return result


def _rounds_without_end(entries: list[Entry]) -> list[Entry]:
    """One or more rounds of several non-empty entries, by Kleene's algorithm.

    A state is what two rounds ask of each other where they meet: (right of the one, left of the next).
    """
    gaps = list(dict.fromkeys((one.right, other.left) for one in entries for other in entries))
    if len(gaps) > 16:
        raise GrammarTooLarge("too many combinations of assertions in a repeated group")
    paths: dict[tuple[int, int], Node] = {}
    for i, (right, left) in enumerate(gaps):
        for j, (next_right, next_left) in enumerate(gaps):
            options = [
                ending_in(starting_in(entry.text, right), next_left)
                for entry in entries
                if entry.left == left and entry.right == next_right
            ]
            paths[i, j] = alternation(options)
    count = range(len(gaps))
    for k in count:
        loop = repetition(paths[k, k], 0, None)
        through = {(i, j): concatenation([paths[i, k], loop, paths[k, j]]) for i in count for j in count}
        paths = {key: alternation([paths[key], through[key]]) for key in paths}
    result = list(entries)
    for first in entries:
        for last in entries:
            for i, (right, left) in enumerate(gaps):
                if right != first.right:
                    continue
                for j, (last_right, last_left) in enumerate(gaps):
                    if last_left != last.left:
                        continue
                    middle = alternation([paths[i, j], EPSILON] if i == j else [paths[i, j]])
                    text = [ending_in(first.text, left), middle, starting_in(last.text, last_right)]
                    result.append(Entry(first.left, concatenation(text), last.right))
    return _merged(result)


# Look-arounds of more than one character


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
        return _closed(_join(_entries(node), rest))
    match node:
        case Concatenation(parts):
            for part in reversed(_grouped(parts)):
                rest = _before(part, rest)
            return rest
        case Alternation(parts):
            return _merged(entry for part in parts for entry in _before(part, rest))
        case Look(_, negative, inner):
            return _restricted(rest, _before(inner, [Entry(ANYTHING, ANY_TEXT, ANYTHING)]), negative)
        case Repetition(inner, low, high):
            return _unrolled(inner, low, high, rest)
    raise TypeError(f"not a tree with look-arounds: {node}")


def _closed(entries: list[Entry]) -> list[Entry]:
    """At the end of the text, right conditions are decided."""
    return _merged(Entry(entry.left, entry.text, ANYTHING) for entry in entries if entry.right.edge)


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
        return _merged(
            Entry(one.left.both(other.left), conjunction(one.text, other.text), ANYTHING)
            for one in rest
            for other in seen
        )
    for other in seen:
        opposite = Context(complemented(other.left.ranges), not other.left.edge)
        rest = _merged(
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
            result = _merged([*result, *rest])
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
