"""GBNF, the grammar notation of llama.cpp: `name ::= alternatives`, starting at `root`.

After llama.cpp's grammars/README.md. A rule ends where the next `name ::=` begins, so alternatives may
stand on lines of their own; `\\x`, `\\u` and `\\U` name characters, not bytes.
"""

from __future__ import annotations

import re

from jfbatch.grammar.ebnf.source import MAX_DEPTH, Definition, Mention, Reader, Source
from jfbatch.grammar.expression import Expression, Reference, choice, literal, repeat, sequence
from jfbatch.grammar.regex.characters import (
    ANY_CHARACTER,
    RAW_UTF8,
    character_expression,
    complemented,
    normalised,
)

START = "root"
MAX_MARKS = 3  # repeats of one item, as in "a"+?

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DEFINITION = re.compile(r"([A-Za-z0-9_-]+)\s*::=")
_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)+")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {mark: mark for mark in "\\\"'[]-^/"}


def parse_gbnf(text: str) -> Source:
    """The rules of a GBNF file. Raises GrammarSyntaxError."""
    return _GbnfReader(text).read()


class _GbnfReader(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text.removeprefix("\ufeff"))
        self.definitions: dict[str, Definition] = {}
        self.mentions: list[Mention] = []
        self.depth = 0

    def read(self) -> Source:
        self.skip_space()
        while self.position < len(self.text):
            start = self.position
            found = self.match(_DEFINITION)
            if found is None:
                self.fail(f"expected a rule, name ::= ..., but found {self.shown()}")
            name = found[1]
            self.rule = name
            if name in self.definitions:
                self.fail("the rule is defined twice", start)
            self.skip_space()
            self.definitions[name] = Definition(name, self.alternatives(), start)
            if self.at(")"):
                self.fail("unmatched )")
        return Source(self.text, START, self.definitions, tuple(self.mentions))

    def skip_space(self) -> None:
        self.match(_SPACE)

    def alternatives(self) -> Expression:
        parts = [self.items()]
        while self.take("|"):
            self.skip_space()
            parts.append(self.items())
        return choice(*parts)

    def items(self) -> Expression:
        """Items one after the other, up to | or ) or the next rule."""
        parts: list[Expression] = []
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            if _DEFINITION.match(self.text, self.position):
                break
            item = self.item()
            self.skip_space()
            marks = 0
            while (repeated := self.repeated(item)) is not None:
                item = repeated
                self.skip_space()
                marks += 1
                if marks > MAX_MARKS:
                    self.fail("too many repeats of one item, one after the other")
            parts.append(item)
        return sequence(*parts)

    def item(self) -> Expression:
        start = self.position
        if self.take('"'):
            return literal(self.quoted(start))
        if self.take("["):
            return self.bracket(start)
        if self.take("."):
            return character_expression(ANY_CHARACTER, RAW_UTF8)
        if self.take("("):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.fail(f"groups nest deeper than {MAX_DEPTH}", start)
            self.skip_space()
            inner = self.alternatives()
            if not self.take(")"):
                self.fail("the group is never closed", start)
            self.depth -= 1
            return inner
        name = self.match(_NAME)
        if name is not None:
            self.mentions.append(Mention(name[0], self.rule, start))
            return Reference(name[0])
        if self.text[start] in "*+?{":
            self.fail(f"nothing to repeat before {self.shown()}")
        if self.text[start] in "<!":
            self.fail("tokens <...> are not supported: a grammar speaks of characters, not of one tokenizer")
        return self.fail(f"expected a literal, a set, a name or a group, but found {self.shown()}")

    def repeated(self, item: Expression) -> Expression | None:
        """`item` with the quantifier that stands here, None if there is none."""
        for mark, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.take(mark):
                return repeat(item, low, high)
        start = self.position
        if not self.take("{"):
            return None
        self.skip_space()
        least = self.count()
        self.skip_space()
        most = least
        if self.take(","):
            self.skip_space()
            most = self.count()
            self.skip_space()
            least = least or 0
        if least is None or not self.take("}"):
            self.fail("a repeat is written {m}, {m,} or {m,n}", start)
        if most is not None and most < least:
            self.fail("the bounds of the repeat are out of order", start)
        return repeat(item, least, most)

    def quoted(self, start: int) -> str:
        characters = []
        while not self.take('"'):
            if self.position >= len(self.text) or self.text[self.position] in "\r\n":
                self.fail("the literal is never closed", start)
            characters.append(self.character())
        return "".join(characters)

    def character(self) -> str:
        """One character of a literal or set, escapes resolved."""
        start = self.position
        self.position += 1
        if self.text[start] != "\\":
            return self.text[start]
        letter = self.text[self.position : self.position + 1]
        self.position += 1
        if letter and letter in "xuU":
            return chr(self.code_point(letter, start))
        if letter not in _ESCAPES:
            self.fail(f"unknown escape \\{letter}", start)
        return _ESCAPES[letter]

    def bracket(self, start: int) -> Expression:
        negated = self.take("^")
        pairs: list[tuple[int, int]] = []
        while not self.take("]"):
            item_start = self.position
            low = self.bracket_item(start)
            high = low
            if self.at("-") and not self.at("-]"):
                self.position += 1
                high = self.bracket_item(start)
            if high < low:
                self.fail("a range in a set is out of order", item_start)
            pairs.append((low, high))
        if not pairs:
            self.fail("the set is empty", start)
        ranges = normalised(pairs)
        return character_expression(complemented(ranges) if negated else ranges, RAW_UTF8)

    def bracket_item(self, start: int) -> int:
        if self.position >= len(self.text) or self.text[self.position] in "\r\n":
            self.fail("the set [ is never closed", start)
        return ord(self.character())
