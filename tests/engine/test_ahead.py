"""Passes that begin before their choices are read: outputs are as without, whatever happens on the way."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.sequence import Completion, Request
from jfbatch.grammar import Grammar, Vocabulary
from jfbatch.grammar.backends import open_backend
from jfbatch.grammar.reasoning import Reasoning
from tests.engine.matchers import FreeMatcher, tiny_tokenization
from tests.engine.sources import ListSource
from tests.engine.test_engine import runner

PATTERNS: list[tuple[str, str]] = [
    ("schema", '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, '
     '"count": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["name", "count", "ok"]}'),
    ("schema", '{"type": "array", "items": {"enum": ["anna", "annabel", "graz"]}, "maxItems": 4}'),
    ("schema", '{"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]*$"}, '
     '"email": {"type": "string", "maxLength": 30}}, "required": ["city"]}'),
    ("regex", "[a-c]{1,20}"),
    ("regex", "(anna|brian) (carla|carlos)? [0-9]{2,5}\\."),
    ("regex", "([a-z]+ ){0,8}end"),
    ("choice", '["yes", "no", "maybe", "yesterday"]'),
    ("grammar", 'root ::= "(" root ")" root | [a-z]{0,3}'),
]  # fmt: skip


@cache
def vocabulary() -> Vocabulary:
    tokens = tiny_tokenization()
    texts = [tokens.token_bytes(token) or None for token in range(tokens.size)]
    return Vocabulary.from_tokens(texts, tokens.end_ids, size=runner().vocabulary_size)


@cache
def grammar(index: int, backend: str = "fsm") -> Any:
    kind, text = PATTERNS[index]
    if backend == "fsm":
        return Grammar.from_pattern(kind, text, vocabulary())
    return open_backend(backend, vocabulary()).compile(kind, text, "compact", "closed")  # type: ignore[arg-type]


@cache
def thinking() -> Reasoning:
    return Reasoning(
        Grammar.from_pattern("reasoning", json.dumps({"end": "</t>", "after": "\n"}), vocabulary()), 8
    )


def matcher(pattern: int | None, backend: str = "fsm", reasons: bool = False) -> Any:
    if pattern is None:
        return FreeMatcher(tiny_tokenization().size, tiny_tokenization().end_ids)
    made = grammar(pattern, backend).matcher()
    return thinking().matcher(made) if reasons else made


def engine(ahead: bool, used: Any = None, **options: Any) -> Engine:
    return Engine(
        used or runner(), tiny_tokenization(), EngineConfig(context_length=256, ahead=ahead, **options)
    )


def run(used: Engine, requests: list[Request], at_once: int | None = None) -> dict[str, Completion]:
    done = list(used.run(ListSource(requests, at_once)))
    assert sorted(each.key for each in done) == sorted(request.key for request in requests)
    return {each.key: each for each in done}


def same(one: dict[str, Completion], other: dict[str, Completion]) -> None:
    for key, ours in one.items():
        theirs = other[key]
        assert (ours.text, ours.token_ids, ours.reason, ours.error) == (
            theirs.text,
            theirs.token_ids,
            theirs.reason,
            theirs.error,
        )
        assert (ours.sampled_tokens, ours.jumped_tokens) == (theirs.sampled_tokens, theirs.jumped_tokens)
        if ours.log_probability is None:
            assert theirs.log_probability is None
        else:
            assert theirs.log_probability == pytest.approx(ours.log_probability, abs=1e-3)


PROMPTS = st.sampled_from(
    ["Anna of Graz: ", "Give the record of annabel@example.org as JSON: ", "count 12 ", "carla carlos anna "]
)
ROW = st.tuples(
    st.one_of(st.none(), st.integers(0, len(PATTERNS) - 1)),
    PROMPTS,
    st.integers(1, 50),
    st.sampled_from([0.0, 0.0, 0.7, 2.0]),
    st.booleans(),
)


def requests(rows: list[tuple[Any, ...]], backends: tuple[str, ...] = ("fsm",)) -> list[Request]:
    made = []
    for number, (pattern, prompt, most, temperature, reasons) in enumerate(rows):
        ids = tiny_tokenization().encode(f"{prompt}{number % 3}: ")
        backend = backends[number % len(backends)]
        group = None if pattern is None else str(pattern)
        made.append(
            Request(
                str(number),
                ids,
                matcher(pattern, backend, reasons and most > 30),
                most,
                temperature,
                3,
                group,
            )
        )
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.integers(2, 12),
)
def test_whole_runs_are_the_same_with_and_without(
    rows: list[tuple[Any, ...]], jump: bool, drafts: bool, likely: bool, at_once: int | None, batch: int
) -> None:
    options = {
        "jump": jump,
        "drafts": drafts,
        "log_probabilities": likely,
        "batch_size": batch,
        "prefill_chunk": 16,
    }
    plain, ahead = engine(False, **options), engine(True, **options)
    same(run(plain, requests(rows)), run(ahead, requests(rows), at_once))
    assert plain.statistics.rows_ahead == 0
    assert ahead.statistics.rows_in_vain <= ahead.statistics.rows_ahead
    assert ahead.statistics.sampled_tokens == plain.statistics.sampled_tokens


def test_a_row_of_free_text_is_always_a_step_ahead() -> None:
    used = engine(True)
    done = run(used, [Request("a", [5, 6, 7], FreeMatcher(tiny_tokenization().size), 20)])["a"]
    assert (done.completion_tokens, done.forward_passes) == (20, 20)
    assert used.statistics.rows_ahead == 19
    assert used.statistics.rows_in_vain == 0
