"""Whole runs in fixed shapes, launched or replayed, give the texts of ordinary runs."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.graphs import StepCounts
from jfbatch.engine.runner import Runner, Segment
from jfbatch.engine.sequence import Completion, Request
from tests.engine.matchers import FreeMatcher, TemplateMatcher, tiny_tokenization
from tests.engine.recorded import WorkRecorder
from tests.engine.sources import ListSource
from tests.engine.test_architectures import greedy_by_engine, prompts, random_model
from tests.engine.test_engine import RECORD, prompt, random_llama
from tests.engine.test_engine import runner as ordinary


@cache
def static() -> Runner:
    """test_engine's model, its short steps in fixed shapes."""
    return Runner(random_llama(), kv_dtype=torch.float32, pack=False, static=True)


def replaying(recorder: WorkRecorder) -> Runner:
    runner = static()
    runner.pool.clear()
    runner.counts = StepCounts()
    runner.replay_by(recorder)
    return runner


def requests(count: int, **settings: Any) -> list[Request]:
    """Records, and every fifth row free text; limits that cut some of them."""
    rows = []
    for index in range(count):
        matcher: Any = TemplateMatcher(RECORD, tiny_tokenization())
        if index % 5 == 4:
            matcher = FreeMatcher(tiny_tokenization().size)
        shared = prompt(3) * (index % 3 == 2)  # long prompts too, which some rows share
        rows.append(Request(str(index), shared * 3 + prompt(index), matcher, 40 + index % 13, **settings))
    return rows


def outcomes(engine: Engine, rows: list[Request], at_once: int | None = None) -> dict[str, tuple[Any, ...]]:
    def outcome(done: Completion) -> tuple[Any, ...]:
        return done.token_ids, done.reason, done.error, done.completion_tokens, done.sampled_tokens

    return {done.key: outcome(done) for done in engine.run(ListSource(rows, at_once))}


def engine(runner: Runner, **settings: Any) -> Engine:
    return Engine(runner, tiny_tokenization(), EngineConfig(**{"context_length": 256, **settings}))


@settings(max_examples=16, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(1, 14),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, 1, 4]),
    st.sampled_from([1 << 30, 1 << 20]),
    st.booleans(),
)
def test_a_run_of_replayed_steps_gives_the_same_outcomes(
    rows: int,
    batch_size: int,
    jump: bool,
    drafts: bool,
    temperature: float,
    at_once: int | None,
    kv_memory: int,
    ahead: bool,
) -> None:
    def run(runner: Runner, ahead: bool = False) -> dict[str, tuple[Any, ...]]:
        options = {"jump": jump, "drafts": drafts, "ahead": ahead}
        used = engine(runner, batch_size=batch_size, kv_memory=kv_memory, **options)
        return outcomes(used, requests(rows, temperature=temperature, seed=rows), at_once)

    recorder = WorkRecorder()
    runner = replaying(recorder)
    assert run(runner, ahead) == run(ordinary())
    counts = runner.counts
    assert counts.recorded == len(recorder.made)
    assert counts.replayed == sum(graph.replays for graph in recorder.made)
    assert counts.steps > 0


def test_most_steps_of_a_run_are_replayed_and_the_pool_hardly_moves() -> None:
    recorder = WorkRecorder()
    runner = replaying(recorder)
    used = engine(runner, batch_size=8, drafts=False)
    moved = runner.pool.generation
    outcomes(used, requests(60))
    counts = runner.counts
    assert counts.steps == used.statistics.forward_passes
    assert counts.replayed > 0.7 * counts.steps
    assert counts.recorded < 20
    assert runner.pool.generation - moved <= 2


def test_only_replayed_steps_say_how_long_steps_take() -> None:
    runner = replaying(WorkRecorder())
    step = [Segment(0, 0, [5], [0])]
    with torch.inference_mode():
        runner.pool.resize(1, 70)
        assert [(runner.forward(step), runner.typical)[1] for _ in range(4)] == [False, False, True, True]
        runner.forward([Segment(0, 0, [5] * 65)])
        assert not runner.typical  # eager
        runner.replay_by(None)
        runner.forward(step)
        assert runner.typical  # as all will be


@pytest.mark.parametrize("name", ["qwen3", "mistral_window", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"])
def test_greedy_tokens_of_replayed_steps_are_those_of_ordinary_ones(name: str) -> None:
    rows = prompts()
    expected = greedy_by_engine(Runner(random_model(name), torch.float32), rows, 20)
    runner = Runner(random_model(name), torch.float32, pack=False, static=True)
    runner.replay_by(WorkRecorder())
    assert greedy_by_engine(runner, rows, 20, batch_size=64) == expected
    assert greedy_by_engine(runner, rows, 20, batch_size=5, drafts=False) == expected
    assert runner.counts.replayed > 10  # without drafts, which make few steps of many sizes


def test_memory_running_out_while_recording_starts_the_rows_again_with_the_graphs_freed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = outcomes(engine(ordinary(), batch_size=8), requests(12))
    recorder = WorkRecorder([None, torch.OutOfMemoryError("CUDA out of memory")])
    used = engine(replaying(recorder), batch_size=8)
    with caplog.at_level(logging.WARNING):
        assert outcomes(used, requests(12)) == expected
    assert used.statistics.out_of_memory == 1
    assert "going on with" in caplog.text and recorder.made[0].released


def test_steps_that_cannot_be_recorded_run_as_they_did(caplog: pytest.LogCaptureFixture) -> None:
    expected = outcomes(engine(ordinary(), batch_size=8), requests(12))
    runner = replaying(WorkRecorder([RuntimeError("operation not permitted when stream is capturing")]))
    with caplog.at_level(logging.WARNING):
        assert outcomes(engine(runner, batch_size=8), requests(12)) == expected
    assert len([record for record in caplog.records if "CUDA graphs" in record.message]) == 1
    assert runner.counts.replayed == 0 and runner.counts.eager > runner.counts.padded
