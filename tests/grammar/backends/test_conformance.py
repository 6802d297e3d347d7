"""Every backend's matcher keeps the whole protocol, on a vocabulary with every oddity."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar import Vocabulary
from jfbatch.grammar.backends import BACKENDS, BackendName, CompiledGrammar
from tests.grammar.backends.engines import (
    ALL,
    CONTROL_IDS,
    END_IDS,
    FOREIGN,
    INSTALLED,
    TEXTS,
    VOCABULARY,
    compiled,
    content,
    feed,
    ids,
    random_tokens,
    takes,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["a", "ab", "b"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
PATTERNS: list[tuple[str, Any]] = [
    ("schema", PERSON),
    ("regex", "(ab|b)[a-z]{2,5}(12)*"),
    ("regex", r"[\s\S]*"),
    ("choice", ["red", "green", "blueish"]),
    ("grammar", 'root ::= "(" root ")" | [0-9]+ "é"?\n'),
]
CASES = [
    pytest.param(*name.values, kind, pattern, marks=name.marks, id=f"{name.values[0]}-{kind}-{number}")
    for name in ALL
    for number, (kind, pattern) in enumerate(PATTERNS)
    if kind in BACKENDS[name.values[0]].kinds
]
on_every_case = pytest.mark.parametrize(("name", "kind", "pattern"), CASES)


@cache
def grammar_of(name: BackendName, number: int) -> CompiledGrammar:
    return compiled(name, *PATTERNS[number])


def of(name: BackendName, kind: str, pattern: Any) -> CompiledGrammar:
    return grammar_of(name, PATTERNS.index((kind, pattern)))


@on_every_case
def test_masks_hold_neither_control_nor_padded_ids_and_end_tokens_where_the_text_is_complete(
    name: BackendName, kind: str, pattern: Any
) -> None:
    grammar = of(name, kind, pattern)
    for seed in range(5):
        matcher = grammar.matcher()
        for token_id in [*random_tokens(grammar, random.Random(seed)), None]:
            mask = matcher.token_mask()
            assert mask.dtype == np.uint32 and mask.shape == (VOCABULARY.words,)
            allowed = set(ids(mask))
            assert not allowed & set(CONTROL_IDS)
            assert not any(padded >= len(TEXTS) + 4 for padded in allowed)
            assert allowed & set(END_IDS) == (set(END_IDS) if matcher.is_accepting() else set())
            if token_id is not None:
                matcher.accept_token(token_id)
        assert matcher.is_accepting()


@on_every_case
def test_a_token_is_accepted_exactly_where_the_mask_has_it(
    name: BackendName, kind: str, pattern: Any
) -> None:
    grammar = of(name, kind, pattern)
    tokens = random_tokens(grammar, random.Random(7))
    matcher = grammar.matcher()
    for token_id in tokens[:4]:
        allowed = set(ids(matcher.token_mask()))
        for other in range(-1, VOCABULARY.size + 2):
            if other in allowed:
                matcher.accept_token(other)
                matcher.rollback(1)
            else:
                with pytest.raises(GrammarError):
                    matcher.accept_token(other)
        assert set(ids(matcher.token_mask())) == allowed
        matcher.accept_token(token_id)


@on_every_case
def test_ids_with_the_same_bytes_are_allowed_together(name: BackendName, kind: str, pattern: Any) -> None:
    first, second = (token_id for token_id, text in enumerate(TEXTS) if text == b"ab")
    grammar = of(name, kind, pattern)
    for seed in range(3):
        matcher = grammar.matcher()
        for token_id in random_tokens(grammar, random.Random(seed)):
            allowed = ids(matcher.token_mask())
            assert (first in allowed) == (second in allowed)
            matcher.accept_token(token_id)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_accepting_k_tokens_and_undoing_them_restores_the_position(
    name: BackendName, data: st.DataObject
) -> None:
    number = data.draw(
        st.sampled_from([n for n, (kind, _) in enumerate(PATTERNS) if kind in BACKENDS[name].kinds])
    )
    grammar = grammar_of(name, number)
    tokens = random_tokens(grammar, random.Random(data.draw(st.integers(0, 10_000))))
    before = data.draw(st.integers(0, len(tokens)))
    matcher = grammar.matcher()
    for token_id in tokens[:before]:
        matcher.accept_token(token_id)
    known = _facts(matcher)
    taken = 0
    for token_id in tokens[before:]:
        matcher.accept_token(token_id)
        taken += 1
        if data.draw(st.booleans()):  # asked or not, it must not matter
            _facts(matcher)
    if matcher.is_accepting() and data.draw(st.booleans()):
        matcher.accept_token(data.draw(st.sampled_from(END_IDS)))
        taken += 1
    matcher.rollback(taken)
    assert _facts(matcher) == known
    matcher.rollback(before)
    assert _facts(matcher) == _facts(grammar.matcher())


def _facts(matcher: Any) -> tuple[Any, ...]:
    return (
        matcher.token_mask().tobytes(),
        matcher.forced_bytes(),
        matcher.is_accepting(),
        matcher.is_finished(),
        takes_ending(matcher),
    )


def takes_ending(matcher: Any) -> bool:
    """Whether the ending completes the text. (Which of several short ones it is may depend on the way.)"""
    ending = matcher.shortest_ending()
    feed(matcher, ending)
    complete = matcher.is_accepting()
    matcher.rollback(len(ending))
    return bool(complete)


@on_every_case
def test_undoing_more_than_there_is_changes_nothing(name: BackendName, kind: str, pattern: Any) -> None:
    matcher = of(name, kind, pattern).matcher()
    start = matcher.token_mask()
    matcher.rollback(0)
    for count in (1, -1):
        with pytest.raises(GrammarError):
            matcher.rollback(count)
    token_id = content(start)[0]
    matcher.accept_token(token_id)
    with pytest.raises(GrammarError):
        matcher.rollback(2)
    matcher.rollback(1)
    assert np.array_equal(matcher.token_mask(), start)


@on_every_case
def test_every_continuation_starts_with_the_forced_bytes(name: BackendName, kind: str, pattern: Any) -> None:
    grammar = of(name, kind, pattern)
    for seed in range(4):
        tokens = random_tokens(grammar, random.Random(seed))
        matcher = grammar.matcher()
        for token_id in tokens:
            forced = matcher.forced_bytes()
            if matcher.is_accepting():
                assert forced == b""
            for allowed in content(matcher.token_mask()) if forced else []:
                shared = min(len(forced), len(TEXTS[allowed]))
                assert TEXTS[allowed][:shared] == forced[:shared]
            taken = 0
            for byte in forced:
                assert not matcher.is_accepting()
                matcher.accept_token(byte)
                taken += 1
            matcher.rollback(taken)
            matcher.accept_token(token_id)


@pytest.mark.parametrize("name", ALL)
def test_what_must_come_is_forced(name: BackendName) -> None:
    matcher = compiled(name, "regex", "same(1|2)").matcher()
    assert matcher.forced_bytes() == b"same"
    feed(matcher, b"sam")
    assert matcher.forced_bytes() == b"e"
    feed(matcher, b"e")
    assert matcher.forced_bytes() == b""
    feed(matcher, b"1")
    assert matcher.is_finished() and matcher.forced_bytes() == b""


@on_every_case
def test_an_ending_completes_the_text_wherever_it_is_asked_for(
    name: BackendName, kind: str, pattern: Any
) -> None:
    grammar = of(name, kind, pattern)
    for seed in range(6):
        matcher = grammar.matcher()
        for token_id in random_tokens(grammar, random.Random(seed), most=20):
            assert (matcher.shortest_ending() == b"") == matcher.is_accepting()
            assert takes_ending(matcher)
            matcher.accept_token(token_id)
        assert matcher.shortest_ending() == b""


@pytest.mark.parametrize("name", ALL)
def test_an_end_token_finishes_and_nothing_follows_it(name: BackendName) -> None:
    matcher = compiled(name, "regex", "a+").matcher()
    for end in END_IDS:
        with pytest.raises(GrammarError):
            matcher.accept_token(end)
        feed(matcher, b"a")
        assert matcher.is_accepting() and not matcher.is_finished()
        matcher.accept_token(end)
        assert matcher.is_finished()
        assert matcher.forced_bytes() == matcher.shortest_ending() == b""
        assert not matcher.token_mask().any()
        for token_id in (end, ord("a")):
            with pytest.raises(GrammarError):
                matcher.accept_token(token_id)
        matcher.rollback(1)
        assert not matcher.is_finished() and ord("a") in ids(matcher.token_mask())
        matcher.rollback(1)


@on_every_case
def test_rows_of_one_grammar_do_not_disturb_each_other(name: BackendName, kind: str, pattern: Any) -> None:
    grammar = of(name, kind, pattern)
    tokens = random_tokens(grammar, random.Random(3))
    other, matcher = grammar.matcher(), grammar.matcher()
    start = other.token_mask().copy()
    for token_id in tokens:
        matcher.accept_token(token_id)
        matcher.shortest_ending()
    assert np.array_equal(other.token_mask(), start)
    with pytest.raises(ValueError, match="read-only"):
        matcher.token_mask()[0] = 1


@on_every_case
def test_a_fork_goes_its_own_way(name: BackendName, kind: str, pattern: Any) -> None:
    grammar = of(name, kind, pattern)
    tokens = random_tokens(grammar, random.Random(4))
    half = len(tokens) // 2
    matcher: Any = grammar.matcher()
    for token_id in tokens[:half]:
        matcher.accept_token(token_id)
    fork = matcher.fork()
    mask = matcher.token_mask().copy()
    for token_id in tokens[half:]:
        fork.accept_token(token_id)
    assert fork.is_accepting() and takes_ending(fork)
    assert np.array_equal(matcher.token_mask(), mask) and takes_ending(matcher)
    fork.rollback(len(tokens))
    assert np.array_equal(fork.token_mask(), grammar.matcher().token_mask())


@pytest.mark.parametrize("name", ALL)
def test_a_vocabulary_without_end_tokens_will_do(name: BackendName) -> None:
    vocabulary = Vocabulary.from_tokens([*(bytes([byte]) for byte in range(256)), b"ab"])
    matcher = compiled(name, "regex", "abc?", vocabulary=vocabulary).matcher()
    assert ids(matcher.token_mask()) == [ord("a"), 256]
    matcher.accept_token(256)
    assert matcher.is_accepting() and ids(matcher.token_mask()) == [ord("c")]
    matcher.accept_token(ord("c"))
    assert matcher.is_finished() and ids(matcher.token_mask()) == []


@pytest.mark.parametrize("name", ALL)
def test_choices_hold_any_character(name: BackendName) -> None:
    texts = ["é", 'a"b', "x\ny", "tab\t/", "back\\slash", "[a]{2}(|)*+?.^$", "😀 #&~-"]
    grammar = compiled(name, "choice", texts)
    assert all(takes(grammar, text.encode()) for text in texts)
    assert not any(takes(grammar, text.encode()[:-1]) for text in texts)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("style", ["spaced", "compact", "pretty"])
def test_json_has_the_layout_that_was_asked_for_or_is_refused(name: BackendName, style: Any) -> None:
    if style not in BACKENDS[name].styles:
        with pytest.raises(InvalidGrammar, match=f"{name}.*{style}.*--json-style"):
            compiled(name, "schema", PERSON, style)
        return
    texts = {
        "spaced": '{"name": "", "kind": "a", "tags": [true, false]}',
        "compact": '{"name":"","kind":"a","tags":[true,false]}',
        "pretty": '{\n  "name": "",\n  "kind": "a",\n  "tags": [\n    true,\n    false\n  ]\n}',
    }
    grammar = compiled(name, "schema", PERSON, style)
    assert {other for other, text in texts.items() if takes(grammar, text.encode())} == {style}


@pytest.mark.parametrize("name", [name for name in ALL if name.values[0] != "fsm"])
@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("regex", "(unclosed"), ("schema", {"type": "strin"}), ("grammar", "root ::= nowhere")],
)
def test_a_refusal_names_the_backend_on_one_line(name: BackendName, kind: str, pattern: Any) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        compiled(name, kind, pattern)
    assert name in caught.value.reason
    assert "\n" not in caught.value.reason and len(caught.value.reason) < 400


@pytest.mark.parametrize("name", ALL)
def test_recursion_is_as_deep_as_is_said(name: BackendName) -> None:
    tree = {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
    }
    deep = b"[" * 9 + b"]" * 9
    if BACKENDS[name].recursion == "yes":
        assert takes(compiled(name, "schema", tree), deep)
    else:
        with pytest.raises(InvalidGrammar, match=r"Ref rec"):
            compiled(name, "schema", tree)


DATA = os.environ.get("JFBATCH_TEST_DATA")
TOKENIZERS = Path(DATA or "nowhere") / "tokenizers"


@cache
def real_vocabulary(tokenizer: str) -> Vocabulary:
    return Vocabulary.from_file(TOKENIZERS / tokenizer / "tokenizer.json.gz")


@pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="JFBATCH_TEST_DATA names no directory with tokenizers")
@pytest.mark.parametrize("tokenizer", ["llama3", "qwen3", "gemma3", "gptoss"])
@pytest.mark.parametrize("name", FOREIGN)
def test_masks_over_a_real_tokenizer_are_those_of_our_own(name: BackendName, tokenizer: str) -> None:
    vocabulary = real_vocabulary(tokenizer)
    pattern = "(the |[a-z]{1,3}=)[0-9]{2,4}(é|ü)?;"
    matchers = [
        compiled(backend, "regex", pattern, vocabulary=vocabulary).matcher() for backend in ("fsm", name)
    ]
    chance = random.Random(0)
    while not matchers[0].is_finished():
        ours, theirs = (matcher.token_mask() for matcher in matchers)
        assert np.array_equal(ours, theirs)
        token_id = chance.choice(ids(ours))
        for matcher in matchers:
            matcher.accept_token(token_id)
    assert matchers[1].is_finished()


def test_our_own_backend_is_always_there() -> None:
    assert "fsm" in INSTALLED


@on_every_case
def test_equal_keys_mean_the_same_mask_and_the_same_from_there_on(
    name: BackendName, kind: str, pattern: Any
) -> None:
    """Over all grammars: no other has such a key."""
    known: dict[Any, tuple[CompiledGrammar, bytes, bytes, bool]] = {}
    led: dict[tuple[Any, int], Any] = {}
    repeated = 0
    for grammar in (of(name, kind, pattern), compiled(name, kind, pattern)):
        for seed in range(8):
            matcher = grammar.matcher()
            before: Any = None
            for token_id in [*random_tokens(grammar, random.Random(seed)), None]:
                key = matcher.state_key()
                if key is None:
                    assert name in ("xgrammar", "llguidance")
                    continue
                state = grammar, matcher.token_mask().tobytes(), matcher.forced_bytes(), matcher.is_finished()
                repeated += key in known
                assert known.setdefault(key, state) == state
                if before is not None:
                    assert led.setdefault(before, key) == key
                if token_id is not None:
                    matcher.accept_token(token_id)
                    before = key, token_id
    assert repeated or name in ("xgrammar", "llguidance")


@pytest.mark.parametrize("name", ALL)
def test_a_finished_position_has_a_key_of_its_own(name: BackendName) -> None:
    matcher = compiled(name, "choice", ["red"]).matcher()
    for byte in b"red":
        matcher.accept_token(byte)
    before = matcher.state_key()
    matcher.accept_token(END_IDS[0])
    assert before is None or matcher.state_key() != before
    matcher.rollback(1)
    assert matcher.state_key() == before
