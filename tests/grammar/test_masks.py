"""Trie masks against brute force, and what is shared between states."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.expression import Expression, Repeat, RuleSet, literal, sequence
from jfbatch.grammar.language import dfa_of
from jfbatch.grammar.masks import MaskTable, PlainText
from jfbatch.grammar.program import compile_program
from jfbatch.grammar.regex import JSON_CHARACTER
from jfbatch.grammar.vocabulary import Vocabulary
from tests.grammar.random_expressions import ALL_TEXTS, expressions

ALPHABET_TOKENS = [b"a", b"b", b"ab", b"abab", b"ba", b"aaaa", b"a", None, b"bb", b"c", b"bc"]
END = len(ALPHABET_TOKENS)

PIECES = [
    b"x",
    b'"',
    b"\\",
    b"n",
    b"\xc3",
    b"\xa9",
    "é".encode(),
    "日".encode(),
    b"\n",
    b"xy",
    b'x"',
    b"1",
    b" ",
    b"\\n",
]
JSON_TOKENS = [
    *PIECES,
    *(one + other for one in PIECES for other in PIECES),
    b"x" * 12,
    b"x" * 5 + b'"',
    b'", "b": "',
]
JSON_END = len(JSON_TOKENS)


def table_of(expression: Expression, vocabulary: Vocabulary, sliced: bool = True) -> MaskTable:
    free = JSON_CHARACTER if sliced else None
    return MaskTable(Automaton(compile_program(RuleSet(expression), dfa_of, free)), vocabulary)


def brute_force(table: MaskTable, state: int) -> set[int]:
    vocabulary, automaton = table.vocabulary, table.automaton
    allowed = {
        token
        for token, data in enumerate(vocabulary.token_bytes)
        if data and automaton.advance(state, data) >= 0
    }
    return allowed | (set(vocabulary.end_ids) if automaton.is_accepting(state) else set())


def members(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_masks_equal_brute_force(expression: Expression) -> None:
    vocabulary = Vocabulary.from_tokens(ALPHABET_TOKENS, end_ids=[END], size=END + 30)
    try:
        table = table_of(expression, vocabulary)
    except InvalidGrammar:
        assume(False)
    for text in ALL_TEXTS:
        state = table.automaton.advance(table.automaton.start, text)
        if state >= 0:
            assert members(table.mask(state)) == brute_force(table, state)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(3, 20)),
    st.text(alphabet='xé日n1 "\\', max_size=8),
)
def test_masks_inside_strings_equal_brute_force(low: int, high: int | None, text: str) -> None:
    vocabulary = Vocabulary.from_tokens(JSON_TOKENS, end_ids=[JSON_END], size=JSON_END + 1)
    body = Repeat(JSON_CHARACTER, low, high)
    table = table_of(
        sequence(literal('{"a": "'), body, literal('", "b": "'), body, literal('"}')), vocabulary
    )
    state = table.automaton.start
    for byte in ('{"a": "' + text).encode():
        assert members(table.mask(state)) == brute_force(table, state)
        state = table.automaton.advance(state, bytes([byte]))
        if state < 0:
            return
    assert members(table.mask(state)) == brute_force(table, state)


def test_plain_tokens_are_those_that_json_strings_hold_as_they_are() -> None:
    vocabulary = Vocabulary.from_tokens([b"abc", b'a"', b"\n", "日本".encode(), b"\xe6", b"\\", None, b"d"])
    plain = PlainText.of(vocabulary)
    assert members(plain.up_to[1]) == {7}
    assert members(plain.up_to[2]) == {7, 3}
    assert members(plain.up_to[3]) == {7, 3, 0}
    assert set(plain.others.token_ids.tolist()) == {1, 2, 4, 5}


def test_mask_of_a_long_string_is_shared_across_counts() -> None:
    vocabulary = Vocabulary.from_tokens(JSON_TOKENS, end_ids=[JSON_END], size=JSON_END + 1)
    table = table_of(sequence(literal('"'), Repeat(JSON_CHARACTER, 0, 5000), literal('"')), vocabulary)
    state = table.automaton.advance(table.automaton.start, b'"')
    for _ in range(4900):
        table.mask(state)
        state = table.automaton.advance(state, b"x")
    assert table.walks == 1
    for _ in range(100):
        assert members(table.mask(state)) == brute_force(table, state)
        state = table.automaton.advance(state, b"x")


def test_masks_are_read_only_and_memory_for_them_is_bounded() -> None:
    vocabulary = Vocabulary.from_tokens(ALPHABET_TOKENS, end_ids=[END], size=END + 1)
    table = table_of(Repeat(literal("ab"), 0, 200), vocabulary)
    table.most = 20
    state = table.automaton.start
    for _ in range(100):
        assert not table.mask(state).flags.writeable
        state = table.automaton.advance(state, b"ab")
    assert len(table.masks) <= 20
