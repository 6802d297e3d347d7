"""The slot pool keeps what it should through resizing, copying and erasing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.kv_cache import GROWTH, SlotPool, rounded_length


def test_length_is_rounded_up_to_the_growth_step() -> None:
    assert [rounded_length(n) for n in (0, 1, GROWTH, GROWTH + 1)] == [GROWTH, GROWTH, GROWTH, 2 * GROWTH]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 150)), min_size=1, max_size=8), st.booleans())
def test_resizing_keeps_what_fits_and_never_shows_what_is_not_a_number(
    sizes: list[tuple[int, int]], across: bool
) -> None:
    pool = SlotPool(torch.device("cpu"), torch.float32, keys_across=across)
    expected: dict[int, torch.Tensor] = {}
    for step, (slots, length) in enumerate(sizes):
        pool.resize(slots, length)
        for layer in range(2):
            keys, values = pool.layer(layer, 2, 3, 4)
            assert keys.shape == (slots, 2, rounded_length(length), 3)
            assert values.shape == (slots, 2, rounded_length(length), 4)
            assert (keys.transpose(2, 3) if across else keys).is_contiguous() and values.is_contiguous()
            assert torch.isfinite(keys).all() and torch.isfinite(values).all()
            if layer in expected:
                old = expected[layer]
                kept = keys[: old.shape[0], :, : old.shape[2]]
                assert torch.equal(kept, old[: kept.shape[0], :, : kept.shape[2]])
            keys.normal_(generator=torch.Generator().manual_seed(step))
            values.fill_(step)
            expected[layer] = keys.clone()


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    pool = SlotPool(torch.device("cpu"), torch.bfloat16)
    assert pool.bytes_per_token == 0
    pool.resize(1, 1)
    pool.layer(0, 2, 8, 8)
    pool.layer(1, 1, 4, 6)
    assert pool.layer_count == 2
    assert pool.bytes_per_token == 2 * (2 * 16 + 10)


def test_copy_gives_another_slot_a_prefix_and_nothing_else() -> None:
    pool = SlotPool(torch.device("cpu"), torch.float32)
    pool.resize(3, 40)
    keys, values = pool.layer(0, 2, 3, 3)
    keys.normal_()
    values.normal_()
    before = keys.clone()
    pool.copy(0, 2, 5)
    assert torch.equal(keys[2, :, :5], before[0, :, :5])
    assert torch.equal(values[2, :, :5], values[0, :, :5])
    assert torch.equal(keys[2, :, 5:], before[2, :, 5:])
    assert torch.equal(keys[:2], before[:2])


def test_an_erased_slot_leaves_no_trace_even_after_resizing() -> None:
    pool = SlotPool(torch.device("cpu"), torch.float32)
    pool.resize(2, 64)
    for layer in range(2):
        for part in pool.layer(layer, 1, 4, 4):
            part[1] = float("nan")
    pool.resize(2, 32)
    pool.erase(1)
    for slots, length in ((2, 64), (3, 96), (1, 32), (3, 160)):
        pool.resize(slots, length)
        for layer in range(2):
            assert all(torch.isfinite(part).all() for part in pool.layer(layer, 1, 4, 4))


def test_clear_gives_memory_back_and_the_pool_works_on() -> None:
    pool = SlotPool(torch.device("cpu"), torch.float32)
    pool.resize(2, 64)
    pool.layer(0, 1, 4, 4)
    pool.clear()
    assert (pool.slots, pool.length) == (0, 0)
    pool.resize(1, 10)
    assert pool.layer(0, 1, 4, 4)[0].shape == (1, 1, GROWTH, 4)


def test_a_token_that_is_dropped_is_zero_and_nothing_else() -> None:
    pool = SlotPool(torch.device("cpu"), torch.float32)
    pool.resize(2, 32)
    for part in pool.layer(0, 2, 4, 3):
        part.fill_(1.0)
    pool.drop(1, 5)
    for part in pool.layer(0, 2, 4, 3):
        assert not part[1, :, 5].any()
        assert int((part == 0).sum()) == part[1, :, 5].numel()
