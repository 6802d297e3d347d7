"""Steps in fixed shapes give the logits of eager ones, launched or replayed, whatever shares them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jfbatch.engine.kv_cache import SlotPool, rung
from jfbatch.engine.runner import LateTokens, Runner, Segment
from jfbatch.engine.static_step import MOST_TOKENS, QUERIES, StepSize, input_parts, step_inputs
from tests.engine.recorded import WorkRecorder
from tests.engine.test_architectures import CONFIGURATIONS, VOCABULARY, random_model

SLOTS, LENGTH = 7, 200
FAMILIES = ("llama", "llama_single_kv_head", "qwen3", "mistral_window", "gemma2", "gemma3", "gpt_oss")

Step = list[tuple[int, int, int, int]]  # (slot, start, count, how many of the last have logits)


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    """As in the engine's step."""
    with torch.inference_mode():
        yield


def test_sizes_are_few_and_waste_a_third_at_most() -> None:
    assert [rung(n) for n in (0, 1, 8, 9, 12, 13, 17, 33, 64, 65, 97, 200)] == [
        *(8, 8, 8, 12, 12, 16, 24, 48, 64, 96, 128, 256)
    ]
    assert [rung(n, 128) for n in (1, 128, 129, 193, 400)] == [128, 128, 192, 256, 512]
    sizes = sorted({rung(n) for n in range(1, 5000)})
    assert all(after <= 1.5 * before for before, after in pairwise(sizes))
    assert all(rung(n) >= n and rung(rung(n)) == rung(n) for n in range(1, 2000))


def pool(slots: int = SLOTS, length: int = LENGTH) -> SlotPool:
    made = SlotPool(torch.device("cpu"), torch.float32)
    made.resize(slots, length)
    return made


def segments_of(step: Step, seed: int = 0) -> list[Segment]:
    dice = np.random.default_rng(seed)
    return [
        Segment(
            slot, start, dice.integers(1, VOCABULARY, count).tolist(), range(count - min(some, count), count)
        )
        for slot, start, count, some in step
    ]


steps = st.lists(
    st.tuples(st.integers(0, 120), st.sampled_from([1, 1, 1, 2, 5, 8, 9, 25, 64]), st.integers(0, 9)),
    min_size=1,
    max_size=SLOTS,
).flatmap(
    lambda rows: st.permutations(range(SLOTS)).map(
        lambda slots: [(slot, *row) for slot, row in zip(slots, rows, strict=False)]
    )
)


@given(steps)
def test_every_token_has_a_query_of_its_own_and_every_query_its_row(step: Step) -> None:
    segments = segments_of(step)
    size = StepSize.of(segments, pool())
    assert size is not None
    inputs = step_inputs(segments, size, SLOTS)
    lengths = {name: part.stop - part.start for name, part in input_parts(size).items()}
    assert all(len(content) <= lengths[name] for name, content in inputs.items())
    assert len(inputs["slots"]) == lengths["slots"]
    tokens = sum(len(segment.token_ids) for segment in segments)
    assert (inputs["slots"][tokens:] == SLOTS).all()
    places = inputs["places"]
    assert len(set(places.tolist())) == tokens
    own = size.slots * size.queries
    rows = np.concatenate(
        [np.repeat(np.arange(size.slots), size.queries), np.repeat(inputs["extra_slots"], QUERIES)]
    )
    token = 0
    for segment in segments:
        for offset in range(len(segment.token_ids)):
            place = places[token]
            assert rows[place] == segment.slot
            assert (place < own) == (offset < size.queries)
            assert inputs["query_tokens"][place] == token
            assert inputs["query_positions"][place] == segment.start + offset == inputs["positions"][token]
            assert inputs["slots"][token] == segment.slot
            token += 1
    assert size.length >= max(segment.start + len(segment.token_ids) for segment in segments)


def test_long_segments_and_large_steps_are_left_to_the_eager_way() -> None:
    used = pool(64, 400)
    assert StepSize.of([Segment(0, 0, [1] * 64)], used) is not None
    assert StepSize.of([Segment(0, 0, [1] * 65)], used) is None
    assert StepSize.of([Segment(slot, 0, [1] * 17) for slot in range(60)], used) is not None
    assert StepSize.of([Segment(slot, 0, [1] * 18) for slot in range(60)], used) is None
    assert MOST_TOKENS == rung(60 * 17) < 60 * 18
    many = pool(MOST_TOKENS + 500, 20)
    assert StepSize.of([Segment(MOST_TOKENS - 1, 0, [1])], many) is not None
    assert StepSize.of([Segment(MOST_TOKENS, 0, [1])], many) is None


def test_the_largest_step_fits_the_buffer_of_inputs() -> None:
    used = runners("llama")[1]
    used.pool.resize(MOST_TOKENS, 64)
    segments = [Segment(slot, 0, [1], [0]) for slot in range(MOST_TOKENS - 25)]
    logits = used.forward([*segments, Segment(MOST_TOKENS - 1, 0, [1] * 25, range(25))])
    assert logits.shape == (MOST_TOKENS, VOCABULARY)


