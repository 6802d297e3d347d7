"""JSON strings: lengths in characters, patterns, formats and names left out, alone and together."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.expression import NOTHING, Difference, Expression, Intersection, Repeat
from jfbatch.grammar.json_schema.strings import (
    JSON_CHARACTER,
    json_string_literal,
    keys_excluding,
    keys_matching,
    string_expression,
)
from tests.grammar.expression_oracle import matches, sample, size


def accepts(expression: Expression, text: str) -> bool:
    return matches(expression, json_string_literal(text))


def parts_of(expression: Expression) -> list[Expression]:
    """All expressions within one."""
    found = [expression]
    for item in found:
        if isinstance(item, Difference):
            found += [item.include, item.exclude]
        elif isinstance(item, Repeat):
            found.append(item.inner)
        else:
            found += getattr(item, "parts", ())
    return found


@given(st.text())
def test_any_string_has_the_spelling_of_json_dumps_and_only_that(text: str) -> None:
    spelled = json.dumps(text, ensure_ascii=False).encode()
    assert json_string_literal(text) == spelled
    assert matches(string_expression(), spelled)


@pytest.mark.parametrize(
    "spelled",
    [r'"\/"', r'"\u0041"', r'"\u000a"', r'"\u001F"', r'"\ud83d\ude00"', '"\n"', '"', '"a', 'a"', '"\\"'],
)
def test_other_spellings_are_not_strings(spelled: str) -> None:
    assert not matches(string_expression(), spelled)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="surrogate"):
        json_string_literal("a\ud83d")


@settings(deadline=None)
@given(low=st.integers(0, 4), high=st.none() | st.integers(0, 6), text=st.text(max_size=8))
def test_lengths_count_characters(low: int, high: int | None, text: str) -> None:
    expression = string_expression(low, high)
    assert accepts(expression, text) == (low <= len(text) and (high is None or len(text) <= high))


def test_a_long_maximum_stays_one_repeat() -> None:
    expression = string_expression(3, 5000)
    assert Repeat(JSON_CHARACTER, 3, 5000) in parts_of(expression)


PATTERNS = [
    "^a+$",
    "^[ab]*$",
    "b",
    "^a?b?c?$",
    r"^a(-[ab]+)*$",
    "^https?://",
    "[^a]$",
    "^(ab){2,}$",
    "^$|^aa",
    "a.*b",
]


@settings(max_examples=300, deadline=None)
@given(
    wanted=st.lists(st.sampled_from(PATTERNS), max_size=2),
    unwanted=st.lists(st.sampled_from(PATTERNS), max_size=2),
    low=st.integers(0, 4),
    high=st.none() | st.integers(0, 8),
    excluded=st.sets(st.sampled_from(["", "a", "ab", "aa", "abab", "b"])),
    texts=st.lists(st.text('aabc-"é\n', max_size=8) | st.sampled_from(["http://a", "https://"]), min_size=10),
)
def test_all_conditions_hold_together(
    wanted: list[str],
    unwanted: list[str],
    low: int,
    high: int | None,
    excluded: set[str],
    texts: list[str],
) -> None:
    expression = string_expression(low, high, wanted, unwanted, excluded=excluded)
    for text in ["", "a", "aa", "ab", "abab", *texts]:
        expected = (
            low <= len(text)
            and (high is None or len(text) <= high)
            and all(re.search(pattern.replace("$", r"\Z"), text) for pattern in wanted)
            and not any(re.search(pattern.replace("$", r"\Z"), text) for pattern in unwanted)
            and text not in excluded
        )
        assert accepts(expression, text) == expected, text


@pytest.mark.parametrize(
    ("pattern", "low", "high"),
    [
        ("^[a-z]+$", 0, 63),
        ("^[a-z][a-z0-9_]*$", 3, 255),
        ("^[A-Z]{2}$", 1, 10),
        (r"^\d{3}-\d{4}$", 8, 8),
        ("^https?://", 0, 2048),
        ("^x_", 4, 100),
        (r"^\S+$", 1, 5000),
        ("^(a|bc|def)$", 2, 3),
    ],
)
def test_lengths_are_pushed_into_simple_patterns(pattern: str, low: int, high: int) -> None:
    expression = string_expression(low, high, [pattern])
    assert not any(isinstance(part, Intersection | Difference) for part in parts_of(expression))
    source = random.Random(1)
    for _ in range(30):
        text = json.loads(sample(expression, source))
        assert low <= len(text) <= high
        assert re.search(pattern, text, re.ASCII)


def test_contradictions_match_nothing() -> None:
    assert string_expression(5, 3) == NOTHING
    assert string_expression(max_length=3, patterns=["^abcd"]) == NOTHING
    assert string_expression(min_length=3, patterns=["^[ab]{2}$"]) == NOTHING
    assert string_expression(not_patterns=[""]) == NOTHING


def test_unknown_formats_say_nothing() -> None:
    assert string_expression(formats=["no-such-format"]) == string_expression()
    assert string_expression(not_formats=["no-such-format"]) == NOTHING


def test_formats_combine_with_lengths_and_patterns() -> None:
    expression = string_expression(max_length=12, patterns=["^b"], formats=["email"])
    assert accepts(expression, "bob@ex.org")
    assert not accepts(expression, "alice@ex.org")
    assert not accepts(expression, "bob@example.org")


def test_inexact_strings_are_a_superset_without_set_operations() -> None:
    conditions = {"max_length": 6, "patterns": ["^(?!.*--)[a-z-]+(/[a-z]+)*$"], "not_patterns": ["^x"]}
    exact = string_expression(**conditions)  # type: ignore[arg-type]
    loose = string_expression(**conditions, exact=False)  # type: ignore[arg-type]
    assert not any(isinstance(part, Intersection | Difference) for part in parts_of(loose))
    for text in ["a", "a-b/c", "ab/cd/e", "xa", "a--b"]:
        assert accepts(loose, text) >= accepts(exact, text)
    assert accepts(loose, "a-b/c") and not accepts(loose, "A")


# Keys


NAMES = st.sets(st.text('ab"\\é\n😀', max_size=4), max_size=8)


@settings(max_examples=200, deadline=None)
@given(names=NAMES, others=NAMES)
def test_keys_excluding_are_all_strings_but_the_names(names: set[str], others: set[str]) -> None:
    expression = keys_excluding(names)
    assert not any(accepts(expression, name) for name in names)
    assert all(accepts(expression, other) for other in others - names)
    near = (
        {name[:-1] for name in names} | {name + "a" for name in names} | {name[:-1] + "b" for name in names}
    )
    assert all(accepts(expression, other) for other in near - names)


def test_keys_excluding_thousands_of_names_are_linear_in_size() -> None:
    thousand = size(keys_excluding([f"property_{number}_name" for number in range(1000)]))
    assert thousand < 60_000
    assert size(keys_excluding([f"property_{number}_name" for number in range(2000)])) < 2.2 * thousand


def test_long_names_do_not_nest_without_end() -> None:
    long = "x" * 5000
    expression = keys_excluding([long, "x" * 10])
    assert not accepts(expression, long)
    assert not accepts(expression, "x" * 10)
    assert accepts(expression, long + "x")
    assert accepts(expression, "x" * 4999)


def test_names_that_no_text_can_hold_need_no_excluding() -> None:
    assert keys_excluding(["\ud800"]) == string_expression()


def test_keys_matching_combines_patterns_and_names() -> None:
    expression = keys_matching(["^x-"], ["-$"], ["x-a"])
    assert accepts(expression, "x-b")
    assert accepts(expression, "x-ab")
    assert not accepts(expression, "x-a")
    assert not accepts(expression, "x-")
    assert not accepts(expression, "y-b")
