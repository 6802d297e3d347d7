"""JSON numbers within bounds and of a multiple, as expressions over their digits.

Bounds compare digit by digit from the left, so a range is a small tree; all arithmetic is on
integers, floats are taken by their shortest decimal spelling, and nothing is rounded.

Integers are written in one way: no leading zero, no fraction, no exponent, no -0. Other numbers are
written plainly (up to 40 digits before the point and 24 after it, more where a bound has more) or as
d.ddde-07 with one digit before and at most 16 after the point, exponents -307 to 307, which takes in all
that json.dumps writes for a finite double but -0.0 and those beyond 1e308 in size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar.expression import (
    EMPTY,
    NOTHING,
    ByteSet,
    ExplicitAutomaton,
    Expression,
    Intersection,
    choice,
    literal,
    optional,
    repeat,
    sequence,
)

Number = int | float | Decimal

MAX_INTEGER_DIGITS = 40
MAX_FRACTION_DIGITS = 24
SPARE_DIGITS = 17  # kept free behind the digits of a bound
MAX_MANTISSA_DIGITS = 16  # after the point, with an exponent
MAX_EXPONENT = 307
MAX_STEP_STATES = 200_000  # of the automaton of a multiple
MAX_LISTED = 1_000  # multiples in a range that are simply listed

DIGIT = ByteSet.span(0x30, 0x39)
_NONZERO = ByteSet.span(0x31, 0x39)
_MINUS = literal("-")


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound: |value| = digits * 10**-scale."""

    value: Decimal
    exclusive: bool


def exact(number: Number) -> Decimal:
    """A number as written: integers of any size, floats by their shortest spelling."""
    return number if isinstance(number, Decimal) else Decimal(repr(number))


def integer_expression(
    minimum: Number | None = None,
    maximum: Number | None = None,
    *,
    exclusive_minimum: Number | None = None,
    exclusive_maximum: Number | None = None,
    multiple_of: Number | None = None,
) -> Expression:
    """The integers within the bounds that are multiples of `multiple_of`, in decimal.

    A side without a bound has up to 40 digits (more if the other bound has). NOTHING, or an expression
    that matches nothing, if there is no such integer. Raises GrammarTooLarge for a step whose residues
    are too many.
    """
    low, high = _integer_bounds(
        _tightest(minimum, exclusive_minimum, upper=False), _tightest(maximum, exclusive_maximum, upper=True)
    )
    if low is not None and high is not None and low > high:
        return NOTHING
    step = 1
    if multiple_of is not None:
        numerator, denominator = abs(exact(multiple_of)).as_integer_ratio()
        if numerator == 0:
            return NOTHING
        step = numerator  # n is a multiple of p/q (in lowest terms) exactly if it is one of p
        del denominator
    return _integers(low, high, step)
