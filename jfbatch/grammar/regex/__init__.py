"""Regular expressions to expressions over bytes.

A pattern is parsed to a tree over characters (`parser`, `syntax`), its assertions are moved into the
texts beside them (`assertions`), and each set of characters becomes its spelling in bytes (`characters`).
Bounded repeats stay repeats all the way, so nothing is ever unrolled or determinised here.
"""

from __future__ import annotations

from functools import lru_cache

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.expression import Difference, Expression, Intersection, choice, repeat, sequence
from jfbatch.grammar.regex.assertions import without_assertions
from jfbatch.grammar.regex.characters import (
    ANY_CHARACTER,
    JSON_CHARACTER,
    JSON_STRING,
    RAW_UTF8,
    Alphabet,
    character_expression,
)
from jfbatch.grammar.regex.parser import parse
from jfbatch.grammar.regex.reader import Dialect
from jfbatch.grammar.regex.syntax import (
    Alternation,
    Characters,
    Concatenation,
    Conjunction,
    Node,
    Repetition,
    Subtraction,
)

__all__ = [
    "JSON_CHARACTER",
    "JSON_STRING",
    "RAW_UTF8",
    "Alphabet",
    "Dialect",
    "Node",
    "pattern_tree",
    "regex_to_expression",
    "tree_to_expression",
]


@lru_cache(maxsize=512)
def regex_to_expression(pattern: str, *, dialect: Dialect, alphabet: Alphabet) -> Expression:
    """The texts a regular expression matches, spelled in bytes of the alphabet.

    "python": the texts that re.fullmatch accepts. "ecma": the texts in which the pattern is found, as
    JSON Schema's `pattern` asks, by ECMA-262 in Unicode mode. Raises InvalidGrammar, naming the position
    and the construct, for malformed patterns and for what is not regular or not supported.
    """
    return tree_to_expression(pattern_tree(pattern, dialect), alphabet)


@lru_cache(maxsize=512)
def pattern_tree(pattern: str, dialect: Dialect) -> Node:
    """The same texts as a tree over characters without assertions. Raises InvalidGrammar."""
    try:
        return without_assertions(parse(pattern, dialect), search=dialect == "ecma")
    except RecursionError:
        raise InvalidGrammar(f"regex {pattern[:80]!r}: groups nest too deeply") from None


def tree_to_expression(node: Node, alphabet: Alphabet) -> Expression:
    """A tree without assertions, its characters spelled in bytes of the alphabet."""
    match node:
        case Characters(ranges):
            if alphabet is JSON_STRING and ranges == ANY_CHARACTER:
                return JSON_CHARACTER  # always the same object: programs know it
            return character_expression(ranges, alphabet)
        case Concatenation(parts):
            return sequence(*[tree_to_expression(part, alphabet) for part in parts])
        case Alternation(parts):
            return choice(*[tree_to_expression(part, alphabet) for part in parts])
        case Repetition(inner, low, high):
            return repeat(tree_to_expression(inner, alphabet), low, high)
        case Conjunction(first, second):
            return Intersection((tree_to_expression(first, alphabet), tree_to_expression(second, alphabet)))
        case Subtraction(include, exclude):
            return Difference(tree_to_expression(include, alphabet), tree_to_expression(exclude, alphabet))
    raise TypeError(f"assertions are resolved before: {node}")
