"""Passes that begin before their choices are read: outputs are as without, whatever happens on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jfbatch.engine.ahead import Clock, Habits
from jfbatch.engine.device_choice import DeviceChooser
from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.runner import LateTokens, Segment
from jfbatch.engine.sequence import Completion, Request
from jfbatch.grammar import Grammar, Vocabulary
from jfbatch.grammar.backends import is_installed, open_backend
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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("drafts", [False, True])
def test_choices_are_made_early_where_rows_have_gone_before(drafts: bool) -> None:
    rows = [(index % 3, "Anna of Graz: ", 45, 0.0, False) for index in range(24)]
    plain, ahead = engine(False, drafts=drafts), engine(True, drafts=drafts, batch_size=6)
    same(run(plain, requests(rows)), run(ahead, requests(rows)))
    assert ahead.statistics.chosen_early > ahead.statistics.rows_ahead // 6


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_backends_may_be_mixed(temperature: float) -> None:
    names = [name for name in ("fsm", "xgrammar", "llguidance", "outlines") if is_installed(name)]  # type: ignore[arg-type]
    rows = [(index % 2 * 4, "Anna of Graz: ", 40, temperature, False) for index in range(16)]
    same(run(engine(False), requests(rows, tuple(names))), run(engine(True), requests(rows, tuple(names))))


class Faulty:
    """The tiny model's runner, with a fault now and then that depends on the rows alone, not on the steps."""

    def __init__(self, fault: Callable[[Faulty, Tensor], None]) -> None:
        self.calls = 0
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(runner(), name)

    def forward(self, segments: list[Segment], late: LateTokens | None = None) -> Tensor:
        self.calls += 1
        logits = runner().forward(segments, late)
        self.fault(self, logits)
        return logits


@settings(max_examples=15, deadline=None)
@given(st.lists(ROW, min_size=3, max_size=9), st.floats(4.5, 7.0), st.booleans())
def test_rows_with_logits_that_are_no_numbers_fail_alike(
    rows: list[tuple[Any, ...]], bound: float, jump: bool
) -> None:
    def fault(faulty: Faulty, logits: Tensor) -> None:
        logits[logits > bound] = torch.nan  # in some rows, at some of their tokens

    plain, ahead = (
        run(engine(ahead, Faulty(fault), drafts=False, jump=jump, batch_size=4), requests(rows))
        for ahead in (False, True)
    )
    same(plain, ahead)


def test_some_rows_fail_by_what_is_no_number_and_others_do_not() -> None:
    def fault(faulty: Faulty, logits: Tensor) -> None:
        logits[logits > 6.5] = torch.nan

    rows = [(index % 6, f"Anna of Graz {index}: ", 40, 0.0, False) for index in range(12)]
    plain, ahead = (
        run(engine(ahead, Faulty(fault), drafts=False, batch_size=4), requests(rows))
        for ahead in (False, True)
    )
    same(plain, ahead)
    assert 0 < sum("not numbers" in (each.error or "") for each in ahead.values()) < 12


def test_memory_running_out_anywhere_starts_the_rows_again() -> None:
    rows = [(index % 6, "Anna of Graz: ", 40, 0.5 * (index % 2), False) for index in range(14)]
    expected = run(engine(False), requests(rows))
    restarts = 0
    for call in range(2, 30, 3):

        def fault(faulty: Faulty, logits: Tensor, call: int = call) -> None:
            if faulty.calls in (call, call + 2):
                raise torch.OutOfMemoryError("CUDA out of memory")

        used = engine(True, Faulty(fault), batch_size=8)
        same(expected, run(used, requests(rows)))
        restarts += used.statistics.out_of_memory
        assert used.statistics.rows_ahead
    assert restarts >= 10


def test_memory_running_out_while_a_token_is_chosen_starts_the_rows_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [(index % 6, "Anna of Graz: ", 40, 0.0, False) for index in range(8)]
    expected = run(engine(False), requests(rows))
    used = engine(True)
    original, calls = DeviceChooser.choose_at, []

    def narrow(chooser: DeviceChooser, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 8):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(chooser, *arguments)

    monkeypatch.setattr(DeviceChooser, "choose_at", narrow)
    same(expected, run(used, requests(rows)))
    assert used.statistics.out_of_memory == 2


