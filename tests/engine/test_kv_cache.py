"""The slot pool keeps what it should through resizing, copying and erasing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.kv_cache import GROWTH, SlotPool, rounded_length


def test_length_is_rounded_up_to_the_growth_step() -> None:
    assert [rounded_length(n) for n in (0, 1, GROWTH, GROWTH + 1)] == [GROWTH, GROWTH, GROWTH, 2 * GROWTH]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 150)), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_resizing_keeps_what_fits_and_never_shows_what_is_not_a_number(
    sizes: list[tuple[int, int]], for_kernel: bool, dtype: torch.dtype
) -> None:
    pool = SlotPool(torch.device("cpu"), dtype, for_kernel)
    expected: list[torch.Tensor] = []  # of every slot, keys and values of layer 1
    for step, (slots, length) in enumerate(sizes):
        pool.resize(slots, length)
        for layer in range(2):
            for part in pool.layer(layer, 2, 3, 4):
                assert part.is_contiguous() and torch.isfinite(part).all()
        present = [torch.cat(pool.past(1, slot, pool.length), dim=2) for slot in range(slots)]
        assert present[0].shape == (2, rounded_length(length), 7)
        for old, new in zip(expected, present, strict=False):
            kept = min(old.shape[1], new.shape[1])
            assert torch.equal(old[:, :kept], new[:, :kept])
        for part in pool.layer(1, 2, 3, 4):
            part.normal_(generator=torch.Generator().manual_seed(step))
        expected = [torch.cat(pool.past(1, slot, pool.length), dim=2).clone() for slot in range(slots)]


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    pool = SlotPool(torch.device("cpu"), torch.bfloat16)
    assert pool.bytes_per_token == 0
    pool.resize(1, 1)
    pool.layer(0, 2, 8, 8)
    pool.layer(1, 1, 4, 6)
    assert pool.layer_count == 2
    assert pool.bytes_per_token == 2 * (2 * 16 + 10)


@pytest.mark.parametrize("for_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_gives_another_slot_a_prefix_and_nothing_else(for_kernel: bool, dtype: torch.dtype) -> None:
    pool = SlotPool(torch.device("cpu"), dtype, for_kernel)
    pool.resize(3, 40)
    for part in pool.layer(0, 2, 3, 5):
        part.normal_()
    before = [[part.clone() for part in pool.past(0, slot, 40)] for slot in range(3)]
    pool.copy(0, 2, 5)
    for part in range(2):
        for slot in (0, 1):
            assert torch.equal(pool.past(0, slot, 40)[part], before[slot][part])
        copied = pool.past(0, 2, 40)[part]
        assert torch.equal(copied[:, :5], before[0][part][:, :5])
        assert torch.equal(copied[:, 6:], before[2][part][:, 6:])  # groups of two are copied whole


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


@pytest.mark.parametrize("for_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_is_dropped_is_zero_and_nothing_else(for_kernel: bool, dtype: torch.dtype) -> None:
    pool = SlotPool(torch.device("cpu"), dtype, for_kernel)
    pool.resize(2, 32)
    for part in pool.layer(0, 2, 4, 3):
        part.fill_(1.0)
    pool.drop(1, 5)
    for slot in (0, 1):
        for part in pool.past(0, slot, 32):
            zeros = (part == 0).any(dim=2).any(dim=0)
            assert zeros.nonzero().flatten().tolist() == ([5] if slot else [])
            assert slot == 0 or not part[:, 5].any()