@cache
def runners(name: str) -> tuple[Runner, Runner, Runner]:
    """The same model's eager, static and replaying runners, all attending as on CUDA."""
    made = [Runner(random_model(name), kv_dtype=torch.float32, pack=False, static=True) for _ in range(3)]
    made[0]._static = None
    made[2].replay_by(WorkRecorder())
    return made[0], made[1], made[2]


def filled(runner: Runner, seed: int = 5) -> None:
    """Give every slot a past, the same for every runner."""
    runner.pool.resize(0, 1)
    runner.pool.resize(SLOTS, LENGTH)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(runner.layer_count):
        for storage in runner.pool._layers[layer]:
            storage.view.normal_(generator=generator)


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(steps, st.sampled_from([1, 1, 4]), st.booleans()), min_size=1), st.integers(0, 3))
def test_logits_and_storage_are_those_of_eager_steps(
    name: str, run: list[tuple[Step, int, bool]], seed: int
) -> None:
    """Steps begin anywhere in what a slot holds, as after a rollback; sizes are repeated; the pool grows."""
    used = runners(name)
    for runner in used:
        filled(runner)
    for step, times, grows in run:
        for runner in used if grows else ():
            runner.pool.resize(runner.pool.slots + 1, runner.pool.length + 40)
        for _ in range(times - 1):
            used[2].forward(segments_of(step, seed + 1))
        segments = segments_of(step, seed)
        expected, *found = (runner.forward(segments) for runner in used)
        assert all(close(logits, expected) for logits in found)
    for layer in range(used[0].layer_count):
        for kind in range(2):
            views = (runner.pool._layers[layer][kind].view for runner in used)
            expected, *found = (view[:SLOTS, :, :LENGTH] for view in views)  # what grew may be stale
            assert all(close(view, expected) for view in found)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_recorded_step_is_replayed_on_new_rows_positions_and_tokens(name: str) -> None:
    eager, _static, replaying = runners(name)
    recorder = WorkRecorder()
    replaying.replay_by(recorder)
    for runner in (eager, replaying):
        filled(runner)
    replays = replaying.counts.replayed
    dice = np.random.default_rng(1)
    for turn in range(10):
        step = [
            (int(slot), int(dice.integers(0, 90)), int(dice.integers(1, 5)), 9)
            for slot in dice.permutation(SLOTS)[:5]
        ]
        step[0] = (*step[0][:2], 9 + turn % 3, 9)  # so that all are of one size
        segments = segments_of(step, turn)
        assert close(replaying.forward(segments), eager.forward(segments))
    assert replaying.counts.replayed > replays
    assert sum(made.replays for made in recorder.made) == replaying.counts.replayed - replays


def test_tokens_that_only_the_device_knows_take_their_places() -> None:
    step: Step = [(2, 40, 1, 1), (0, 17, 3, 3), (5, 80, 1, 1)]
    known = segments_of(step)
    flat = [token for segment in known for token in segment.token_ids]
    hidden = [
        Segment(segment.slot, segment.start, [0, *segment.token_ids[1:]], segment.logits) for segment in known
    ]
    late = LateTokens([0, 1, 4], torch.tensor([flat[0], flat[1], flat[4]]))
    for runner in runners("llama"):
        filled(runner)
        expected = runner.forward(known)
        for _ in range(5):
            assert torch.equal(runner.forward(hidden, late), expected)


def test_logits_are_the_caller_s_own() -> None:
    for runner in runners("llama"):
        filled(runner)
        for _ in range(4):
            first = runner.forward(segments_of([(0, 10, 1, 1)], 1))
            kept = first.clone()
            runner.forward(segments_of([(0, 10, 1, 1)], 2))
            assert torch.equal(first, kept)


def test_a_row_that_is_not_numbers_spoils_no_other_and_its_slot_can_be_used_again() -> None:
    _eager, static, replaying = runners("llama")
    for runner in (static, replaying):
        filled(runner)
        step: Step = [(0, 20, 1, 1), (1, 30, 2, 2), (3, 12, 1, 1)]
        for turn in range(6):
            expected = runner.forward(segments_of(step, turn))[1:]
            for storage in runner.pool.layer(0, 2, 12, 12):
                storage[0, :, :20] = float("nan")
            spoilt = runner.forward(segments_of(step, turn))
            assert spoilt[0].isnan().any() and torch.equal(spoilt[1:], expected)
            runner.pool.erase(0)
            assert torch.isfinite(runner.forward(segments_of(step, turn))).all()


def test_what_padding_wrote_is_never_seen() -> None:
    _eager, static, _replaying = runners("llama")
    filled(static)
    static.forward(segments_of([(0, 20, 1, 1)]))
    for part in (0, 1):
        assert static.pool.rows(0)[part][-1].abs().sum() > 0  # padding was there
        assert static.pool.rows(0)[part].shape[0] == SLOTS * 2 * static.pool.length + 1
        static.pool.rows(0)[part][-1] = float("nan")
    for slots, length in ((9, 300), (3, 64), (12, 500)):
        static.pool.resize(slots, length)
        for layer in range(2):
            assert all(torch.isfinite(part).all() for part in static.pool.layer(layer, 2, 12, 12))
