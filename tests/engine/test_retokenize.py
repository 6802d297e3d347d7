"""Retokenising the tail equals retokenising the whole text, for real tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jfbatch.engine.retokenize import Retokenizer, crossed_pairs
from tests.engine.matchers import HubTokenization, real_tokenization, tiny_tokenization

NAMES = ["llama3", "qwen3", "gemma3", "gptoss", "tiny"]
_RETOKENIZERS: dict[str, Retokenizer] = {}

PIECES = st.sampled_from(
    [
        *[
            '{"',
            '": "',
            '", "',
            '": ',
            '"}',
            "{",
            "}",
            "[",
            "]",
            '"',
            ", ",
            ",",
            ":",
            " ",
            "  ",
            "\n",
            "\n  ",
        ],
        *[
            "name",
            "Name",
            "first_name",
            "id",
            "John",
            "McDonald's",
            "don't",
            "I'LL",
            "123",
            "4567890",
            "3.14",
        ],
        *["true", "null", "-", "_", "a", "é", "日本", "ß", "Ω ", "🙂", "\\n", "\\u00e9", "\t", "://", "www."],
        *["#!", "<|", "|>", "($)", "°C", "\u00a0", "\u3000", "e\u0301", "ที่", "हिन्दी", "…", "''s", "/*"],
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=4)), min_size=1, max_size=14).map("".join)


def tokenization_of(name: str) -> HubTokenization:
    return tiny_tokenization() if name == "tiny" else real_tokenization(name)


def retokenizer_of(name: str) -> Retokenizer:
    if name not in _RETOKENIZERS:
        tokenization = tokenization_of(name)
        _RETOKENIZERS[name] = Retokenizer(tokenization, tokenization.size)
    return _RETOKENIZERS[name]


def ends_of(tokenization: HubTokenization, ids: list[int]) -> list[int]:
    ends, total = [], 0
    for token in ids:
        total += len(tokenization.token_bytes(token))
        ends.append(total)
    return ends


def round_trips(tokenization: HubTokenization, text: str) -> bool:
    ids = tokenization.encode(text)
    return b"".join(map(tokenization.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=TEXTS, forced=TEXTS, after=TEXTS)
def test_tail_and_held_tokens_are_those_of_the_whole_text(
    name: str, before: str, forced: str, after: str
) -> None:
    tokenization = tokenization_of(name)
    if not round_trips(tokenization, before + forced + after):
        return
    output = tokenization.encode(before)
    ends = ends_of(tokenization, output)
    result = retokenizer_of(name).jump(before.encode(), ends, forced.encode())
    if result is None:
        return
    assert output[: result.keep] + result.certain + result.held == tokenization.encode(before + forced)
    if result.certain:
        certain = output[: result.keep] + result.certain
        assert len(b"".join(map(tokenization.token_bytes, certain))) > len(before.encode())
        assert tokenization.encode(before + forced + after)[: len(certain)] == certain


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=TEXTS, ending=TEXTS)
def test_an_ending_gives_the_tokens_of_the_whole_text(name: str, before: str, ending: str) -> None:
    tokenization = tokenization_of(name)
    if not round_trips(tokenization, before + ending):
        return
    output = tokenization.encode(before)
    result = retokenizer_of(name).ending(before.encode(), ends_of(tokenization, output), ending.encode())
    assert result is not None
    assert output[: result.keep] + result.certain == tokenization.encode(before + ending)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_the_pieces_between_boundaries_tokenize_like_the_whole(name: str, text: str) -> None:
    tokenization = tokenization_of(name)
    if round_trips(tokenization, text):
        assert retokenizer_of(name).encode(text.encode()) == tokenization.encode(text)


@pytest.mark.parametrize("name", NAMES)
def test_json_keys_are_certain_and_only_the_opening_of_the_value_is_held(name: str) -> None:
    tokenization = tokenization_of(name)
    before = '{"name": "anna'
    ids = tokenization.encode(before)
    result = retokenizer_of(name).jump(before.encode(), ends_of(tokenization, ids), b'", "email": "')
    assert result is not None
    assert b"".join(map(tokenization.token_bytes, result.certain)).endswith(b'"email":')
    assert b"".join(map(tokenization.token_bytes, result.held)) == b' "'


def test_tokens_before_the_last_boundary_stay_as_the_model_chose_them() -> None:
    tokenization = tiny_tokenization()
    letters = [tokenization.encode(character)[0] for character in '{"name": "anna']  # one token per byte
    result = retokenizer_of("tiny").jump(b'{"name": "anna', ends_of(tokenization, letters), b'", "email": "')
    assert result is not None
    assert result.keep == len(letters)


def test_an_unfinished_character_prevents_a_jump_but_not_an_ending() -> None:
    tokenization = tiny_tokenization()
    half = "é".encode()[:1]
    ids = [token for token, data in tokenization.by_first_byte[half[0]] if data == half]
    retokenizer = retokenizer_of("tiny")
    assert retokenizer.jump(half, ends_of(tokenization, ids), b'\xa9", "b": ') is None
    ending = retokenizer.ending(half, ends_of(tokenization, ids), b'\xa9"')
    assert ending is not None
    tokens = ids[: ending.keep] + ending.certain
    assert b"".join(map(tokenization.token_bytes, tokens)) == 'é"'.encode()


def test_bytes_that_are_no_text_are_appended_in_the_longest_tokens() -> None:
    tokenization = tiny_tokenization()
    ending = retokenizer_of("tiny").ending(b"\xff", [1], b"\xfe name")
    assert ending is not None
    assert b"".join(map(tokenization.token_bytes, ending.certain)) == b"\xfe name"
    assert len(ending.certain) < len(b"\xfe name")


def test_a_pair_that_some_token_contains_is_no_boundary() -> None:
    assert crossed_pairs([b"a", b" b", b"c d", b'e",']) == {(ord("c"), 0x20), (ord("e"), 0x22)}
