"""Digit strings between bounds: the parts of numerals before and after the point.

Both sides compare digit by digit from the left: as long as a string follows a bound it is held by it,
with the first other digit it is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from jfbatch.grammar.expression import (
    EMPTY,
    NOTHING,
    ByteSet,
    Expression,
    choice,
    literal,
    repeat,
    sequence,
)

MAX_INTEGER_DIGITS = 40
MAX_NESTED_DIGITS = 60  # longer bounds are compared by alternatives side by side

DIGIT = ByteSet.span(0x30, 0x39)
NONZERO = ByteSet.span(0x31, 0x39)
ZERO = literal("0")
_POINT = literal(".")


def digit_range(low: int, high: int | None) -> Expression:
    """The decimal numerals of low..high, 0 <= low, without leading zeros; high None is up to 40 digits."""
    longest = max(MAX_INTEGER_DIGITS, len(str(low)) + 1)
    if high is None or len(str(high)) > longest:
        high = 10**longest - 1
    if low > high:
        return NOTHING
    if low == 0:
        return choice(ZERO, digit_range(1, high)) if high else ZERO
    first, last = str(low), str(high)
    if len(first) == len(last):
        return _same_length(first, last)
    parts: list[Expression] = []
    shortest, longest = len(first), len(last)
    if low > 10 ** (shortest - 1):
        parts.append(_same_length(first, "9" * shortest))
        shortest += 1
    if high < 10**longest - 1:
        parts.append(_same_length("1" + "0" * (longest - 1), last))
        longest -= 1
    if shortest <= longest:
        parts.append(sequence(NONZERO, repeat(DIGIT, shortest - 1, longest - 1)))
    return choice(*parts)


def _same_length(first: str, last: str) -> Expression:
    """The digit strings between two of one length, by value."""
    length = len(first)
    if first == last:
        return literal(first)
    if first == "0" * length and last == "9" * length:
        return repeat(DIGIT, length, length)
    common = 0
    while first[common] == last[common]:
        common += 1
    prefix, first, last = first[:common], first[common:], last[common:]
    length -= common + 1
    low, high = int(first[0]), int(last[0])
    parts: list[Expression] = []
    if first[1:].strip("0"):
        parts.append(sequence(literal(first[0]), _one_sided(first[1:], upper=False)))
        low += 1
    if last[1:].strip("9"):
        parts.append(sequence(literal(last[0]), _one_sided(last[1:], upper=True)))
        high -= 1
    if low <= high:
        parts.append(sequence(digit_between(low, high), repeat(DIGIT, length, length)))
    return sequence(literal(prefix), choice(*parts))


def _one_sided(bound: str, upper: bool) -> Expression:
    """The digit strings as long as `bound` and at least (upper: at most) it."""
    limit = "9" if upper else "0"
    tight = len(bound.rstrip(limit))  # behind it every digit will do
    sides = []  # by place: the digits that leave the bound for good
    for place in range(tight):
        digit = int(bound[place])
        sides.append(digit_between(0, digit - 1) if upper else digit_between(digit + 1, 9))
    ends = [repeat(DIGIT, len(bound) - place - 1, len(bound) - place - 1) for place in range(tight)]
    rest = repeat(DIGIT, len(bound) - tight, len(bound) - tight)
    if tight > MAX_NESTED_DIGITS:
        options = [sequence(literal(bound[:place]), sides[place], ends[place]) for place in range(tight)]
        return choice(sequence(literal(bound[:tight]), rest), *options)
    for place in reversed(range(tight)):
        rest = choice(sequence(literal(bound[place]), rest), sequence(sides[place], ends[place]))
    return rest


def digit_between(low: int, high: int) -> Expression:
    """One digit from `low` to `high`, both included."""
    if low > high:
        return NOTHING
    return literal(str(low)) if low == high else ByteSet.span(0x30 + low, 0x30 + high)


@dataclass(frozen=True, slots=True)
class Fraction:
    """A bound on the digits after the point; the digits have no trailing zeros."""

    digits: str
    open: bool


def with_fraction(low: Fraction | None, high: Fraction | None, most: int) -> Expression:
    """Nothing or a point and digits, such that the fraction is within the bounds."""
    low = None if low is not None and not low.digits and not low.open else low
    absent = EMPTY if _may_stop(low, high) else NOTHING
    return choice(absent, sequence(_POINT, _fraction_digits(low, high, most, first=True)))


def _may_stop(low: Fraction | None, high: Fraction | None) -> bool:
    """Whether only zeros from here on are within the bounds."""
    return low is None and (high is None or bool(high.digits) or not high.open)


def _fraction_digits(low: Fraction | None, high: Fraction | None, most: int, first: bool) -> Expression:
    """Up to `most` digits (first: at least one) such that what they say after the point is within."""
    if low is not None and not low.digits and not low.open:
        low = None
    least = int(first)
    if high is not None and not high.digits:
        only_zeros = low is None and not high.open and most >= least
        return repeat(ZERO, least, most) if only_zeros else NOTHING
    if low is None and high is None:
        return repeat(DIGIT, least, most) if most >= least else NOTHING
    if most == 0:
        return EMPTY if _may_stop(low, high) and not first else NOTHING
    if high is None and low is not None and not low.digits:
        return sequence(repeat(ZERO, 0, most - 1), NONZERO, repeat(DIGIT, 0, most - 1))
    low_digit = int(low.digits[:1] or "0") if low is not None else -1
    high_digit = int(high.digits[:1]) if high is not None else 10
    low_rest = Fraction(low.digits[1:], low.open) if low is not None else None
    high_rest = Fraction(high.digits[1:], high.open) if high is not None else None
    parts: list[Expression] = [EMPTY] if _may_stop(low, high) and not first else []
    if low_digit == high_digit:
        parts.append(
            sequence(literal(str(low_digit)), _fraction_digits(low_rest, high_rest, most - 1, False))
        )
        return choice(*parts)
    if low is not None and low_digit < high_digit:
        parts.append(sequence(literal(str(low_digit)), _fraction_digits(low_rest, None, most - 1, False)))
    if high is not None and low_digit < high_digit:
        parts.append(sequence(literal(str(high_digit)), _fraction_digits(None, high_rest, most - 1, False)))
    between = digit_between(low_digit + 1, high_digit - 1)
    if between != NOTHING:
        parts.append(sequence(between, repeat(DIGIT, 0, most - 1)))
    return choice(*parts)
