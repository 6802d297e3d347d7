"""What an expression means, said as plainly as possible: a slow matcher and a random sampler for tests.

`ends` computes, for an expression and a start, all places where a match may end: set simulation
without backtracking, set operations included.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from jfbatch.grammar.expression import (
    ByteSet,
    Choice,
    Difference,
    ExplicitAutomaton,
    Expression,
    Intersection,
    Literal,
    Reference,
    Repeat,
    Sequence,
    TextExcept,
)

Rows = tuple[tuple[tuple[int, int], ...], ...]


class Oracle:
    """Matches one text against expressions; `rules` serves References."""

    def __init__(self, text: bytes, rules: Mapping[str, Expression] | None = None) -> None:
        self.text = text
        self.rules = rules or {}
        self.memo: dict[tuple[int, int], frozenset[int]] = {}
        self.kept: list[Expression] = []

    def ends(self, expression: Expression, start: int) -> frozenset[int]:
        key = (id(expression), start)
        if key not in self.memo:
            self.kept.append(expression)
            self.memo[key] = frozenset()  # for rules that call themselves without consuming
            self.memo[key] = frozenset(self.compute(expression, start))
        return self.memo[key]

    def compute(self, expression: Expression, start: int) -> set[int] | frozenset[int]:
        text = self.text
        match expression:
            case Literal(data):
                return {start + len(data)} if text.startswith(data, start) else set()
            case ByteSet():
                return {start + 1} if start < len(text) and text[start] in expression else set()
            case Sequence(parts):
                places = {start}
                for part in parts:
                    places = {end for place in places for end in self.ends(part, place)}
                return places
            case Choice(parts):
                return {end for part in parts for end in self.ends(part, start)}
            case Repeat(inner, low, high):
                return self.repeats(inner, low, high, start)
            case Reference(name):
                return self.ends(self.rules[name], start)
            case Intersection(parts):
                return frozenset.intersection(*[self.ends(part, start) for part in parts])
            case Difference(include, exclude):
                return self.ends(include, start) - self.ends(exclude, start)
            case ExplicitAutomaton(transitions, accepting):
                return self.walk(transitions, accepting, start)
            case TextExcept():
                return self.ends(expression.difference, start)
        raise TypeError(expression)

    def repeats(self, inner: Expression, low: int, high: int | None, start: int) -> set[int]:
        places: set[int] = {start}
        result: set[int] = set()
        count = 0
        seen: list[set[int]] = []
        while places:
            if count >= low:
                if places <= result and (high is None or places in seen):
                    break
                result |= places
                seen.append(places)
            if count == high or count > low + len(self.text) + 1:
                break
            places = {end for place in places for end in self.ends(inner, place)}
            count += 1
        return result

    def walk(self, transitions: Rows, accepting: tuple[bool, ...], start: int) -> set[int]:
        state, found = 0, set()
        for place in range(start, len(self.text) + 1):
            if accepting[state]:
                found.add(place)
            if place == len(self.text):
                break
            targets = [to for bits, to in transitions[state] if bits >> self.text[place] & 1]
            assert len(targets) <= 1, "the automaton is not deterministic"
            if not targets:
                break
            state = targets[0]
        return found


def matches(expression: Expression, text: bytes | str, rules: Mapping[str, Expression] | None = None) -> bool:
    """Whether the expression matches the whole text."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    return len(data) in Oracle(data, rules).ends(expression, 0)


class CannotSample(Exception):
    """No text was found: the expression is empty, or random tries did not hit a set operation."""


def sample(expression: Expression, source: random.Random, tries: int = 200) -> bytes:
    """A random text of the expression (not uniform: repeats lean short, classes lean to few bytes)."""
    match expression:
        case Literal(data):
            return data
        case ByteSet(bits):
            members = [byte for byte in range(256) if bits >> byte & 1]
            if not members:
                raise CannotSample
            return bytes([source.choice(members)])
        case Sequence(parts):
            return b"".join(sample(part, source, tries) for part in parts)
        case Choice(parts):
            for part in source.sample(parts, len(parts)):
                try:
                    return sample(part, source, tries)
                except CannotSample:
                    continue
            raise CannotSample
        case Repeat(inner, low, high):
            extra = source.choice((0, 0, 1, 2, 3, 7))
            if high is not None and source.random() < 0.2:
                extra = min(high - low, 70)
            count = low + extra if high is None else min(high, low + extra)
            return b"".join(sample(inner, source, tries) for _ in range(count))
        case Intersection(parts):
            for _ in range(tries):
                text = sample(source.choice(parts), source, tries)
                if all(matches(part, text) for part in parts):
                    return text
            raise CannotSample
        case Difference(include, exclude):
            for _ in range(tries):
                text = sample(include, source, tries)
                if not matches(exclude, text):
                    return text
            raise CannotSample
        case ExplicitAutomaton(transitions, accepting):
            return _random_walk(transitions, accepting, source)
        case TextExcept():
            return sample(expression.difference, source, tries)
    raise TypeError(expression)


def _random_walk(transitions: Rows, accepting: tuple[bool, ...], source: random.Random) -> bytes:
    state, text = 0, b""
    while True:
        if accepting[state] and (not transitions[state] or source.random() < 0.2):
            return text
        if not transitions[state]:
            raise CannotSample
        bits, state = source.choice(transitions[state])
        text += bytes([source.choice([byte for byte in range(256) if bits >> byte & 1])])


def size(expression: Expression) -> int:
    """Nodes and literal bytes of an expression as a tree, equal objects counted once."""
    seen: set[int] = set()

    def count(node: Expression) -> int:
        if id(node) in seen:
            return 0
        seen.add(id(node))
        match node:
            case Literal(data):
                return 1 + len(data)
            case Sequence(parts) | Choice(parts) | Intersection(parts):
                return 1 + sum(map(count, parts))
            case Repeat(inner):
                return 1 + count(inner)
            case Difference(include, exclude):
                return 1 + count(include) + count(exclude)
            case ExplicitAutomaton(transitions):
                return sum(1 + len(row) for row in transitions)
            case TextExcept(words):
                return 1 + sum(map(len, words)) + count(node.text) + count(node.not_plain)
        return 1

    return count(expression)
