"""Sets of characters, and how a character is spelled in bytes.

A set is a sorted tuple of disjoint (low, high) code point ranges; surrogates never belong, as no UTF-8
text holds them. A set becomes a trie of byte sets, equal subtrees shared, so that even "any letter"
stays small (range splitting after R. Cox, "Regular Expression Matching in the Wild", 2010).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import lru_cache

from jfbatch.grammar.expression import ByteSet, Expression, Literal, choice, sequence

Ranges = tuple[tuple[int, int], ...]

ANY_CHARACTER: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


class Alphabet(Enum):
    """How a decoded character is written.

    RAW_UTF8: as itself. JSON_STRING: inside a JSON string, in one spelling only: as itself, or as its
    shortest escape where JSON demands one (a letter escape, else \\u00xx in lower case), which is what
    json.dumps(ensure_ascii=False) writes.
    """

    RAW_UTF8 = "raw"
    JSON_STRING = "json"


RAW_UTF8 = Alphabet.RAW_UTF8
JSON_STRING = Alphabet.JSON_STRING

_SHORT_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))


def normalised(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Any ranges, sorted, joined and without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            if high > merged[-1][1]:
                merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    if merged and merged[-1][1] >= 0xD800:
        return intersected(tuple(merged), ANY_CHARACTER)
    return tuple(merged)


def intersected(one: Ranges, other: Ranges) -> Ranges:
    """The characters of both sets."""
    if one == ANY_CHARACTER:
        return other
    result = []
    i = j = 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if low <= high:
            result.append((low, high))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)


@lru_cache(maxsize=1024)
def complemented(ranges: Ranges) -> Ranges:
    """The characters outside the set."""
    gaps = []
    start = 0
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, 0x110000))
    return intersected(tuple(gaps), ANY_CHARACTER)


def without(one: Ranges, other: Ranges) -> Ranges:
    """The characters of the first set that are not in the second."""
    return intersected(one, complemented(other))


def contains(ranges: Ranges, code_point: int) -> bool:
    """Whether a character belongs to the set."""
    return any(low <= code_point <= high for low, high in ranges)


def escaped(code_point: int) -> str | None:
    """The escape of a character that may not stand for itself in a JSON string, else None."""
    short = _SHORT_ESCAPES.get(code_point)
    if short is not None:
        return "\\" + short
    return f"\\u{code_point:04x}" if code_point < 0x20 else None


@lru_cache(maxsize=4096)
def character_expression(ranges: Ranges, alphabet: Alphabet) -> Expression:
    """One character of the set, as bytes."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        code_point = ranges[0][0]
        spelled = escaped(code_point) if alphabet is JSON_STRING else None
        return Literal((spelled or chr(code_point)).encode("utf-8"))
    ascii_bits = 0
    rest: list[tuple[int, int]] = []
    for low, high in ranges:
        if low < 0x80:
            top = min(high, 0x7F)
            ascii_bits |= ((1 << (top - low + 1)) - 1) << low
        if high >= 0x80:
            rest.append((max(low, 0x80), high))
    parts: list[Expression] = []
    escapes: list[Expression] = []
    if alphabet is JSON_STRING:
        escaped_bits = ascii_bits & _ESCAPED_BITS
        ascii_bits ^= escaped_bits
        if escaped_bits:
            escapes.append(_escapes(escaped_bits))
    if ascii_bits:
        parts.append(ByteSet(ascii_bits))
    parts.extend(_non_ascii(tuple(rest)))
    return choice(*parts, *escapes)


_ESCAPED_BITS = sum(1 << code for low, high in _ESCAPED for code in range(low, high + 1))


def _escapes(bits: int) -> Expression:
    """The escapes of a set of characters below 0x80, given as a bit set."""
    short = ByteSet.of(ord(letter) for code, letter in _SHORT_ESCAPES.items() if bits >> code & 1)
    parts: list[Expression] = [short] if short.bits else []
    for high_digit in (0, 1):
        digits = [
            ord(f"{code & 15:x}")
            for code in range(high_digit * 16, high_digit * 16 + 16)
            if bits >> code & 1 and code not in _SHORT_ESCAPES
        ]
        if digits:
            parts.append(sequence(Literal(f"u00{high_digit}".encode()), ByteSet.of(digits)))
    return sequence(Literal(b"\\"), choice(*parts))


@lru_cache(maxsize=1024)
def _non_ascii(ranges: Ranges) -> tuple[Expression, ...]:
    """Alternatives for characters from 0x80 on, by the length of their UTF-8."""
    parts: list[Expression] = []
    for first_byte, tail, low_limit, high_limit in (
        (0xC0, 1, 0x80, 0x7FF),
        (0xE0, 2, 0x800, 0xFFFF),
        (0xF0, 3, 0x10000, 0x10FFFF),
    ):
        within = intersected(ranges, ((low_limit, high_limit),))
        if within:
            parts.extend(_byte_trie(first_byte, tail, within))
    return tuple(parts)


def _byte_trie(base: int, tail: int, ranges: Ranges) -> list[Expression]:
    """One byte base + value // 64**tail, then `tail` continuation bytes; values as ranges."""
    if tail == 0:
        return [ByteSet(sum(((1 << (high - low + 1)) - 1) << (base + low) for low, high in ranges))]
    block = 64**tail
    whole = 0  # bit set of bytes whose whole block belongs
    partial: dict[int, list[tuple[int, int]]] = {}
    for low, high in ranges:
        first, last = low // block, high // block
        if first == last:
            partial.setdefault(first, []).append((low % block, high % block))
            continue
        if low % block:
            partial.setdefault(first, []).append((low % block, block - 1))
            first += 1
        if high % block < block - 1:
            partial.setdefault(last, []).append((0, high % block))
            last -= 1
        if first <= last:
            whole |= ((1 << (last - first + 1)) - 1) << first
    groups: dict[Ranges, int] = {((0, block - 1),): whole} if whole else {}
    for index, pieces in partial.items():
        key = tuple(pieces)
        groups[key] = groups.get(key, 0) | 1 << index
    return [
        sequence(_one_byte(bits << base), _tail_expression(tail - 1, key)) for key, bits in groups.items()
    ]


def _one_byte(bits: int) -> Expression:
    return Literal(bytes([bits.bit_length() - 1])) if bits & (bits - 1) == 0 else ByteSet(bits)


@lru_cache(maxsize=4096)
def _tail_expression(tail: int, ranges: Ranges) -> Expression:
    return choice(*_byte_trie(0x80, tail, ranges))


JSON_CHARACTER = character_expression(ANY_CHARACTER, JSON_STRING)
