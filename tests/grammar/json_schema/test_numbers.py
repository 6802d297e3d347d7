"""Numbers: bounds and multiples are exact, against brute force and exact fractions."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from fractions import Fraction

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar.expression import NOTHING, ExplicitAutomaton, Intersection
from jfbatch.grammar.json_schema.digits import digit_range
from jfbatch.grammar.json_schema.numbers import exact, integer_expression, number_expression
from tests.grammar.expression_oracle import CannotSample, matches, sample, size

Bounds = dict[str, int | float]

BOUND = (
    st.integers(-120, 120)
    | st.integers(-500, 500).map(lambda n: n / 8)
    | st.sampled_from([0.1, -0.3, 1e-7, 12.75])
)
BOUNDS = st.fixed_dictionaries(
    {}, optional={"minimum": BOUND, "maximum": BOUND, "exclusive_minimum": BOUND, "exclusive_maximum": BOUND}
)
STEPS = st.sampled_from([1, 2, 3, 5, 7, 10, 12, 0.5, 2.5, 0.1, 0.01, 0.3, 25, 1.0])


def within(value: Fraction, bounds: Bounds, step: int | float | None = None) -> bool:
    limits = {name: Fraction(exact(bound)) for name, bound in bounds.items()}
    return (
        ("minimum" not in limits or value >= limits["minimum"])
        and ("maximum" not in limits or value <= limits["maximum"])
        and ("exclusive_minimum" not in limits or value > limits["exclusive_minimum"])
        and ("exclusive_maximum" not in limits or value < limits["exclusive_maximum"])
        and (step is None or (value / Fraction(exact(step))).denominator == 1)
    )


@settings(max_examples=150, deadline=None)
@given(bounds=BOUNDS, step=st.none() | STEPS)
def test_integers_agree_with_brute_force(bounds: Bounds, step: int | float | None) -> None:
    expression = integer_expression(**bounds, multiple_of=step)
    for value in range(-130, 131):
        assert matches(expression, str(value)) == within(Fraction(value), bounds, step), value


@settings(max_examples=60, deadline=None)
@given(low=st.integers(0, 10**8), more=st.integers(0, 10**6), near=st.integers(-3, 3))
def test_digit_ranges_hold_exactly_their_numerals(low: int, more: int, near: int) -> None:
    expression = digit_range(low, low + more)
    for value in (low + near, low + more + near, low + more // 2):
        if value >= 0:
            assert matches(expression, str(value)) == (low <= value <= low + more)
            assert not matches(expression, f"0{value}")


@settings(max_examples=200, deadline=None)
@given(
    bounds=BOUNDS,
    step=st.none() | STEPS,
    values=st.lists(
        st.floats(-150, 150, allow_subnormal=False) | st.integers(-1200, 1200).map(lambda n: n / 8),
        min_size=10,
    ),
)
def test_numbers_agree_with_exact_fractions(
    bounds: Bounds, step: int | float | None, values: list[float]
) -> None:
    expression = number_expression(**bounds, multiple_of=step)  # type: ignore[arg-type]
    near = [edge + shift for edge in bounds.values() for shift in (0, 0.5, -0.5, 1, -1, 0.01, 1e-9)]
    for value in [*values, *near, 0, 1, -1, 0.3]:
        text = json.dumps(value)
        if text == "-0.0" or (step and "e" in text) or 0 < abs(value) < 1e-300:
            continue
        assert matches(expression, text) == within(Fraction(Decimal(text)), bounds, step), text


@settings(max_examples=80, deadline=None)
@given(bounds=BOUNDS, step=st.none() | STEPS, integers=st.booleans(), seed=st.integers(0, 99))
def test_sampled_numbers_are_valid_json_and_valid_to_the_final_check(
    bounds: Bounds, step: int | float | None, integers: bool, seed: int
) -> None:
    make = integer_expression if integers else number_expression
    expression = make(**bounds, multiple_of=step)
    schema: dict[str, object] = {"type": "integer" if integers else "number"}
    names = {"exclusive_minimum": "exclusiveMinimum", "exclusive_maximum": "exclusiveMaximum"}
    schema |= {names.get(name, name): bound for name, bound in bounds.items()}
    if step is not None:
        schema["multipleOf"] = step
    validator = jsonschema_rs.validator_for(schema)
    source = random.Random(seed)
    for _ in range(20):
        try:
            text = sample(expression, source, tries=20).decode()
        except CannotSample:
            continue
        value = Fraction(Decimal(text))
        assert within(value, bounds, step)
        assert validator.is_valid(json.loads(text)), text
        assert not (value == 0 and text.startswith("-"))


@settings(max_examples=150, deadline=None)
@given(bounds=BOUNDS, step=st.none() | STEPS)
def test_an_integer_expression_is_empty_only_if_no_integer_is_within(
    bounds: Bounds, step: int | float | None
) -> None:
    expression = integer_expression(**bounds, multiple_of=step)
    if expression == NOTHING:
        assert not any(within(Fraction(value), bounds, step) for value in range(-600, 601))
    elif not isinstance(expression, Intersection):
        assert sample(expression, random.Random(3))


@given(st.integers())
def test_free_integers_are_every_integer_of_up_to_40_digits(value: int) -> None:
    assert matches(integer_expression(), str(value)) == (len(str(abs(value))) <= 40)


@pytest.mark.parametrize("text", ["-0", "00", "01", "+1", "1.0", "1e3", "", "-", " 1", "1 "])
def test_integers_have_one_spelling(text: str) -> None:
    assert not matches(integer_expression(), text)


@settings(deadline=None)
@given(st.floats(1e-307, 9e307) | st.integers(1, 10**39).map(float), st.booleans())
def test_free_numbers_are_written_as_json_dumps_writes_them(value: float, negative: bool) -> None:
    assert matches(number_expression(), json.dumps(-value if negative else value))


@pytest.mark.parametrize(
    "text", ["-0", "-0.0", "01", "1.", ".5", "+1", "1e400", "1e-400", "NaN", "12e5", "0e1"]
)
def test_other_spellings_are_not_numbers(text: str) -> None:
    assert not matches(number_expression(), text)


@pytest.mark.parametrize("text", ["1e5", "1.5e+300", "1e-07", "2E5"])
def test_exponents_are_written_with_a_small_e(text: str) -> None:
    assert matches(number_expression(), text) == ("E" not in text)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (
            {"exclusive_minimum": 0, "maximum": 1},
            ["0.1", "1", "0.000001", "1.0", "1e-07"],
            ["0", "0.0", "1.01", "1e0001"],
        ),
        ({"minimum": 1, "maximum": 5}, ["1", "4.999", "5.0"], ["5.7", "0.99", "5.0001", "-3"]),
        ({"minimum": -1.5, "maximum": -0.25}, ["-1.5", "-0.25", "-1"], ["-0.2", "-1.51", "0", "1"]),
        ({"minimum": 0.1, "maximum": 0.1}, ["0.1", "0.10"], ["0.11", "0.09", "0", "1"]),
        ({"exclusive_minimum": 5, "exclusive_maximum": 6}, ["5.5", "5.001"], ["5", "6", "5.0", "6.0"]),
        (
            {"minimum": 1e-10, "maximum": 2e-10},
            ["1e-10", "0.00000000015", "1.5e-10"],
            ["3e-10", "1e-11", "0"],
        ),
        ({"maximum": 1e300}, ["1e300", "9.9e299", "-1e307"], ["1.01e300", "2e300"]),
        ({"minimum": 0, "maximum": 1.7976931348623157e308}, ["1e307", "0", "12345.678"], ["-1"]),
        ({"exclusive_minimum": 5e-324}, ["1e-300", "1"], ["0", "-1"]),
        ({"minimum": 10**50}, ["1" + "0" * 50, "1e50"], ["9" * 50, "1e49"]),
    ],
)
def test_bounds_hold_in_every_spelling(bounds: Bounds, inside: list[str], outside: list[str]) -> None:
    expression = number_expression(**bounds)  # type: ignore[arg-type]
    assert [text for text in inside if not matches(expression, text)] == []
    assert [text for text in outside if matches(expression, text)] == []


@pytest.mark.parametrize("bound", [-(10**38) - 1, -(10**39) - 7, 10**39 + 3])
def test_long_bounds_are_not_rounded(bound: int) -> None:
    above, below = integer_expression(bound, None), integer_expression(None, bound)
    for distance in (-1, 0, 1):
        text = str(bound + distance).encode()
        assert matches(above, text) == (distance >= 0)
        assert matches(below, text) == (distance <= 0)


def test_contradictory_bounds_match_nothing() -> None:
    assert integer_expression(3, 2) == NOTHING
    assert integer_expression(exclusive_minimum=1, exclusive_maximum=2) == NOTHING
    assert integer_expression(1, 4, multiple_of=5) == NOTHING
    assert number_expression(exclusive_minimum=1, maximum=1) == NOTHING
    assert number_expression(0.1, 0.2, multiple_of=0.5) == NOTHING
    assert number_expression(minimum=float("inf")) == NOTHING


def test_infinite_bounds_on_the_free_side_say_nothing() -> None:
    assert number_expression(maximum=float("inf")) == number_expression()
    assert integer_expression(minimum=float("-inf")) == integer_expression()


@pytest.mark.parametrize("step", [7, 12, 36, 997])
def test_multiples_with_residues_are_an_automaton(step: int) -> None:
    expression = integer_expression(0, multiple_of=step)
    assert isinstance(expression, ExplicitAutomaton)
    values = [0, step, step * 12345, step * 10**30, step - 1, step * 777 + 1]
    for value in values:
        assert matches(expression, str(value)) == (value % step == 0)


@pytest.mark.parametrize("step", [2, 4, 5, 25, 100, 1000, 125])
def test_multiples_by_their_last_digits_are_small(step: int) -> None:
    assert size(integer_expression(multiple_of=step)) < 2000
    for value in range(25, 3000, 25):
        assert matches(integer_expression(multiple_of=step), str(-value)) == (value % step == 0)


def test_steps_with_too_many_residues_are_refused() -> None:
    with pytest.raises(GrammarTooLarge):
        integer_expression(multiple_of=1_000_003)


def test_every_spelling_of_a_multiple_can_be_taken_away() -> None:
    every = number_expression(multiple_of=1, every_spelling=True)
    assert all(
        matches(every, text) for text in ["0", "5", "5.0", "5.00000", "-12.00", "123456789012345678901234.0"]
    )
    assert not any(matches(every, text) for text in ["5.01", "0.5", "5."])


def test_big_bounds_stay_small_expressions() -> None:
    assert size(integer_expression(-9007199254740991, 9007199254740991)) < 200
    assert size(integer_expression(0, 18446744073709551615)) < 200
    assert size(number_expression(-180, 180)) < 300
    assert size(number_expression(minimum=1.7976931348623157e308)) < 100_000
