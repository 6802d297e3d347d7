"""The named sets of characters of both dialects: \\d \\w \\s, \\p{...}, and closure under case.

What Python's `re` means is asked of Python's `re` itself, once per process, over all characters at once.
"""

from __future__ import annotations

import re
from functools import lru_cache

from jfbatch.grammar.regex import unicode_tables
from jfbatch.grammar.regex.characters import (
    ANY_CHARACTER,
    Ranges,
    complemented,
    intersected,
    normalised,
    without,
)

DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
ASCII_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
NEWLINE: Ranges = ((0x0A, 0x0A),)

# ECMA-262 WhiteSpace and LineTerminator, https://tc39.es/ecma262/#prod-CharacterClassEscape
ECMA_SPACE: Ranges = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
ECMA_LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))

_ECMA = {"d": DIGIT, "w": WORD, "s": ECMA_SPACE}
_ASCII = {"d": DIGIT, "w": WORD, "s": ASCII_SPACE}


def escape_class(letter: str, dialect: str, ascii_only: bool) -> Ranges:
    """The set of \\d \\w \\s, or of \\D \\W \\S."""
    lower = letter.lower()
    named = _ECMA if dialect == "ecma" else _ASCII
    ranges = named[lower] if dialect == "ecma" or ascii_only else _python_class(lower)
    return ranges if letter == lower else complemented(ranges)


@lru_cache(maxsize=1)
def _every_character() -> str:
    return "".join(map(chr, range(0x110000)))


@lru_cache(maxsize=8)
def _python_class(letter: str) -> Ranges:
    return normalised(
        (match.start(), match.end() - 1) for match in re.finditer(rf"\{letter}+", _every_character())
    )


@lru_cache(maxsize=256)
def property_class(name: str) -> Ranges | None:
    """The set of \\p{name}: a general category, a script or a binary property; None if there is none."""
    key, _, value = name.partition("=")
    key, value = _plain(key), _plain(value)
    if value:
        if key in ("generalcategory", "gc"):
            return _category(value)
        return _listed(unicode_tables.SCRIPTS, value) if key in ("script", "sc") else None
    if key == "any":
        return ANY_CHARACTER
    if key == "ascii":
        return ((0, 0x7F),)
    if key == "assigned":
        return complemented(_category("cn") or ())
    for found in (_category(key), _listed(unicode_tables.BINARY, key), _listed(unicode_tables.SCRIPTS, key)):
        if found is not None:
            return found
    return property_class(name[2:]) if key.startswith("is") and len(key) > 2 else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


_GROUPS = {
    "l": ("lu", "ll", "lt", "lm", "lo"),
    "lc": ("lu", "ll", "lt"),
    "m": ("mn", "mc", "me"),
    "n": ("nd", "nl", "no"),
    "p": ("pc", "pd", "ps", "pe", "pi", "pf", "po"),
    "s": ("sm", "sc", "sk", "so"),
    "z": ("zs", "zl", "zp"),
    "c": ("cc", "cf", "co", "cn"),
}
_GROUP_NAMES = {
    "letter": "l",
    "casedletter": "lc",
    "mark": "m",
    "combiningmark": "m",
    "number": "n",
    "punctuation": "p",
    "punct": "p",
    "symbol": "s",
    "separator": "z",
    "other": "c",
}


def _category(name: str) -> Ranges | None:
    members = _GROUPS.get(_GROUP_NAMES.get(name, name))
    if members is None:
        return _listed(unicode_tables.CATEGORIES, name)
    return normalised(pair for member in members for pair in _listed(unicode_tables.CATEGORIES, member) or ())


def _listed(table: dict[str, str], name: str) -> Ranges | None:
    for names, encoded in table.items():
        if name in names.split():
            return _decoded(encoded)
    return None


def _decoded(encoded: str) -> Ranges:
    ranges = []
    position = 0
    for item in encoded.split():
        gap, _, extra = item.partition(".")
        low = position + int(gap, 16)
        position = low + (int(extra, 16) if extra else 0) + 1
        ranges.append((low, position - 1))
    return normalised(ranges)


def case_closed(ranges: Ranges, dialect: str, ascii_only: bool = False) -> Ranges:
    """The set together with every character that differs from a member in case only.

    As in Python's re; in ECMA-262's Unicode mode the Turkic dotted and dotless i are not cases of i.
    """
    closed = _case_closed(ranges, ascii_only)
    if dialect == "ecma":
        closed = normalised((*without(closed, _TURKIC), *intersected(ranges, _TURKIC)))
    return closed


_TURKIC: Ranges = ((0x130, 0x131),)


def _case_closed(ranges: Ranges, ascii_only: bool) -> Ranges:
    if ascii_only or all(high < 0x80 for _, high in ranges):
        groups = _ASCII_CASES if ascii_only else _UNICODE_CASES_OF_ASCII
    else:
        groups = _unicode_cases()
    extra: list[tuple[int, int]] = []
    for low, high in ranges:
        for code in range(low, high + 1) if high - low < len(groups) else groups:
            if low <= code <= high:
                extra.extend((other, other) for other in groups.get(code, ()))
    return normalised((*ranges, *extra))


_ASCII_CASES = {code: (code ^ 0x20,) for code in (*range(0x41, 0x5B), *range(0x61, 0x7B))}
# The long s and the Kelvin sign are s and k in another case; dotted and dotless i are i (Python's re).
_UNICODE_CASES_OF_ASCII = _ASCII_CASES | {
    ord("s"): (ord("S"), 0x17F),
    ord("S"): (ord("s"), 0x17F),
    ord("k"): (ord("K"), 0x212A),
    ord("K"): (ord("k"), 0x212A),
    ord("i"): (ord("I"), 0x130, 0x131),
    ord("I"): (ord("i"), 0x130, 0x131),
}


@lru_cache(maxsize=1)
def _unicode_cases() -> dict[int, tuple[int, ...]]:
    """Character -> the others of its case group: characters joined by their one-character case mappings."""
    parent: dict[int, int] = {}

    def find(code: int) -> int:
        while (above := parent.setdefault(code, code)) != code:
            code = above
        return code

    for low, high in intersected(normalised(_cased_ranges()), ANY_CHARACTER):
        for code in range(low, high + 1):
            character = chr(code)
            for mapped in (character.lower(), character.upper()):
                if len(mapped) == 1 and mapped != character:
                    parent[find(code)] = find(ord(mapped))
    parent[find(0x130)] = find(ord("i"))
    parent[find(0x131)] = find(ord("i"))
    parent[find(0xFB05)] = find(0xFB06)
    parent[find(0x390)] = find(0x1FD3)
    parent[find(0x3B0)] = find(0x1FE3)
    groups: dict[int, list[int]] = {}
    for code in list(parent):
        groups.setdefault(find(code), []).append(code)
    return {
        code: tuple(other for other in group if other != code) for group in groups.values() for code in group
    }


def _cased_ranges() -> list[tuple[int, int]]:
    text = _every_character()
    return [
        (code, code)
        for code in range(0x110000)
        if not 0xD800 <= code <= 0xDFFF
        and (text[code].lower() != text[code] or text[code].upper() != text[code])
    ]
