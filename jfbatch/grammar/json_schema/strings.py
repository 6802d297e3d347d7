"""JSON strings as expressions: lengths, patterns, formats and names left out, all at once.

Everything is first said as a tree over decoded characters, where a length can often be pushed into a
pattern; only what remains of it becomes a set operation on the text between the quotes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import lru_cache

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.expression import (
    EMPTY,
    NOTHING,
    ByteSet,
    Choice,
    Difference,
    Expression,
    Literal,
    Sequence,
    TextExcept,
    choice,
    literal,
    repeat,
    sequence,
)
from jfbatch.grammar.json_schema.formats import format_tree
from jfbatch.grammar.regex import JSON_CHARACTER, JSON_STRING, Node, pattern_tree, tree_to_expression
from jfbatch.grammar.regex.characters import (
    character_expression,
    complemented,
    normalised,
    without,
)
from jfbatch.grammar.regex.syntax import (
    ANY,
    ANY_TEXT,
    Alternation,
    Concatenation,
    Conjunction,
    Repetition,
    Subtraction,
    alternation,
    concatenation,
    conjunction,
    repetition,
    subtraction,
)
from jfbatch.grammar.regex.syntax import NOTHING as NO_TEXT

__all__ = [
    "JSON_CHARACTER",
    "JSON_TEXT",
    "json_string_literal",
    "keys_excluding",
    "keys_matching",
    "string_expression",
]

_QUOTE = literal('"')
# The text between the quotes of any string; one object, so that programs share it.
JSON_TEXT = repeat(JSON_CHARACTER, 0, None)


def json_string_literal(text: str) -> bytes:
    """The one spelling of a string: json.dumps(text, ensure_ascii=False), in UTF-8.

    Raises InvalidGrammar for a lone surrogate, which no UTF-8 text and no column of strings can hold.
    """
    try:
        return json.dumps(text, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidGrammar(f"the string {text!r} holds half of a surrogate pair") from None


def string_expression(
    min_length: int = 0,
    max_length: int | None = None,
    patterns: Iterable[str] = (),
    not_patterns: Iterable[str] = (),
    formats: Iterable[str] = (),
    not_formats: Iterable[str] = (),
    excluded: Collection[str] = (),
    exact: bool = True,
) -> Expression:
    """The JSON strings, quotes included, that satisfy all of the conditions.

    Lengths are in characters (code points). `patterns` are ECMA-262 patterns searched for, `formats` names
    of formats; unknown formats say nothing (so `not_formats` with one matches nothing). `excluded` strings
    are left out. `exact` False gives a superset without set operations, for conditions whose explicit
    automaton is too large. The result is NOTHING, or matches nothing, if no string satisfies them.
    Raises InvalidGrammar for a pattern that is malformed or not supported.
    """
    key = (tuple(patterns), tuple(not_patterns), tuple(formats), tuple(not_formats))
    if not any(key) and min_length == 0 and max_length is None and excluded:
        return keys_excluding(excluded)
    whole = _string_expression(min_length, max_length, *key, exact)
    if not exact:
        return whole
    left_out = [Literal(json_string_literal(text)) for text in excluded if not _has_surrogate(text)]
    return Difference(whole, choice(*left_out)) if left_out and whole != NOTHING else whole


@lru_cache(maxsize=512)
def _string_expression(
    min_length: int,
    max_length: int | None,
    patterns: tuple[str, ...],
    not_patterns: tuple[str, ...],
    formats: tuple[str, ...],
    not_formats: tuple[str, ...],
    exact: bool,
) -> Expression:
    tree: Node = ANY_TEXT
    for wanted in [pattern_tree(pattern, "ecma") for pattern in dict.fromkeys(patterns)]:
        tree = conjunction(tree, wanted)
    for known in [format_tree(name, min_length, max_length) for name in dict.fromkeys(formats)]:
        tree = tree if known is None else conjunction(tree, known)
    if min_length > 0 or max_length is not None:
        tree = conjunction(tree, repetition(ANY, max(min_length, 0), max_length))
    unwanted = [pattern_tree(pattern, "ecma") for pattern in dict.fromkeys(not_patterns)]
    unwanted += [format_tree(name) or ANY_TEXT for name in dict.fromkeys(not_formats)]
    if unwanted:
        tree = subtraction(tree, alternation(unwanted))
    if not exact:
        tree = _without_set_operations(tree)
    if tree == NO_TEXT:
        return NOTHING
    if tree == ANY_TEXT:
        return _ANY_STRING
    return sequence(_QUOTE, tree_to_expression(tree, JSON_STRING), _QUOTE)


def _without_set_operations(node: Node) -> Node:
    """A superset: of an intersection its first part, of a difference what it was taken from."""
    match node:
        case Concatenation(parts):
            return concatenation([_without_set_operations(part) for part in parts])
        case Alternation(parts):
            return alternation([_without_set_operations(part) for part in parts])
        case Repetition(inner, low, high):
            return repetition(_without_set_operations(inner), low, high)
        case Conjunction(first):
            return _without_set_operations(first)
        case Subtraction(include):
            return _without_set_operations(include)
    return node


_ANY_STRING = sequence(_QUOTE, JSON_TEXT, _QUOTE)


def _has_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(character) <= 0xDFFF for character in text)


# Keys of objects


def keys_matching(
    patterns: Collection[str], not_patterns: Collection[str] = (), excluding: Collection[str] = ()
) -> Expression:
    """The JSON strings, quotes included, with all patterns, none of the others, and not one of the names."""
    return string_expression(patterns=patterns, not_patterns=not_patterns, excluded=excluding)


# A complement written as a trie is as deep as its longest name; longer ones end in a set operation.
MAX_TRIE_DEPTH = 40

_PLAIN = without(((0x20, 0x7F),), ((0x22, 0x22), (0x5C, 0x5C)))
_PLAIN_BITS = sum(((1 << (high - low + 1)) - 1) << low for low, high in _PLAIN)
_NOT_PLAIN_TEXT = sequence(character_expression(complemented(_PLAIN), JSON_STRING), JSON_TEXT)


def keys_excluding(names: Collection[str]) -> Expression:
    """Every JSON string, quotes included, that is none of the names.

    A trie of the names, turned inside out: at each node the text may end unless a name does, go on
    along the trie, or leave it with any other character and be free. Its size is linear in the names.
    """
    kept = sorted({name for name in names if not _has_surrogate(name)})
    if kept and all(map(_is_plain, kept)):
        words = tuple(name.encode() for name in kept)
        return Sequence((_QUOTE, TextExcept(words, _PLAIN_BITS, JSON_TEXT, _NOT_PLAIN_TEXT), _QUOTE))
    return sequence(_QUOTE, _outside(kept, 0, len(kept), 0), _QUOTE) if kept else _ANY_STRING


MAX_PLAIN_NAME = 300  # a program's trie of plain names nests as deep as the longest


def _is_plain(name: str) -> bool:
    """Whether JSON spells a name as it is, in ASCII."""
    return len(name) <= MAX_PLAIN_NAME and all(_PLAIN_BITS >> ord(character) & 1 for character in name)


def _outside(names: list[str], first: int, last: int, depth: int) -> Expression:
    """What may follow the first `depth` characters that the sorted names[first:last] share."""
    if depth == MAX_TRIE_DEPTH:
        rest = [_spelled(name[depth:]) for name in names[first:last]]
        return Difference(JSON_TEXT, choice(*rest))
    parts: list[Expression] = []
    if len(names[first]) == depth:
        first += 1
    else:
        parts.append(EMPTY)
    taken: list[int] = []
    onward: list[Expression] = []
    while first < last:
        character = names[first][depth]
        end = first + 1
        while end < last and names[end][depth] == character:
            end += 1
        taken.append(ord(character))
        onward.append(sequence(_spelled(character), _outside(names, first, end, depth + 1)))
        first = end
    return Choice((*parts, *_leaving(tuple(taken)), *onward))  # choice() would hash the whole tree below


@lru_cache(maxsize=4096)
def _leaving(taken: tuple[int, ...]) -> tuple[Expression, ...]:
    """Texts that start with a character other than those of `taken`."""
    if not taken:
        return (sequence(JSON_CHARACTER, JSON_TEXT),)
    if all(_PLAIN_BITS >> code & 1 for code in taken):
        bits = _PLAIN_BITS & ~sum(1 << code for code in taken)
        leaving = (sequence(ByteSet(bits), JSON_TEXT),) if bits else ()
        return (*leaving, _NOT_PLAIN_TEXT)
    others = complemented(normalised((code, code) for code in taken))
    return (sequence(character_expression(others, JSON_STRING), JSON_TEXT),)


def _spelled(text: str) -> Literal:
    return Literal(json_string_literal(text)[1:-1])
