"""Steps in lanes: the same bits as without, and every row in one lane."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.attention import Span, StepLayout
from jfbatch.engine.kv_cache import SlotPool
from jfbatch.engine.lanes import LanedLayout, LanedModel, divided, laid_out
from jfbatch.engine.linear import can_pack
from jfbatch.engine.runner import Runner, Segment
from tests.engine.test_engine import random_llama

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@cache
def runner(dtype: torch.dtype) -> Runner:
    return Runner(random_llama().to(dtype))


Steps = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=8, max_size=8), min_size=1, max_size=3
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(steps=Steps)
def test_the_logits_of_a_step_in_lanes_are_the_same_bits(
    dtype: torch.dtype, steps: list[list[tuple[int, int]]]
) -> None:
    used = runner(dtype)
    assert isinstance(used.model.model, LanedModel)
    with torch.inference_mode():
        alone, together = (logits_of(used, steps, threads) for threads in (1, 2))
    assert all(map(torch.equal, alone, together))


def logits_of(used: Runner, steps: list[list[tuple[int, int]]], threads: int) -> list[torch.Tensor]:
    torch.set_num_threads(threads)
    used.pool.resize(0, 1)
    used.pool.resize(8, 160)
    past = [0] * 8
    results = []
    for step in steps:
        segments = []
        for slot, (count, wanted) in enumerate(step):
            tokens = [(slot * 7 + past[slot] + index) % 90 for index in range(count)]
            logits = range(max(count - wanted, 0), count)
            segments.append(Segment(slot, past[slot], tokens, logits, prompt=60))
            past[slot] += count
        results.append(used.forward(segments))
    return results


def test_lanes_are_taken_where_every_core_gets_tokens_enough() -> None:
    pool = SlotPool(torch.device("cpu"), torch.float32, for_kernel=True)
    pool.resize(4, 64)

    def step(*counts: int) -> StepLayout | LanedLayout:
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        spans = [Span(slot, 0, *part) for slot, part in enumerate(zip(firsts, counts, strict=True))]
        return laid_out(pool, spans, None, torch.get_num_threads())

    assert isinstance(step(16, 16), LanedLayout)
    assert isinstance(step(8, 8, 8, 8), LanedLayout)
    assert isinstance(step(16, 15), StepLayout)
    assert isinstance(step(60), StepLayout)
    torch.set_num_threads(1)
    assert isinstance(step(16, 16), StepLayout)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 200)), min_size=1, max_size=40), st.integers(1, 4)
)
def test_every_span_is_in_one_lane_and_none_has_much_more_than_another(
    rows: list[tuple[int, int]], count: int
) -> None:
    firsts = [sum(part for _, part in rows[:index]) for index in range(len(rows))]
    spans = [Span(slot, start, firsts[slot], part) for slot, (start, part) in enumerate(rows)]
    parts = divided(spans, count)
    assert sorted((span for part in parts for span in part), key=lambda span: span.slot) == spans
    tokens = sorted(sum(span.count for span in part) for part in parts)
    assert tokens[-1] - tokens[0] <= 2 * max(span.count for span in spans)


@torch.inference_mode()
def test_what_goes_wrong_in_one_lane_is_raised_when_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    used = runner(DTYPES[0])
    used.pool.resize(2, 64)
    segments = [Segment(slot, 0, list(range(20)), [19]) for slot in range(2)]
    expected = used.forward(segments)
    done = []
    inner = used.model.model.inner.forward

    def broken(*arguments: object, step: StepLayout, **settings: object) -> object:
        output = inner(*arguments, step=step, **settings)
        done.append(step)
        if step.slots[0] == 0:
            raise torch.OutOfMemoryError("no memory")
        return output

    monkeypatch.setattr(used.model.model.inner, "forward", broken)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        used.forward(segments)
    assert len(done) == 2
    monkeypatch.undo()
    assert torch.equal(used.forward(segments), expected)
