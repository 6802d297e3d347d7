"""What a grammar must be beyond its syntax: every name defined, every rule able to match something."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

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
    for name, definition in source.definitions.items():
        if name not in productive:
            fault = "no text can match this rule: every way through it comes back to itself"
            source.fail(fault, name, definition.position)


def productive_rules(rules: Mapping[str, Expression]) -> set[str]:
    """The rules that match some text: the least fixpoint, from 'none does'."""
    known: set[str] = set()
    size = -1
    while len(known) > size:
        size = len(known)
        known.update(name for name in rules if name not in known and _matches_something(rules[name], known))
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
