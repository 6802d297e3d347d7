"""Reads the parts of a pattern that say characters: escapes and sets in brackets, in both dialects."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal, NoReturn

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.regex.characters import Ranges, complemented, normalised
from jfbatch.grammar.regex.classes import case_closed, escape_class, property_class

Dialect = Literal["python", "ecma"]


@dataclass(frozen=True, slots=True)
class Flags:
    """The inline flags in force at a place of a pattern."""

    ignore_case: bool = False
    multiline: bool = False
    dot_all: bool = False
    verbose: bool = False
    ascii_only: bool = False


def shown(pattern: str) -> str:
    """A pattern for an error message, cut to one line's length."""
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


_CONTROL_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}


class Reader:
    """A pattern, a position in it and the flags that hold there."""

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self.pattern = pattern
        self.dialect = dialect
        self.position = 0
        self.flags = Flags()

    def fail(self, reason: str, position: int | None = None) -> NoReturn:
        at = self.position if position is None else position
        raise InvalidGrammar(f"regex {shown(self.pattern)}: {reason} at position {at}")

    def take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.position):
            self.position += len(text)
            return True
        return False

    def peek_escape(self, start: int) -> str:
        if self.position >= len(self.pattern):
            self.fail("a backslash ends the pattern", start)
        return self.pattern[self.position]

    def is_octal(self) -> bool:
        digits = self.pattern[self.position : self.position + 3]
        return len(digits) == 3 and all(digit in "01234567" for digit in digits) and digits[0] < "4"

    def shared_escape(self, start: int) -> int | Ranges:
        """An escape that means the same inside and outside brackets: a code point or a set."""
        letter = self.pattern[self.position]
        self.position += 1
        if letter in "dDwWsS":
            return escape_class(letter, self.dialect, self.flags.ascii_only)
        if letter in _CONTROL_ESCAPES:
            return _CONTROL_ESCAPES[letter]
        if letter == "x":
            return self.hexadecimal(2, start)
        if letter == "u":
            return self.unicode_escape(start)
        if self.dialect == "python":
            return self.python_escape(letter, start)
        if letter in "pP":
            return self.property(letter, start)
        if letter == "c":
            control = self.pattern[self.position : self.position + 1]
            if not (control.isascii() and control.isalpha()):
                self.fail("\\c needs a letter", start)
            self.position += 1
            return ord(control) % 32
        if letter == "0" and self.pattern[self.position : self.position + 1] not in tuple("0123456789"):
            return 0
        if letter.isascii() and letter.isalnum():
            self.fail(f"unknown escape \\{letter}", start)
        return ord(letter)

    def python_escape(self, letter: str, start: int) -> int:
        if letter == "a":
            return 0x07
        if letter == "U":
            return self.hexadecimal(8, start)
        if letter == "N":
            end = self.pattern.index("}", self.position)
            name = self.pattern[self.position + 1 : end]
            self.position = end + 1
            return ord(unicodedata.lookup(name))
        if letter in "01234567":
            digits = re.compile("[0-7]{1,3}").match(self.pattern, self.position - 1)
            assert digits is not None
            self.position = digits.end()
            return int(digits[0], 8)
        return ord(letter)

    def unicode_escape(self, start: int) -> int:
        if self.dialect == "ecma" and self.take("{"):
            end = self.pattern.find("}", self.position)
            digits = self.pattern[self.position : max(end, self.position)]
            if not re.fullmatch("[0-9A-Fa-f]+", digits) or int(digits, 16) > 0x10FFFF:
                self.fail("\\u{...} needs a code point", start)
            self.position = end + 1
            return int(digits, 16)
        code = self.hexadecimal(4, start)
        if 0xD800 <= code < 0xDC00 and self.dialect == "ecma":
            low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self.pattern, self.position)
            if low is not None:  # a surrogate pair is one character
                self.position = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        return code

    def hexadecimal(self, count: int, start: int) -> int:
        digits = self.pattern[self.position : self.position + count]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{count}}}", digits):
            self.fail(f"an escape needs {count} hexadecimal digits", start)
        self.position += count
        return int(digits, 16)

    def property(self, letter: str, start: int) -> Ranges:
        if self.take("{"):
            end = self.pattern.find("}", self.position)
            if end < 0:
                self.fail("a property name is never closed", start)
            name = self.pattern[self.position : end]
            self.position = end + 1
        else:
            name = self.pattern[self.position : self.position + 1]
            self.position += 1
        negated = (letter == "P") != name.startswith("^")
        ranges = property_class(name.removeprefix("^"))
        if ranges is None:
            self.fail(f"the Unicode property {name!r} is not known", start)
        return complemented(ranges) if negated else ranges

    # Brackets

    def bracket(self, start: int) -> Ranges:
        pattern = self.pattern
        negated = self.take("^")
        pairs: list[tuple[int, int]] = []
        first = True
        while True:
            if self.position >= len(pattern):
                self.fail("a set [ is never closed", start)
            if pattern[self.position] == "]" and not (first and self.dialect == "python"):
                self.position += 1
                break
            first = False
            item_start = self.position
            low = self.bracket_item(item_start)
            if pattern.startswith("-", self.position) and not pattern.startswith("-]", self.position):
                dash = self.position
                self.position += 1
                if self.position >= len(pattern):
                    self.fail("a set [ is never closed", start)
                high = self.bracket_item(self.position)
                if isinstance(low, int) and isinstance(high, int):
                    if high < low:
                        self.fail("a range in a set is out of order", item_start)
                    pairs.append((low, high))
                    continue
                if self.dialect == "python":
                    self.fail("a range in a set ends in a class", dash)
                pairs.append((0x2D, 0x2D))
                pairs.extend(((high, high),) if isinstance(high, int) else high)
            pairs.extend(((low, low),) if isinstance(low, int) else low)
        ranges = normalised(pairs)
        if negated:
            if self.flags.ignore_case:
                ranges = case_closed(ranges, self.dialect, self.flags.ascii_only)
            return complemented(ranges)
        return ranges

    def bracket_item(self, start: int) -> int | Ranges:
        character = self.pattern[start]
        self.position = start + 1
        if character != "\\":
            return ord(character)
        letter = self.peek_escape(start)
        if letter == "b":
            self.position += 1
            return 0x08
        if letter == "-" or (letter in "123456789" and self.dialect == "ecma"):
            if letter != "-":
                self.fail(f"unknown escape \\{letter} in a set", start)
            self.position += 1
            return 0x2D
        return self.shared_escape(start)
