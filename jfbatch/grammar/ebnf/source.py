"""What the readers of both syntaxes share: a text with a position in it, and the definitions found.

A reader knows at which definition it is, so that every complaint names line, column and rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.expression import Expression

MAX_DEPTH = 100  # nested groups
MAX_COUNT = 1_000_000_000  # rounds of a repeat


class GrammarSyntaxError(InvalidGrammar):
    """A grammar file is wrong at `line` and `column` (both from 1), in `rule` ("" outside of any)."""

    def __init__(self, line: int, column: int, rule: str, fault: str) -> None:
        inside = f", in rule {rule!r}" if rule else ""
        super().__init__(f"grammar line {line}, column {column}{inside}: {fault}")
        self.line = line
        self.column = column
        self.rule = rule
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Definition:
    """One rule: its expression, and where its name stands (an offset into the text)."""

    name: str
    body: Expression
    position: int


@dataclass(frozen=True, slots=True)
class Mention:
    """A name where it is used: in which rule, and where."""

    name: str
    rule: str
    position: int


@dataclass(frozen=True)
class Source:
    """What was read: the definitions by name, the name to start at, and every use of a name."""

    text: str
    start: str
    definitions: Mapping[str, Definition]
    mentions: tuple[Mention, ...] = field(default=())

    def fail(self, fault: str, rule: str = "", position: int = 0) -> NoReturn:
        """Raise GrammarSyntaxError at a place of the text."""
        raise GrammarSyntaxError(*line_and_column(self.text, position), rule, fault)


def line_and_column(text: str, position: int) -> tuple[int, int]:
    """Both from 1, of an offset into `text`."""
    before = text[:position]
    return before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1


_COUNT = re.compile(r"[0-9]+")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class Reader:
    """A grammar's text and the position reached in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.rule = ""  # the rule that is being read

    def fail(self, fault: str, position: int | None = None) -> NoReturn:
        """Raise GrammarSyntaxError at `position`, by default where the reader stands."""
        at = self.position if position is None else position
        raise GrammarSyntaxError(*line_and_column(self.text, at), self.rule, fault)

    def at(self, piece: str) -> bool:
        """Whether the text goes on with `piece`."""
        return self.text.startswith(piece, self.position)

    def take(self, piece: str) -> bool:
        """Step over `piece` if the text goes on with it."""
        if self.at(piece):
            self.position += len(piece)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Step over a match of `pattern` that begins here."""
        found = pattern.match(self.text, self.position)
        if found is not None:
            self.position = found.end()
        return found

    def shown(self) -> str:
        """What stands here, for a message."""
        if self.position >= len(self.text):
            return "the end of the file"
        character = self.text[self.position]
        return "the end of the line" if character in "\r\n" else repr(character)

    def count(self) -> int | None:
        """A number of rounds, or None if there is no digit."""
        start = self.position
        found = self.match(_COUNT)
        if found is None:
            return None
        digits = found[0].lstrip("0") or "0"
        if len(digits) > 10 or int(digits) > MAX_COUNT:
            self.fail(f"more than {MAX_COUNT:,} repeats", start)
        return int(digits)

    def code_point(self, letter: str, start: int) -> int:
        """The character that follows \\x, \\u or \\U, as its code point; `start` is the backslash."""
        length = _HEX_DIGITS[letter]
        digits = self.text[self.position : self.position + length]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{length}}}", digits):
            self.fail(f"\\{letter} needs {length} hexadecimal digits", start)
        self.position += length
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            self.fail(f"\\{letter}{digits} is no character", start)
        return code
