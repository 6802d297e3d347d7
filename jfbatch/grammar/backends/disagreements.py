"""Where the backends read one pattern differently, and who is right. Each entry is held by a test.

Judged by JSON (RFC 8259), JSON Schema 2020-12 and its formats, Python's re for regular expressions, and for
grammars by what the file says about characters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from jfbatch.grammar.backends.protocol import BackendName


@dataclass(frozen=True)
class Disagreement:
    """A text that some backends take as an output of a pattern and some do not; others refuse the pattern.

    right: "accept" or "refuse", or "either" where both are valid and one chooses among spellings. JSON
    patterns are in the compact style.
    """

    kind: str
    pattern: str
    text: bytes
    accepted: tuple[BackendName, ...]
    refused: tuple[BackendName, ...]
    right: Literal["accept", "refuse", "either"]
    why: str


def _names(names: str) -> tuple[BackendName, ...]:
    letters: dict[str, BackendName] = {"f": "fsm", "l": "llguidance", "x": "xgrammar", "o": "outlines"}
    return tuple(letters[letter] for letter in names)


def _entry(
    kind: str,
    pattern: Any,
    text: bytes | str,
    names: str,
    right: Literal["accept", "refuse", "either"],
    why: str,
) -> Disagreement:
    """`names` is "those that accept:those that refuse", by first letters."""
    accepted, refused = names.split(":")
    written = json.dumps(pattern) if kind in ("schema", "choice") else pattern
    data = text.encode() if isinstance(text, str) else text
    return Disagreement(kind, written, data, _names(accepted), _names(refused), right, why)


def _string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


_BOOLEANS = {"type": "array", "items": {"type": "boolean"}}
_BOTH = {
    "allOf": [
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        {"properties": {"b": {"type": "null"}}, "required": ["b"]},
    ]
}
_LATER = "a token that goes on from a complete text is dropped unless the text is complete again after it"

DISAGREEMENTS = (
    # Regular expressions
    _entry("regex", "a|ab", "ab", "flx:o", "accept", "the first alternative that matches hides longer ones"),
    _entry("regex", "(?:ab)+?", "abab", "flx:o", "accept", "a lazy repeat ends at once"),
    _entry("regex", r"[0-9]+(\.[0-9]+)?", "0.6", "flx:o", "accept", _LATER),
    _entry("choice", ["red", "red-ish"], "red-ish", "flx:o", "accept", _LATER),
    _entry("regex", ".", "\n", "x:flo", "refuse", "a dot is no line end"),
    _entry("regex", r"\d", "٣", "flo:x", "accept", "digits of all scripts; XGrammar's classes are ASCII"),
    _entry("regex", r"\w", "é", "flo:x", "accept", "letters of all scripts; XGrammar's classes are ASCII"),
    _entry("regex", r"\w", "\u0301", "lo:fx", "refuse", "Rust counts combining marks, Python does not"),
    _entry("regex", r"\w", "²", "f:lxo", "accept", "Python counts all numerals, Rust decimal digits"),
    _entry("regex", r"\s", "\x1d", "f:lxo", "accept", "Python counts the four separators of ASCII"),
    _entry("regex", "[[:alpha:]]", "a", "lo:fx", "refuse", "Python has no POSIX classes"),
    _entry("regex", "[a&&b]", "&", "fx:l", "accept", "Python has no intersections"),
    _entry("regex", r"a\Z", "a", "f:x", "accept", r"XGrammar takes \Z for the letter Z"),
    # Grammars
    _entry(
        "grammar",
        "start: A B\nA: /a+/\nB: /ab/\n",
        "aab",
        "fx:l",
        "accept",
        "llguidance's lexer takes the longest A and leaves nothing for B",
    ),
    # JSON: spellings
    _entry("schema", {"type": "integer"}, "-0", "lo:fx", "either", "a spelling of 0"),
    _entry("schema", {"type": "number"}, "1E5", "lx:fo", "either", "a spelling of 1e5"),
    _entry("schema", {"type": "number"}, "1.5", "flx:o", "accept", _LATER),
    _entry("schema", _string(), b'"\x7f"', "fx:lo", "either", "llguidance writes it as an escape"),
    _entry("schema", _string(), r'"\/"', "xo:fl", "either", "a needless escape"),
    _entry("schema", _string(), r'"\u0041"', "x:flo", "either", "a needless escape"),
    _entry("schema", _string(), r'"\u0007"', "flx:o", "accept", "outlines-core writes no such character"),
    _entry("schema", _string(), b'"\xed\xa2\x8d"', "x:flo", "refuse", "half a surrogate pair is not UTF-8"),
    _entry(
        "schema", _string(maxLength=3), b'"\x1b"', "x:flo", "refuse", "a control character must be escaped"
    ),
    _entry("schema", _string(maxLength=3), r'"a\nb"', "flo:x", "accept", "XGrammar writes no escapes there"),
    # JSON Schema: keywords
    _entry("schema", _string(pattern="[0-9]"), '"a1b"', "fl:xo", "accept", "a pattern is a search"),
    _entry("schema", _string(pattern=r"^\d$"), '"٣"', "o:flx", "refuse", "ECMA's digits are ASCII"),
    _entry("schema", _string(pattern="^(?=.*a).*$"), '"b"', "x:f", "refuse", "XGrammar ignores look-ahead"),
    _entry("schema", _string(format="date"), '"2023-02-30"', "xo:fl", "refuse", "no such day"),
    _entry("schema", _string(format="time"), '"12:12:12"', "o:flx", "refuse", "a time has an offset"),
    _entry("schema", _string(format="time"), '"12:12:60Z"', "lx:fo", "refuse", "no leap second at that time"),
    _entry("schema", _string(format="time"), '"12:12:12z"', "fl:xo", "either", "a spelling of Z"),
    _entry("schema", _string(format="ipv4"), '"01.2.3.4"', "x:fl", "refuse", "leading zeros"),
    _entry("schema", _string(format="email"), '"a@b"', "flx:o", "accept", "a domain needs no dot"),
    _entry(
        "schema",
        _string(format="uuid"),
        '"FF60C12E-30EC-4EB7-8B39-ABDF9FA1ABDB"',
        "flx:o",
        "accept",
        "letters of either case",
    ),
    _entry("schema", {"type": "integer", "minimum": 3}, "2", "o:flx", "refuse", "minimum is passed over"),
    _entry(
        "schema", {"type": "integer", "multipleOf": 5}, "7", "o:flx", "refuse", "multipleOf is passed over"
    ),
    _entry(
        "schema",
        {**_BOOLEANS, "uniqueItems": True},
        "[true,true]",
        "xo:f",
        "refuse",
        "uniqueItems is passed over",
    ),
    _entry(
        "schema",
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}},
        "[2]",
        "xo:f",
        "refuse",
        "contains is passed over",
    ),
    _entry("schema", {"not": {"type": "string"}}, '"a"', "x:f", "refuse", "not is passed over"),
    _entry("schema", _BOTH, '{"a":null}', "x:flo", "refuse", "of two subschemas only one is held"),
    _entry(
        "schema",
        _BOTH,
        '{"a":null,"b":null}',
        "flx:o",
        "accept",
        "the subschemas are written one after another",
    ),
    _entry(
        "schema",
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "1",
        "xo:f",
        "refuse",
        "both alternatives hold",
    ),
    _entry(
        "schema",
        {"type": "object", "minProperties": 1, "properties": {"a": {"type": "null"}}},
        "{}",
        "o:flx",
        "refuse",
        "minProperties is passed over",
    ),
    _entry(
        "schema",
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}},
        '{"b":null}',
        "o:fx",
        "refuse",
        "propertyNames is passed over",
    ),
)
