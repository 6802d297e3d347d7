"""Plain trees with conditions on their neighbours, which concatenate and repeat exactly.

A condition that faces a neighbour restricts the neighbour's first or last character; one that faces
empty text is handed on. So ^, $, \\b and look-arounds of one character need no automaton, and bounded
repeats around them stay repeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar.regex.characters import intersected
from jfbatch.grammar.regex.syntax import (
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
)

MAX_ENTRIES = 64
MAX_NODES = 50_000  # of the trees that assertions grow into
MAX_UNROLLED = 16  # copies of a repeated group whose rounds have different conditions


@dataclass(frozen=True, slots=True)
class Entry:
    """A plain text with what must stand before (`left`) and after it (`right`)."""

    left: Context
    text: Node
    right: Context


def merged_entries(entries: Iterable[Entry]) -> list[Entry]:
    """The same entries, those with equal conditions joined. Raises GrammarTooLarge."""
    by_context: dict[tuple[Context, Context], list[Node]] = {}
    for entry in entries:
        if entry.text != NOTHING and _possible(entry.left) and _possible(entry.right):
            by_context.setdefault((entry.left, entry.right), []).append(entry.text)
    if len(by_context) > MAX_ENTRIES:
        raise GrammarTooLarge("too many combinations of assertions")
    merged = [Entry(left, alternation(texts), right) for (left, right), texts in by_context.items()]
    _check_size(entry.text for entry in merged)
    return merged


def _check_size(nodes: Iterable[Node]) -> None:
    """Refuse trees that have grown too large, before anything walks them again."""
    queue = list(nodes)
    for count, node in enumerate(queue):  # grows while it runs
        if count > MAX_NODES:
            raise GrammarTooLarge("the assertions of a pattern have too many combinations")
        match node:
            case Concatenation(parts) | Alternation(parts):
                queue.extend(parts)
            case Repetition(inner):
                queue.append(inner)
            case Conjunction(first, second) | Subtraction(first, second):
                queue.extend((first, second))


def _possible(context: Context) -> bool:
    return context.edge or bool(context.ranges)


def entries_of(node: Node) -> list[Entry]:
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
                    result = joined(result, [Entry(ANYTHING, concatenation(plain), ANYTHING)])
                    plain = []
                result = joined(result, entries_of(part))
            if plain:
                result = joined(result, [Entry(ANYTHING, concatenation(plain), ANYTHING)])
            return result
        case Alternation(parts):
            return merged_entries(entry for part in parts for entry in entries_of(part))
        case Repetition(inner, low, high):
            return repeated(entries_of(inner), low, high)
    raise TypeError(f"not a tree of conditions: {node}")


def joined(first: list[Entry], second: list[Entry]) -> list[Entry]:
    """Every entry of the first followed by every one of the second."""
    return merged_entries(entry for one in first for other in second for entry in _pair(one, other))


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


def repeated(entries: list[Entry], low: int, high: int | None) -> list[Entry]:
    """`low` to `high` rounds of the entries; conditions between rounds are settled here."""
    empty = Entry(ANYTHING, EPSILON, ANYTHING)
    if any(e.left == ANYTHING == e.right and nullable(e.text) for e in entries):
        low = 0  # empty rounds may always make up the count
    has_empty_round = any(nullable(entry.text) for entry in entries)
    solid = merged_entries(
        Entry(e.left, starting_in(e.text, ANYTHING) if nullable(e.text) else e.text, e.right) for e in entries
    )
    if low > 0 and (has_empty_round or len(solid) > 1):
        # Rounds that must happen are written out: which of them are empty, under which condition, matters.
        if low > MAX_UNROLLED:
            raise GrammarTooLarge(f"more than {MAX_UNROLLED} repeats of a group with assertions")
        rest = repeated(entries, 0, None if high is None else high - low)
        for _ in range(low):
            rest = joined(entries, rest)
        return rest
    if not solid:
        return [empty] if low == 0 else []
    if len(solid) == 1:
        return merged_entries([*_rounds_of_one(solid[0], low, high), *([empty] if low == 0 else [])])
    if high is None:
        return merged_entries([*_rounds_without_end(solid), empty])
    if high > MAX_UNROLLED:
        raise GrammarTooLarge(f"more than {MAX_UNROLLED} repeats of a group with assertions")
    result = [empty]
    for _ in range(high):
        result = merged_entries([*joined(solid, result), empty])
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
        _check_size(paths.values())
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
    return merged_entries(result)
