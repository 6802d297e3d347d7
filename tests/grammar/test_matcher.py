"""The automaton's matcher keeps the protocol that every backend keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar import Grammar, Matcher, Vocabulary

TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b'{"', b'": ', b"true", b'"}', None]
ENDS = [len(TOKENS), len(TOKENS) + 1]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [True, 12, None, "x"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def make_vocabulary() -> Vocabulary:
    return Vocabulary.from_tokens(TOKENS, end_ids=ENDS, size=len(TOKENS) + 40)


VOCABULARY = make_vocabulary()


def allowed(matcher: Matcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(matcher.token_mask().view(np.uint8), bitorder="little")).tolist()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_rolling_back_gives_the_same_masks_again(chance: object, count: int) -> None:
    matcher = Grammar.from_json_schema(SCHEMA, VOCABULARY).matcher()
    masks = []
    for _ in range(count):
        masks.append(matcher.token_mask())
        if not allowed(matcher):
            masks.pop()
            break
        matcher.accept_token(chance.choice(allowed(matcher)))  # type: ignore[attr-defined]
    while masks:
        matcher.rollback(1)
        assert np.array_equal(matcher.token_mask(), masks.pop())
    with pytest.raises(GrammarError):
        matcher.rollback(1)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_walk_can_finish_by_its_shortest_ending(chance: object) -> None:
    matcher = Grammar.from_json_schema(SCHEMA, VOCABULARY).matcher()
    for _ in range(8):
        tokens = [token for token in allowed(matcher) if token not in ENDS]
        if not tokens:
            break
        matcher.accept_token(chance.choice(tokens))  # type: ignore[attr-defined]
    for byte in matcher.shortest_ending():
        matcher.accept_token(byte)
    assert matcher.is_accepting()
    assert matcher.shortest_ending() == b""


def test_end_tokens_are_allowed_exactly_where_the_output_is_complete() -> None:
    matcher = Grammar.from_regex("ab*", VOCABULARY).matcher()
    assert not set(ENDS) & set(allowed(matcher))
    with pytest.raises(GrammarError, match="not complete"):
        matcher.accept_token(ENDS[0])
    matcher.accept_token(ord("a"))
    assert matcher.is_accepting()
    assert not matcher.is_finished()
    assert set(ENDS) <= set(allowed(matcher))
    matcher.accept_token(ENDS[1])
    assert matcher.is_finished()
    assert allowed(matcher) == []
    with pytest.raises(GrammarError):
        matcher.accept_token(ord("b"))
    matcher.rollback(1)
    assert not matcher.is_finished()


def test_it_is_finished_without_an_end_token_where_nothing_may_follow() -> None:
    matcher = Grammar.from_choice(["yes", "no"], VOCABULARY).matcher()
    for byte in b"no":
        assert not matcher.is_finished()
        matcher.accept_token(byte)
    assert matcher.is_finished()


def test_a_token_outside_the_mask_is_refused_and_changes_nothing() -> None:
    matcher = Grammar.from_choice(["yes", "no"], VOCABULARY).matcher()
    for token in (ord("x"), len(TOKENS) - 1, len(TOKENS) + 20, 10**6, -1):
        with pytest.raises(GrammarError):
            matcher.accept_token(token)
    matcher.accept_token(ord("y"))
    assert matcher.forced_bytes() == b"es"


def test_forced_bytes_stop_before_a_choice_and_before_a_possible_end() -> None:
    matcher = Grammar.from_json_schema(SCHEMA, VOCABULARY).matcher()
    assert matcher.forced_bytes() == b'{"a": "'
    assert Grammar.from_regex("ab(cd)?", VOCABULARY).matcher().forced_bytes() == b"ab"


def test_equal_tokens_have_equal_bits_and_padding_is_never_allowed() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"a", b"b", None], end_ids=[3], size=64)
    mask = Grammar.from_regex("[ab]+", vocabulary).matcher().token_mask()
    assert mask.tolist() == [0b0111, 0]
    assert mask.dtype == np.uint32


def test_a_choice_without_texts_is_refused() -> None:
    with pytest.raises(InvalidGrammar):
        Grammar.from_choice([], VOCABULARY)


def test_what_no_token_can_write_is_never_asked_for() -> None:
    vocabulary = Vocabulary.from_tokens([b"a", b"c", b"x"], end_ids=[3], size=4)
    matcher = Grammar.from_regex("a(b|c)|bx", vocabulary).matcher()
    assert matcher.forced_bytes() == b"ac"
    with pytest.raises(InvalidGrammar):
        Grammar.from_choice(["b", "bx"], vocabulary)
