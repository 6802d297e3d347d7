"""JSON numbers within bounds and of a multiple, as expressions over their digits.

Bounds compare digit by digit from the left, so a range is a small tree; all arithmetic is on
integers and decimals, floats are taken by their shortest spelling, and nothing is rounded. (Only an
exclusive bound of a number keeps a distance of one double, so that no reader rounds onto it.)

Integers are written in one way: no leading zero, no fraction, no exponent, no -0. Other numbers are
written plainly (up to 40 digits before the point and 24 after it, more where a bound has more) or as
d.ddde-07 with one digit before and at most 16 after the point, exponents -307 to 307. That takes in all
that json.dumps writes for a finite double below 1e308 in size, but for -0.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, Inexact, localcontext
from functools import lru_cache

from jfbatch.grammar.expression import (
    NOTHING,
    Expression,
    Intersection,
    choice,
    literal,
    optional,
    sequence,
)
from jfbatch.grammar.json_schema.digits import (
    MAX_INTEGER_DIGITS,
    ZERO,
    Fraction,
    digit_between,
    digit_range,
    with_fraction,
)
from jfbatch.grammar.json_schema.multiples import decimal_multiples, integer_multiples
from jfbatch.grammar.json_schema.shape import NumberFacts

Number = int | float | Decimal

MAX_FRACTION_DIGITS = 24
SPARE_DIGITS = 17  # kept free behind the digits of a bound
MAX_BOUND_FRACTION = 60  # digits of a bound after the point that plain numbers look at
MAX_MANTISSA_DIGITS = 16  # after the point, with an exponent
MAX_EXPONENT = 307
MAX_LISTED = 1_000  # multiples in a range that are simply listed

COLUMN_RANGES = ((-(2**63), 2**63 - 1), (1 - 10**38, 10**38 - 1))
"""What an int64 column holds, and what one of 38 decimal digits does."""

_MINUS = literal("-")


@dataclass(frozen=True, slots=True)
class Bound:
    """A finite bound; `open` leaves the value itself out."""

    value: Decimal
    open: bool


FROM_ZERO = Bound(Decimal(0), False)
ABOVE_ZERO = Bound(Decimal(0), True)


def exact(number: Number) -> Decimal:
    """A number as JSON writes it: integers of any size, floats by their shortest spelling."""
    return number if isinstance(number, Decimal) else Decimal(repr(number))


def integer_expression(
    minimum: Number | None = None,
    maximum: Number | None = None,
    *,
    exclusive_minimum: Number | None = None,
    exclusive_maximum: Number | None = None,
    multiple_of: Number | None = None,
) -> Expression:
    """The integers within the bounds that are multiples of `multiple_of` (which is not 0).

    A side without a bound, or with one beyond 40 digits, has up to 40 digits (more if the other side
    has). NOTHING, or an expression that matches nothing, if there is no such integer. Raises
    GrammarTooLarge for a step with too many residues.
    """
    lower = _tightest(minimum, exclusive_minimum, upper=False)
    upper = _tightest(maximum, exclusive_maximum, upper=True)
    if lower is _NEVER or upper is _NEVER:
        return NOTHING
    # n is a multiple of p/q in lowest terms exactly if it is one of p.
    step = 1 if multiple_of is None else exact(multiple_of).copy_abs().as_integer_ratio()[0]
    return _integers(
        None if lower is None else _ceiling(lower), None if upper is None else _floor(upper), step
    )


def held_to_columns(facts: NumberFacts) -> NumberFacts:
    """The bounds of an integer with what its table column adds to a side that has none.

    The column is int64, decimal of 38 digits or text: the first that holds all the bounds, the step, and the
    multiple that a bound leaves nearest to 0.
    Rows know the same rule (`rows.column_types`); a test compares them. Multiples are held by their length,
    as to compare digits and residues at once takes a state for every pair. Where the one bound leaves none so
    short, the other is the column's, with one digit and nines (8999...) where that leaves any: fewer pairs.
    """
    lower, upper = facts.lower, facts.upper
    step = 1 if facts.multiple is None else facts.multiple.numerator
    nearest = _nearest_to_zero(lower, upper, step)
    stated = [exact(step), Decimal(nearest)]
    if lower is not None:
        stated.append(Decimal(_ceiling(Bound(exact(lower[0]), lower[1]))))
    if upper is not None:
        stated.append(Decimal(_floor(Bound(exact(upper[0]), upper[1]))))
    for least, most in COLUMN_RANGES:
        if not all(least <= value <= most for value in stated):
            continue
        characters = len(str(most)) - 1
        if step > 1 and not (lower and upper):
            if len(str(nearest)) <= characters:
                return replace(facts, characters=characters)
            power = 10 ** (len(str(most + 1)) - 1)
            edge = (most + 1) // power * power - 1
            if abs(nearest) <= edge:
                least, most = -edge, edge
        return replace(facts, lower=lower or (least, False), upper=upper or (most, False))
    return facts


def _nearest_to_zero(lower: tuple[Number, bool] | None, upper: tuple[Number, bool] | None, step: int) -> int:
    """The multiple of step nearest to 0 that is within at most one bound."""
    if lower is not None:
        return max(0, -(-_ceiling(Bound(exact(lower[0]), lower[1])) // step) * step)
    return 0 if upper is None else min(0, _floor(Bound(exact(upper[0]), upper[1])) // step * step)


def number_expression(
    minimum: Number | None = None,
    maximum: Number | None = None,
    *,
    exclusive_minimum: Number | None = None,
    exclusive_maximum: Number | None = None,
    multiple_of: Number | None = None,
    exponents: bool = True,
    every_spelling: bool = False,
) -> Expression:
    """The numbers within the bounds that are multiples of `multiple_of` (which is not 0).

    Multiples are written without exponent, with no more fraction digits than the step has (an integer
    also with ".0"); `every_spelling` adds those with any number of trailing zeros, for use in a
    difference. `exponents` False leaves out the spellings with an exponent. NOTHING, or an expression
    that matches nothing, if there is no such number. Raises GrammarTooLarge for a step with too many
    residues.
    """
    lower = _tightest(minimum, exclusive_minimum, upper=False)
    upper = _tightest(maximum, exclusive_maximum, upper=True)
    if lower is _NEVER or upper is _NEVER:
        return NOTHING
    if multiple_of is None:
        return _numbers(lower, upper, exponents)
    return _multiples(lower, upper, exact(multiple_of).copy_abs(), every_spelling)


_NEVER = Bound(Decimal("inf"), True)


def _tightest(closed: Number | None, opened: Number | None, upper: bool) -> Bound | None:
    """The one bound that says both; None if there is none, _NEVER if no number is within."""
    bounds = [
        Bound(exact(value), is_open)
        for value, is_open in ((closed, False), (opened, True))
        if value is not None
    ]
    kept = []
    for bound in bounds:
        if bound.value.is_finite():
            kept.append(bound)
        elif bound.value.is_nan() or (bound.value > 0) != upper:
            return _NEVER
    if not kept:
        return None
    pick = min if upper else max
    value = pick(bound.value for bound in kept)
    return Bound(value, any(bound.open for bound in kept if bound.value == value))


def _floor(bound: Bound) -> int:
    """The largest integer within an upper bound."""
    numerator, denominator = bound.value.as_integer_ratio()
    floor = numerator // denominator
    return floor - 1 if bound.open and denominator == 1 else floor


def _ceiling(bound: Bound) -> int:
    """The least integer within a lower bound."""
    return -_floor(Bound(bound.value.copy_negate(), bound.open))


# Integers


@lru_cache(maxsize=512)
def _integers(low: int | None, high: int | None, step: int) -> Expression:
    if low is not None and high is not None:
        least, most = -(-low // step) * step, high // step * step
        if least > most:
            return NOTHING
        if step > 1 and (most - least) // step < MAX_LISTED:
            return choice(*(literal(str(value)) for value in range(least, most + 1, step)))
    if step == 1:
        return _signed_range(low, high)
    positive, negative = integer_multiples(step)
    by_sign = _by_sign(low, high, step, positive, _after_minus(negative))
    if by_sign is not None:
        return by_sign
    return Intersection((_signed_range(low, high), choice(positive, _after_minus(negative))))


def _by_sign(
    low: int | None, high: int | None, step: int, from_zero: Expression, below_zero: Expression
) -> Expression | None:
    """The multiples of step within bounds that only say something about the sign, else None."""
    if high is None:
        if low is None:
            return choice(from_zero, below_zero)
        return from_zero if -step < low <= 0 else None
    return below_zero if low is None and -step <= high < 0 else None


def _signed_range(low: int | None, high: int | None) -> Expression:
    parts: list[Expression] = []
    if high is None or high >= 0:
        parts.append(digit_range(max(low or 0, 0), high))
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(_after_minus(digit_range(least, None if low is None else -low)))
    return choice(*parts)


def _after_minus(magnitude: Expression) -> Expression:
    return sequence(_MINUS, magnitude)


# Numbers


@lru_cache(maxsize=512)
def _numbers(lower: Bound | None, upper: Bound | None, exponents: bool) -> Expression:
    parts: list[Expression] = []
    for negative in (False, True):
        if not negative:
            low, high = lower, upper
        else:
            low = None if upper is None else Bound(upper.value.copy_negate(), upper.open)
            high = None if lower is None else Bound(lower.value.copy_negate(), lower.open)
        low, high = _as_double(low, upper=False), _as_double(high, upper=True)
        if low is None or low.value < 0:
            low = ABOVE_ZERO if negative else FROM_ZERO
        elif low.value == 0 and negative:
            low = ABOVE_ZERO  # there is no -0
        if high is not None and (
            high.value < low.value or (high.value == low.value and (high.open or low.open))
        ):
            continue
        magnitude = choice(_plain(low, high), _scientific(low, high) if exponents else NOTHING)
        parts.append(_after_minus(magnitude) if negative else magnitude)
    return choice(*parts)


def _as_double(bound: Bound | None, upper: bool) -> Bound | None:
    """An open bound as the closed one at the nearest double within.

    A validator that reads doubles would take what lies closer to the bound for the bound itself.
    """
    if bound is None or not bound.open or bound.value == 0 or abs(bound.value) >= 2**53:
        return bound
    inner = math.nextafter(float(bound.value), -math.inf if upper else math.inf)
    return Bound(exact(inner), False)


def _plain(low: Bound, high: Bound | None) -> Expression:
    """The plain numerals from low >= 0 to high."""
    low = _shortened(low, ROUND_CEILING)
    if high is not None:
        high = _shortened(high, ROUND_FLOOR)
        if high.value < low.value:
            return NOTHING
    low_digits, low_fraction = _split(low)
    longest = max(MAX_INTEGER_DIGITS, len(str(low_digits)) + 1)
    if high is not None and high.value >= 10**longest:
        high = None
    high_digits, high_fraction = _split(high) if high is not None else (10**longest, None)
    bounded = [fraction for fraction in (low_fraction, high_fraction) if fraction is not None]
    most = max([MAX_FRACTION_DIGITS, *(len(fraction.digits) + SPARE_DIGITS for fraction in bounded)])
    if low_digits == high_digits:
        return sequence(literal(str(low_digits)), with_fraction(low_fraction, high_fraction, most))
    parts: list[Expression] = []
    if low_fraction is not None:
        parts.append(sequence(literal(str(low_digits)), with_fraction(low_fraction, None, most)))
        low_digits += 1
    if high_fraction is not None:
        parts.append(sequence(literal(str(high_digits)), with_fraction(None, high_fraction, most)))
    parts.append(sequence(digit_range(low_digits, high_digits - 1), with_fraction(None, None, most)))
    return choice(*parts)


def _shortened(bound: Bound, rounding: str) -> Bound:
    """A bound with at most MAX_BOUND_FRACTION digits after the point, moved inwards if it had more."""
    exponent = bound.value.as_tuple().exponent
    assert isinstance(exponent, int)
    if -exponent <= MAX_BOUND_FRACTION:
        return bound
    with localcontext(Context(prec=max(400, bound.value.adjusted() + 100), rounding=rounding)) as context:
        value = bound.value.quantize(Decimal(1).scaleb(-MAX_BOUND_FRACTION))
        is_exact = not context.flags[Inexact]
    return Bound(value, bound.open and is_exact)


def _split(bound: Bound) -> tuple[int, Fraction | None]:
    """The integer part, and the bound on the fraction (None: any fraction of a lower bound will do)."""
    whole, _, fraction = f"{bound.value:f}".partition(".")
    digits = fraction.rstrip("0")
    return int(whole), Fraction(digits, bound.open)


def _scientific(low: Bound, high: Bound | None) -> Expression:
    """The numerals d.ddde+dd from low >= 0 to high."""
    low_exponent, low_mantissa = (-MAX_EXPONENT - 1, None) if low.value == 0 else _mantissa(low)
    high_exponent, high_mantissa = (MAX_EXPONENT + 1, None)
    if high is not None:
        if high.value <= 0:
            return NOTHING
        high_exponent, high_mantissa = _mantissa(high)
    if low_mantissa and high_mantissa and low_exponent == high_exponent:
        return _with_exponent(low_mantissa, high_mantissa, low_exponent, high_exponent)
    parts = [_with_exponent(None, None, low_exponent + 1, high_exponent - 1)]
    if low_mantissa:
        parts.append(_with_exponent(low_mantissa, None, low_exponent, low_exponent))
    if high_mantissa:
        parts.append(_with_exponent(None, high_mantissa, high_exponent, high_exponent))
    return choice(*parts)


def _mantissa(bound: Bound) -> tuple[int, Bound]:
    exponent = bound.value.adjusted()
    digits = bound.value.as_tuple().digits
    return exponent, Bound(Decimal((0, digits, 1 - len(digits))), bound.open)


def _with_exponent(low: Bound | None, high: Bound | None, first: int, last: int) -> Expression:
    """Mantissas from low to high with any exponent of first..last."""
    first, last = max(first, -MAX_EXPONENT), min(last, MAX_EXPONENT)
    if first > last:
        return NOTHING
    low_digit, low_fraction = _split(low) if low else (1, None)
    high_digit, high_fraction = _split(high) if high else (10, None)
    most = MAX_MANTISSA_DIGITS
    if low_digit == high_digit:
        mantissa = sequence(literal(str(low_digit)), with_fraction(low_fraction, high_fraction, most))
    else:
        parts: list[Expression] = []
        if low_fraction is not None:
            parts.append(sequence(literal(str(low_digit)), with_fraction(low_fraction, None, most)))
            low_digit += 1
        if high_fraction is not None:
            parts.append(sequence(literal(str(high_digit)), with_fraction(None, high_fraction, most)))
        between = digit_between(low_digit, high_digit - 1)
        if between != NOTHING:
            parts.append(sequence(between, with_fraction(None, None, most)))
        mantissa = choice(*parts)
    return sequence(mantissa, literal("e"), _exponents(first, last))


def _exponents(first: int, last: int) -> Expression:
    parts: list[Expression] = []
    if last >= 0:
        parts.append(sequence(optional(literal("+")), _exponent_digits(max(first, 0), last)))
    if first < 0:
        parts.append(_after_minus(_exponent_digits(max(1, -last), -first)))
    return choice(*parts)


def _exponent_digits(low: int, high: int) -> Expression:
    """Numerals, those of one digit also with a zero before (as C and Python print them)."""
    padded = sequence(ZERO, digit_between(low, min(high, 9)))
    return choice(padded, digit_range(low, high))


# Multiples


@lru_cache(maxsize=512)
def _multiples(lower: Bound | None, upper: Bound | None, step: Decimal, every_spelling: bool) -> Expression:
    numerator, scale = _as_scaled(step)
    least = None if lower is None else _ceiling(Bound(_times_power(lower.value, scale), lower.open))
    most = None if upper is None else _floor(Bound(_times_power(upper.value, scale), upper.open))
    if least is not None and most is not None:
        least, most = -(-least // numerator) * numerator, most // numerator * numerator
        if least > most:
            return NOTHING
        if (most - least) // numerator < MAX_LISTED and not every_spelling:
            texts = [text for value in range(least, most + 1, numerator) for text in _spellings(value, scale)]
            return choice(*map(literal, texts))
    positive, negative = decimal_multiples(numerator, scale, every_spelling)
    by_sign = _by_sign(least, most, numerator, positive, _after_minus(negative))
    if by_sign is not None:
        return by_sign
    return Intersection((_numbers(lower, upper, False), choice(positive, _after_minus(negative))))


def _as_scaled(step: Decimal) -> tuple[int, int]:
    """(n, scale) with step = n / 10**scale and the least scale >= 0."""
    sign, digits, exponent = step.as_tuple()
    assert isinstance(exponent, int) and sign == 0
    number = int("".join(map(str, digits)))
    while exponent < 0 and number % 10 == 0:
        number, exponent = number // 10, exponent + 1
    return (number * 10**exponent, 0) if exponent >= 0 else (number, -exponent)


def _times_power(value: Decimal, scale: int) -> Decimal:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    return Decimal((sign, digits, exponent + scale))


def _spellings(value: int, scale: int) -> list[str]:
    """value / 10**scale as json.dumps writes an int or a float (without exponent)."""
    text = f"{_times_power(Decimal(value), -scale):f}"
    if "." not in text:
        return [text, text + ".0"] if value else ["0", "0.0"]
    text = text.rstrip("0").rstrip(".")
    return _spellings(int(text), 0) if "." not in text else [text]
