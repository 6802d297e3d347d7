"""The step loop on a tiny random model: jumps, drafts, endings, failures, sharing."""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.runner import Runner
from jfbatch.engine.sequence import Completion, Request
from jfbatch.errors import GrammarError
from tests.engine.matchers import (
    DIGITS,
    LETTERS,
    TEXT,
    Field,
    FreeMatcher,
    TemplateMatcher,
    tiny_tokenization,
)
from tests.engine.sources import ListSource

RECORD: list[bytes | Field] = [
    b'{"name": "',
    Field(LETTERS, 1, 12),
    b'", "email": "',
    Field(TEXT, 0, 20),
    b'", "count": ',
    Field(DIGITS, 1, 4),
    b', "ok": true}',
]


def random_llama() -> LlamaForCausalLM:
    configuration = LlamaConfig(
        vocab_size=tiny_tokenization().size + 5,  # logits wider than the vocabulary
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(configuration)


@cache
def runner() -> Runner:
    return Runner(random_llama(), kv_dtype=torch.float32)


def engine(**settings: Any) -> Engine:
    return Engine(runner(), tiny_tokenization(), EngineConfig(**{"context_length": 256, **settings}))


def prompt(index: int) -> list[int]:
    return tiny_tokenization().encode(f"Give the record number {index * 37} of Graz as JSON: ")


def record(key: str, index: int, max_tokens: int = 60, **settings: Any) -> Request:
    matcher = TemplateMatcher(RECORD, tiny_tokenization())
    return Request(key, prompt(index), matcher, max_tokens, **settings)


def completions(used: Engine, requests: list[Request]) -> dict[str, Completion]:
    done = list(used.run(ListSource(requests)))
    assert len(done) == len(requests)
    return {completion.key: completion for completion in done}


def check_record(text: bytes) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "email", "count", "ok"]
    assert re.fullmatch("[A-Za-z]{1,12}", value["name"])


def test_outputs_obey_the_grammar_and_say_what_they_cost() -> None:
    done = completions(engine(), [record(str(i), i) for i in range(9)])
    for completion in done.values():
        assert completion.reason in ("finished", "shortened")
        assert completion.error is None
        check_record(completion.text)
        joined = b"".join(map(tiny_tokenization().token_bytes, completion.token_ids))
        assert joined == completion.text
        assert completion.completion_tokens == len(completion.token_ids) <= 60
        assert completion.jumped_tokens > 0
        assert completion.forward_passes <= completion.sampled_tokens


def test_jumps_save_forward_passes() -> None:
    requests = [record(str(i), i) for i in range(6)]
    with_jumps = completions(engine(), requests)
    without = completions(engine(jump=False, drafts=False), [record(str(i), i) for i in range(6)])
    for completion in without.values():
        check_record(completion.text)
        assert completion.jumped_tokens == 0
        assert completion.forward_passes == completion.sampled_tokens
    passes = sum(completion.forward_passes for completion in with_jumps.values())
    tokens = sum(completion.completion_tokens for completion in with_jumps.values())
    assert passes < 0.7 * tokens


