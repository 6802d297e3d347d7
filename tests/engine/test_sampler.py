"""Masked choice: greedy against brute force, temperature against the softmax distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.sampler import Draw, choose, uniform

GREEDY = Draw("row", 0, 0, 0.0)


def mask_of(allowed: list[int], words: int) -> np.ndarray:
    bits = np.zeros(words * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 130), st.integers(1, 5))
def test_greedy_is_the_first_best_allowed_token(data: st.DataObject, width: int, words: int) -> None:
    rows = data.draw(st.integers(1, 4))
    ids = st.integers(0, min(width, words * 32) - 1)
    allowed = [data.draw(st.lists(ids, min_size=1, unique=True)) for _ in range(rows)]
    values = st.one_of(st.integers(-3, 3).map(float), st.just(-float("inf")))
    logits = np.array(
        [data.draw(st.lists(values, min_size=width, max_size=width)) for _ in range(rows)], np.float32
    )
    masks = np.stack([mask_of(row, words) for row in allowed])
    order = data.draw(st.permutations(range(rows)))
    choices = choose(
        torch.tensor(logits[order]), masks, [GREEDY] * rows, positions=np.argsort(order).tolist()
    )
    assert not choices.failures
    assert (choices.token_ids == choose(torch.tensor(logits), masks, [GREEDY] * rows).token_ids).all()
    for row in range(rows):
        best = max(sorted(allowed[row]), key=lambda token: logits[row, token])
        assert choices.token_ids[row] == best


def test_tokens_beyond_the_mask_are_forbidden_and_bits_beyond_the_logits_ignored() -> None:
    logits = torch.tensor([[0.0] * 40 + [9.0]])
    assert choose(logits.clone(), mask_of([3], 1)[None], [GREEDY]).token_ids[0] == 3
    assert choose(logits[:, :5].clone(), mask_of([4, 31], 1)[None], [GREEDY]).token_ids[0] == 4


def test_nan_logits_and_empty_masks_fail_their_own_rows_only() -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [1.0, 3.0]])
    masks = np.stack([mask_of([0, 1], 1), mask_of([0, 1], 1), mask_of([], 1)])
    choices = choose(logits, masks, [GREEDY] * 3)
    assert choices.token_ids[0] == 1
    assert set(choices.failures) == {1, 2}
    assert "not numbers" in choices.failures[1]
    assert "no token" in choices.failures[2]
    infinite = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [-float("inf"), -float("inf")]])
    masks = np.stack([mask_of([0, 1], 1), mask_of([1], 1), mask_of([1], 1)])
    choices = choose(infinite.clone(), masks, [GREEDY] * 3)
    assert set(choices.failures) == {0} and choices.token_ids[1:].tolist() == [1, 1]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200))
def test_greedy_by_one_pass_equals_greedy_by_many(seed: int, width: int) -> None:
    """With log probabilities wanted, another way to the same choice is taken."""
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.choice([-1.5, 0, 1, np.nan, np.inf, -np.inf, 7], (5, width)))
    logits = logits.float()
    masks = generator.integers(0, 2**32, (5, 4), np.uint32) & generator.integers(0, 2**32, (5, 4), np.uint32)
    fast = choose(logits.clone(), masks, [GREEDY] * 5)
    slow = choose(logits.clone(), masks, [GREEDY] * 5, with_log_probabilities=True)
    assert fast.failures == slow.failures
    good = [row for row in range(5) if row not in slow.failures]
    assert (fast.token_ids[good] == slow.token_ids[good]).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_follow_the_masked_softmax(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.5])
    allowed = [0, 1, 2, 4]
    count = 4000
    draws = [Draw(f"row {i}", 7, i % 3, temperature) for i in range(count)]
    masks = np.repeat(mask_of(allowed, 1)[None], count, axis=0)
    chosen = choose(logits.repeat(count, 1), masks, draws).token_ids
    expected = torch.softmax(logits[allowed] / temperature, 0).numpy()
    share = np.array([(chosen == token).mean() for token in allowed])
    assert np.abs(share - expected).max() < 4 * np.sqrt(0.25 / count)


def test_a_draw_depends_on_seed_key_and_position_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 64, generator=generator)
    masks = np.full((6, 2), 0xFFFFFFFF, np.uint32)
    draws = [Draw(f"row {i}", i, 2 * i, 0.8 if i % 2 else 0.0) for i in range(6)]
    together = choose(logits.clone(), masks, draws).token_ids
    order = [4, 0, 5, 2, 1, 3]
    shuffled = choose(logits[order].clone(), masks, [draws[i] for i in order]).token_ids
    alone = [choose(logits[i : i + 1].clone(), masks[:1], draws[i : i + 1]).token_ids[0] for i in range(6)]
    assert list(together[order]) == list(shuffled)
    assert list(together) == alone
    assert len({uniform(1, "a", 0), uniform(2, "a", 0), uniform(1, "b", 0), uniform(1, "a", 1)}) == 4


def test_log_probability_is_the_models_own_before_mask_and_temperature() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0]])
    draws = [Draw("row", 0, 0, 0.0)]
    choices = choose(logits.clone(), mask_of([0, 2], 1)[None], draws, with_log_probabilities=True)
    assert choices.token_ids[0] == 2
    assert choices.log_probabilities is not None
    assert choices.log_probabilities[0] == pytest.approx(float(torch.log_softmax(logits, 1)[0, 2]), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-6, 1000.0])
def test_any_temperature_above_zero_draws_an_allowed_token(temperature: float) -> None:
    logits = torch.tensor([[float("nan"), 5.0, -70.0, float("inf")]])
    draws = [Draw("row", 0, 0, temperature)]
    choices = choose(logits, mask_of([1, 2], 1)[None], draws)
    assert not choices.failures and choices.token_ids[0] in (1, 2)
    if temperature < 1:
        assert choices.token_ids[0] == 1