def test_what_is_under_way_when_a_run_stops_is_dropped_and_the_next_run_is_right() -> None:
    used = engine(True, batch_size=3)
    done = []
    rows = [(index % 6, "Anna of Graz: ", 40, 0.0, False) for index in range(9)]
    for completion in used.run(ListSource(requests(rows))):
        done.append(completion)
        used.stop()
    expected = run(engine(False), requests(rows))
    same({each.key: each for each in done}, expected)
    again = engine(True, batch_size=3)
    for _ in range(2):  # one engine, several runs
        same(run(again, requests(rows)), expected)


def test_rows_share_prefixes_and_leave_no_gaps_behind() -> None:
    shared = "You read short notes and give one JSON record per note. " * 2
    rows = [(index % 3, f"{shared}{index % 2}", 20 + 3 * index, 0.0, False) for index in range(10)]
    used = engine(True, batch_size=10)
    same(run(engine(False), requests(rows)), run(used, requests(rows)))
    assert used.statistics.shared_tokens > 100
    assert used.statistics.rows_ahead > 30


def test_nothing_goes_ahead_on_a_cpu_unless_it_is_asked_for() -> None:
    used = Engine(runner(), tiny_tokenization(), EngineConfig(context_length=256))
    run(used, [Request("a", [5, 6, 7], FreeMatcher(tiny_tokenization().size), 20)])
    assert used.statistics.rows_ahead == 0


def test_a_pass_ahead_pays_where_the_host_has_as_much_to_do_as_the_device() -> None:
    clock = Clock()
    clock.alone(seconds=1.0, device=0.9, saved=0.0)  # the first one loads things
    assert not clock.pays(1.0)
    for _ in range(9):
        clock.alone(seconds=2e-3, device=1e-3, saved=0.0)
    assert clock.pays(0.9)
    assert not clock.pays(0.4)
    for _ in range(9):  # drafts that save every other step of a row would be missed
        clock.alone(seconds=2e-3, device=1e-3, saved=1.0)
    assert not clock.pays(0.9)


def test_a_pass_ahead_does_not_pay_where_launching_it_is_the_hosts_work() -> None:
    clock = Clock()
    for _ in range(9):
        clock.alone(seconds=2e-3, device=1.5e-3, saved=0.0)
    assert clock.pays(0.95)
    for _ in range(9):
        clock.ahead(2e-3)  # the host was busy all the time: launches take it long
    assert not clock.pays(0.95)


def test_habits_are_kept_by_state() -> None:
    habits = Habits()
    for _ in range(30):
        habits.learn("in a word", True)
        habits.learn("at an end", False)
    assert habits.likelihood("in a word") > 0.9
    assert habits.likelihood("at an end") < 0.1
    assert 0.4 < habits.likelihood(None) < 0.8


@torch.inference_mode()
def test_tokens_that_only_the_device_knows_are_computed_like_others() -> None:
    used = runner()
    used.pool.resize(2, 32)
    told = used.forward([Segment(0, 0, [5, 6, 7], [1, 2]), Segment(1, 0, [9, 8], [1])])
    late = LateTokens([1, 4], torch.tensor([6, 8]))
    not_told = used.forward([Segment(0, 0, [5, 0, 7], [1, 2]), Segment(1, 0, [9, 0], [1])], late)
    assert torch.equal(told, not_told)
    used.pool.resize(0, 1)


def test_what_a_row_computes_beyond_its_end_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the logits that would say whether it holds numbers, and the slot is used again."""
    used = engine(True, batch_size=2)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(used.runner.pool, "drop", lambda slot, place: dropped.append((slot, place)))
    done = run(used, requests([(3, "Anna of Graz: ", 40, 0.0, False)] * 6))
    ends = {each.prompt_tokens + each.completion_tokens for each in done.values()}
    assert dropped
    for _, place in dropped:  # the last token, or the end token behind it
        assert place in ends or place + 1 in ends