class CanonicalMatcher(TemplateMatcher):
    """Allows a token only where it is the canonical next one for the letters taken so far plus itself.

    So every output is the canonical tokenization of its text, with and without jumps.
    """

    def __init__(self, choices: list[str]) -> None:
        self.choices = choices
        self.tokenization = tiny_tokenization()
        self.accepted: list[int] = []

    def _paths(self) -> list[list[int]]:
        paths = [self.tokenization.encode(choice) for choice in self.choices]
        return [path[len(self.accepted) :] for path in paths if path[: len(self.accepted)] == self.accepted]

    def token_mask(self) -> np.ndarray:
        bits = np.zeros(-(-self.tokenization.size // 32) * 32, np.uint8)
        bits[[path[0] for path in self._paths() if path]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def state_key(self) -> tuple[object, ...]:
        return tuple(self.choices), tuple(self.accepted)

    def accept_token(self, token_id: int) -> None:
        if not any(path[:1] == [token_id] for path in self._paths()):
            raise GrammarError("not canonical")
        self.accepted.append(token_id)

    def rollback(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]

    def _rests(self) -> list[bytes]:
        return [b"".join(map(self.tokenization.token_bytes, path)) for path in self._paths()]

    def forced_bytes(self) -> bytes:
        rests = self._rests()
        common = 0
        while all(len(rest) > common and rest[common] == rests[0][common] for rest in rests):
            common += 1
        return rests[0][:common]

    def is_accepting(self) -> bool:
        return b"" in self._rests()

    def is_finished(self) -> bool:
        return set(self._rests()) == {b""}

    def shortest_ending(self) -> bytes:
        return min(self._rests(), key=len)


CHOICES = [
    '{"name": "anna", "email": "anna@example.org", "count": 12}',
    '{"name": "anna", "email": "hannah@example.org", "count": 12}',
    '{"name": "carla", "email": "carla@example.org", "count": 12}',
    '{"name": "carlos", "city": "Graz", "ok": true}',
    '{"name": "nathan", "city": "Graz", "ok": true}',
]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_jumps_do_not_change_the_text_where_the_tokenization_is_canonical(temperature: float) -> None:
    def run(**settings: Any) -> dict[str, bytes]:
        requests = [
            Request(str(i), prompt(i), CanonicalMatcher(CHOICES), 60, temperature, seed=4) for i in range(12)
        ]
        return {key: done.text for key, done in completions(engine(**settings), requests).items()}

    plain = run(jump=False)
    assert len(set(plain.values())) > 1
    assert set(plain.values()) <= {choice.encode() for choice in CHOICES}
    assert run(jump=True, drafts=False) == plain
    assert run(jump=True, drafts=True) == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing_but_the_number_of_forward_passes(temperature: float) -> None:
    def run(drafts: bool) -> tuple[dict[str, Completion], Engine]:
        used = engine(drafts=drafts)
        requests = [record(str(i), i, temperature=temperature, seed=i) for i in range(12)]
        return completions(used, requests), used

    without, plain = run(drafts=False)
    with_drafts, drafting = run(drafts=True)
    assert {key: done.token_ids for key, done in with_drafts.items()} == {
        key: done.token_ids for key, done in without.items()
    }
    assert plain.statistics.drafted_tokens == 0
    assert drafting.statistics.accepted_drafts > 0
    passes = [sum(done.forward_passes for done in run.values()) for run in (without, with_drafts)]
    assert passes[1] < passes[0]


def test_neither_batch_nor_order_nor_chunks_change_an_output() -> None:
    def run(requests: list[Request], **settings: Any) -> dict[str, list[int]]:
        return {key: done.token_ids for key, done in completions(engine(**settings), requests).items()}

    requests = [record(str(i), i, temperature=0.9 * (i % 2), seed=2) for i in range(8)]
    reference = run(requests)
    again = [record(str(i), i, temperature=0.9 * (i % 2), seed=2) for i in reversed(range(8))]
    assert run(again, batch_size=3, prefill_chunk=5) == reference
    alone = {}
    for i in range(8):
        alone |= run([record(str(i), i, temperature=0.9 * (i % 2), seed=2)], batch_size=1)
    assert alone == reference


def test_an_output_that_runs_out_of_tokens_is_completed_and_says_so() -> None:
    tokenization = tiny_tokenization()
    shortest = len(tokenization.encode('{"name": "A", "email": "", "count": 0, "ok": true}'))
    seen = set()
    for extra in range(12):
        done = completions(engine(), [record(str(i), i, shortest + extra) for i in range(5)])
        for completion in done.values():
            check_record(completion.text)
            assert completion.completion_tokens <= shortest + extra
            seen.add(completion.reason)
    assert "shortened" in seen


def test_without_jumps_the_limit_holds_too() -> None:
    shortest = len(tiny_tokenization().encode('{"name": "A", "email": "", "count": 0, "ok": true}'))
    for completion in completions(
        engine(jump=False), [record(str(i), i, shortest + 6) for i in range(5)]
    ).values():
        check_record(completion.text)
        assert completion.completion_tokens <= shortest + 6


def test_free_text_is_cut_at_its_limit() -> None:
    matcher = FreeMatcher(tiny_tokenization().size, tiny_tokenization().end_ids, may_end=False)
    done = completions(engine(), [Request("a", prompt(0), matcher, 7)])["a"]
    assert (done.reason, done.completion_tokens, done.forward_passes) == ("shortened", 7, 7)


def test_an_end_token_finishes_a_row_and_is_no_part_of_its_text() -> None:
    tokenization = tiny_tokenization()
    rows = [
        Request(str(i), prompt(i), FreeMatcher(tokenization.size), 200, temperature=3.0, seed=i)
        for i in range(20)
    ]
    done = completions(engine(context_length=250), rows)
    ended = [completion for completion in done.values() if completion.reason == "finished"]
    assert ended
    for completion in ended:
        assert not tokenization.end_ids & set(completion.token_ids)
        assert completion.sampled_tokens == completion.completion_tokens + 1


def test_an_ending_that_cannot_fit_fails_that_row_and_says_how_many_tokens_it_needs() -> None:
    shortest = len(tiny_tokenization().encode('{"name": "A", "email": "", "count": 0, "ok": true}'))
    done = completions(engine(), [record("short", 0, shortest - 1), record("fine", 1)])
    assert done["short"].reason == "failed"
    assert f"needs {shortest} tokens; max_tokens is {shortest - 1}" in str(done["short"].error)
    assert done["fine"].error is None


def test_a_prompt_that_leaves_no_room_fails_alone() -> None:
    room = 30
    length = len(prompt(0)) + room
    long = record("long", 0)
    long = Request("long", [5] * length, long.matcher, 60)
    tight = Request("tight", [5] * (length - 3), TemplateMatcher(RECORD, tiny_tokenization()), 60)
    empty = Request("empty", [], TemplateMatcher([b"ok"], tiny_tokenization()), 5)
    fine = Request("fine", prompt(1), TemplateMatcher([b"a", Field(DIGITS, 1, 3)], tiny_tokenization()), 9)
    done = completions(engine(context_length=length), [long, tight, empty, fine])
    assert "context" in str(done["long"].error)
    assert "leaves 3 of the model's context" in str(done["tight"].error)
    assert "no tokens" in str(done["empty"].error)
    assert done["fine"].error is None


def test_a_text_without_any_choice_needs_no_forward_pass() -> None:
    used = engine()
    request = Request("a", prompt(0), TemplateMatcher([b'{"city": "Graz"}'], tiny_tokenization()), 20)
    done = completions(used, [request])["a"]
    assert (done.text, done.reason, done.forward_passes) == (b'{"city": "Graz"}', "finished", 0)
    assert used.statistics.forward_passes == 0


class FaultyMatcher(FreeMatcher):
    """Raises on its third mask."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls = 0

    def token_mask(self) -> np.ndarray:
        self.calls += 1
        if self.calls == 3:
            raise GrammarError("this grammar broke")
        return super().token_mask()


def test_a_matcher_that_raises_fails_its_own_row() -> None:
    done = completions(engine(), [Request("bad", prompt(0), FaultyMatcher(300), 20), record("good", 1)])
    assert done["bad"].reason == "failed"
    assert done["bad"].error == "this grammar broke"
    check_record(done["good"].text)


class FaultyRunner:
    """A runner whose calls can be made to fail; everything else is the real one's."""

    def __init__(self, fault: Any) -> None:
        self.calls = 0
        self.rows: list[int] = []
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(runner(), name)

    def forward(self, segments: Any) -> torch.Tensor:
        self.calls += 1
        self.rows.append(len(segments))
        return self.fault(self, segments, lambda: runner().forward(segments))


def test_nan_logits_fail_the_row_that_has_them() -> None:
    def fault(faulty: FaultyRunner, segments: Any, run: Any) -> torch.Tensor:
        logits = run()
        if faulty.calls == 4:
            logits[0] = float("nan")
        return logits

    used = Engine(FaultyRunner(fault), tiny_tokenization(), EngineConfig(context_length=256))  # type: ignore[arg-type]
    done = completions(used, [record(str(i), i) for i in range(4)])
    failed = [completion for completion in done.values() if completion.reason == "failed"]
    assert len(failed) == 1
    assert "not numbers" in str(failed[0].error)
    assert "output token" in str(failed[0].error)


def test_memory_running_out_halves_the_batch_and_changes_no_output(caplog: pytest.LogCaptureFixture) -> None:
    def fault(faulty: FaultyRunner, segments: Any, run: Any) -> torch.Tensor:
        if len(segments) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run()

    reference = completions(engine(), [record(str(i), i) for i in range(8)])
    faulty = FaultyRunner(fault)
    used = Engine(faulty, tiny_tokenization(), EngineConfig(context_length=256))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        done = completions(used, [record(str(i), i) for i in range(8)])
    assert {key: value.token_ids for key, value in done.items()} == {
        key: value.token_ids for key, value in reference.items()
    }
    assert used.statistics.out_of_memory >= 1
    assert max(faulty.rows[-3:]) <= 3
    assert "memory ran out" in caplog.text


def test_memory_running_out_on_one_row_fails_that_row() -> None:
    def fault(faulty: FaultyRunner, segments: Any, run: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    used = Engine(FaultyRunner(fault), tiny_tokenization(), EngineConfig(context_length=256))  # type: ignore[arg-type]
    done = completions(used, [record("a", 0), record("b", 1)])
    assert {completion.reason for completion in done.values()} == {"failed"}
    assert "memory" in str(done["a"].error)


def test_other_faults_of_the_model_are_not_hidden() -> None:
    def fault(faulty: FaultyRunner, segments: Any, run: Any) -> torch.Tensor:
        raise RuntimeError("shape mismatch")

    used = Engine(FaultyRunner(fault), tiny_tokenization(), EngineConfig(context_length=256))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="shape mismatch"):
        completions(used, [record("a", 0)])


def test_kv_memory_bounds_the_rows_that_run_together() -> None:
    token_bytes = runner().pool.bytes_per_token
    seen: list[int] = []

    def watch(faulty: FaultyRunner, segments: Any, run: Any) -> torch.Tensor:
        seen.append(runner().pool.slots * runner().pool.length * token_bytes)
        return run()

    memory = 3 * 128 * token_bytes
    settings = EngineConfig(context_length=256, kv_memory=memory)
    faulty = FaultyRunner(watch)
    used = Engine(faulty, tiny_tokenization(), settings)  # type: ignore[arg-type]
    done = completions(used, [record(str(i), i) for i in range(7)] + [record("huge", 8, max_tokens=200)])
    assert max(seen) <= memory
    assert max(faulty.rows) in (2, 3)
    assert all(completion.error is None for completion in done.values())
    tight = Engine(runner(), tiny_tokenization(), EngineConfig(context_length=256, kv_memory=memory // 4))
    assert "KV memory" in str(completions(tight, [record("a", 0)])["a"].error)


def test_a_shared_prefix_is_computed_once() -> None:
    tokenization = tiny_tokenization()
    shared = tokenization.encode("You read short notes and give one JSON record per note. " * 2)
    rows = [shared + prompt(i) for i in range(6)]
    requests = [Request(str(i), row, TemplateMatcher(RECORD, tokenization), 60) for i, row in enumerate(rows)]
    used = engine()
    together = completions(used, requests)
    assert used.statistics.shared_tokens >= 5 * len(shared)
    for i, row in enumerate(rows):
        alone = completions(
            engine(batch_size=1), [Request("a", row, TemplateMatcher(RECORD, tokenization), 60)]
        )["a"]
        assert alone.token_ids == together[str(i)].token_ids


def test_rows_that_come_late_join_the_running_ones() -> None:
    source = ListSource([record(str(i), i) for i in range(10)], at_once=1)
    done = list(engine(batch_size=4).run(source))
    assert sorted(completion.key for completion in done) == sorted(map(str, range(10)))
    assert source.waits  # at the start nothing was ready
    reference = completions(engine(), [record(str(i), i) for i in range(10)])
    assert {c.key: c.text for c in done} == {key: c.text for key, c in reference.items()}


def test_stop_finishes_nothing_more() -> None:
    used = engine(batch_size=2)
    done = []
    for completion in used.run(ListSource([record(str(i), i) for i in range(10)])):
        done.append(completion)
        used.stop()
    assert 1 <= len(done) <= 2


def test_log_probabilities_are_summed_over_the_decisions() -> None:
    done = completions(engine(log_probabilities=True), [record("a", 0)])["a"]
    assert done.log_probability is not None
    assert -50 * done.sampled_tokens < done.log_probability < 0


def test_what_the_engine_needs_of_a_matcher_is_refused_politely() -> None:
    """A matcher that refuses the canonical tokens of its forced bytes still decodes, without jumps."""

    class Letters(TemplateMatcher):
        def accept_token(self, token_id: int) -> None:
            if len(self.tokenization.token_bytes(token_id)) > 1:
                raise GrammarError("one byte at a time")
            super().accept_token(token_id)

        def token_mask(self) -> np.ndarray:
            bits = np.unpackbits(super().token_mask().view(np.uint8), bitorder="little")
            for token in np.flatnonzero(bits):
                bits[token] = len(self.tokenization.token_bytes(int(token))) == 1
            return np.packbits(bits, bitorder="little").view(np.uint32)

    parts: list[bytes | Field] = [b'{"n": ', Field(DIGITS, 1, 3), b', "ok": true}']
    done = completions(engine(), [Request("a", prompt(0), Letters(parts, tiny_tokenization()), 60)])["a"]
    assert done.reason == "finished"
    assert done.jumped_tokens == 0
    json.loads(done.text)


def test_memory_running_out_while_the_pool_grows_halves_the_batch_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = completions(engine(), [record(str(i), i) for i in range(8)])
    used = engine()
    used.runner.pool.clear()
    resize = used.runner.pool.resize

    def narrow(slots: int, length: int) -> None:
        if slots > 3:
            raise RuntimeError("could not create a primitive")
        resize(slots, length)

    monkeypatch.setattr(used.runner.pool, "resize", narrow)
    done = completions(used, [record(str(i), i) for i in range(8)])
    assert {key: value.token_ids for key, value in done.items()} == {
        key: value.token_ids for key, value in reference.items()
    }
    assert used.statistics.out_of_memory >= 1
