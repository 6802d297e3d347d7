"""Strict JSON: the same values as Python's parser where that is right, a column where it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfbatch.rows.json_text import (
    MAXIMUM_NESTING,
    check_nesting,
    column_of_lone_surrogate,
    dump,
    is_utf8,
    parse,
    printable,
)
from jfbatch.rows.row import RowProblem

SURROGATES = st.characters(min_codepoint=0xD7FF, max_codepoint=0xE000)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.booleans())
def test_parse_gives_back_what_json_wrote(value: Any, ascii_only: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only)) == value


@given(st.text(SURROGATES | st.characters(max_codepoint=0x7F), max_size=12))
def test_lone_surrogates_are_found_where_they_are(text: str) -> None:
    column = column_of_lone_surrogate(json.dumps(text))
    # json joins a high and a low half when it reads them, so the oracle is the text read back.
    assert (column is None) == is_utf8(json.loads(json.dumps(text)))
    if column is not None:
        assert json.dumps(text)[column - 1 :].lower().startswith("\\ud")


@given(VALUES | st.text(SURROGATES))
def test_dump_is_utf8_and_reads_back(value: Any) -> None:
    text = dump(value)
    assert is_utf8(text) and "\n" not in text
    assert json.dumps(json.loads(text)) == json.dumps(value)


@pytest.mark.parametrize("depth", [1, MAXIMUM_NESTING, MAXIMUM_NESTING + 1, 5000])
def test_nesting_is_limited_exactly(depth: int) -> None:
    text = '["[[[[", ' * depth + "1" + "]" * depth
    if depth <= MAXIMUM_NESTING:
        parse(text)
        return
    with pytest.raises(RowProblem, match="nested deeper") as caught:
        parse(text)
    assert caught.value.column == MAXIMUM_NESTING * len('["[[[[", ') + 1


def test_brackets_side_by_side_are_not_nested() -> None:
    check_nesting("[" + "[]," * 5000 + "[]]")


def test_printable_spells_surrogates_out() -> None:
    assert printable("a\ud800ü") == "a\\ud800ü"
    assert printable("ü") == "ü"
