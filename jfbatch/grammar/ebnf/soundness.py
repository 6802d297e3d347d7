"""What a grammar must be beyond its syntax: every name defined, every rule able to match something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from jfbatch.grammar.deadline import check_deadline
from jfbatch.grammar.ebnf.source import Source
from jfbatch.grammar.expression import ByteSet, Choice, Expression, Literal, Reference, Repeat, Sequence


def check_names(source: Source) -> None:
    """Raise GrammarSyntaxError if the start is missing or a name is used that no rule defines."""
    if source.start not in source.definitions:
        source.fail(f"there is no rule {source.start!r} to start at")
    for mention in source.mentions:
        if mention.name not in source.definitions:
            close = get_close_matches(mention.name, source.definitions, n=1)
            hint = f"; is {close[0]!r} meant?" if close else ""
            source.fail(f"{mention.name!r} is not defined{hint}", mention.rule, mention.position)


def check_productive(source: Source) -> None:
    """Raise GrammarSyntaxError at a rule that no text can match, such as a: a "x" without another way."""
    rules = {name: definition.body for name, definition in source.definitions.items()}
    productive = productive_rules(rules)
    name = next((name for name in rules if name not in productive), None)
    way: list[str] = []
    while name is not None and name not in way:
        way.append(name)
        name = next(
            (other for other in sorted(mentioned_rules(rules[name])) if other not in productive), None
        )
    if name is not None:
        circle = " -> ".join([*way[way.index(name) :], name])
        fault = f"no text can match this rule: every way through it comes back to it ({circle})"
        source.fail(fault, name, source.definitions[name].position)
    if way:
        source.fail("no text can match this rule", way[-1], source.definitions[way[-1]].position)


def mentioned_rules(expression: Expression) -> set[str]:
    """The rules that an expression names."""
    match expression:
        case Reference(name):
            return {name}
        case Sequence(parts) | Choice(parts):
            return {name for part in parts for name in mentioned_rules(part)}
        case Repeat(inner):
            return mentioned_rules(inner)
    return set()


def productive_rules(rules: Mapping[str, Expression]) -> set[str]:
    """The rules that match some text."""
    return least_fixpoint(rules, _matches_something)


def least_fixpoint(
    rules: Mapping[str, Expression], holds: Callable[[Expression, set[str]], bool]
) -> set[str]:
    """The rules of which `holds(body, those known so far)` comes to be true, from none on.

    Rounds go through the rules forwards and backwards in turn: most grammars are written from the top
    down or from the bottom up.
    """
    known: set[str] = set()
    order = list(rules)
    size = -1
    while len(known) > size:
        check_deadline()
        size = len(known)
        order.reverse()
        for name in order:
            if name not in known and holds(rules[name], known):
                known.add(name)
    return known


def _matches_something(expression: Expression, known: set[str]) -> bool:
    match expression:
        case Literal():
            return True
        case ByteSet(bits):
            return bits != 0
        case Sequence(parts):
            return all(_matches_something(part, known) for part in parts)
        case Choice(parts):
            return any(_matches_something(part, known) for part in parts)
        case Repeat(inner, low):
            return low == 0 or _matches_something(inner, known)
        case Reference(name):
            return name in known
    raise TypeError(f"no part of a grammar file: {expression!r}")
