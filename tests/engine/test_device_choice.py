"""Choices on the device: as the host's sampler makes them, by masks that were sent once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.device_choice import DeviceChooser
from jfbatch.engine.device_masks import DeviceMasks
from jfbatch.engine.early import together
from jfbatch.engine.sampler import Draw, HostChooser
from jfbatch.engine.transitions import UNKNOWN, WAYS, Transitions
from tests.engine.test_sampler import mask_of

CPU = torch.device("cpu")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 7), st.booleans(), st.booleans())
def test_the_device_chooses_what_the_host_does(
    seed: int, width: int, words: int, likely: bool, odd: bool
) -> None:
    generator = np.random.default_rng(seed)
    values = [-1.5, 0, 1, 2, -np.inf, 7] + [np.nan, np.inf] * odd
    logits = torch.from_numpy(generator.choice(values, (7, width))).float()
    masks = [
        generator.integers(0, 2**32, words, np.uint32) & generator.integers(0, 2**32, words, np.uint32)
        for _ in range(5)
    ]
    draws = [Draw(str(row), 3, row, float(generator.choice([0, 0.5, 2]))) for row in range(5)]
    positions = generator.permutation(7)[:5].tolist()
    before = logits.clone()
    ours = DeviceChooser(CPU, width, likely).choose(logits, masks, draws, positions)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    theirs = HostChooser(likely).choose(logits, masks, draws, positions).fetch()
    fetched = ours.fetch()
    assert fetched.failures == theirs.failures
    good = [row for row in range(5) if row not in theirs.failures]
    assert fetched.token_ids[good].tolist() == theirs.token_ids[good].tolist()
    assert ours.token_ids.tolist() == fetched.token_ids.tolist()
    if likely:
        assert fetched.log_probabilities is not None and theirs.log_probabilities is not None
        np.testing.assert_array_equal(fetched.log_probabilities[good], theirs.log_probabilities[good])
    else:
        assert fetched.log_probabilities is None


def test_choices_of_two_are_put_together_in_any_order() -> None:
    chooser = DeviceChooser(CPU, 4, with_log_probabilities=True)
    logits = torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1], [0, torch.nan, 0, 0]])
    mask, none = mask_of([0, 1, 2, 3], 1), mask_of([], 1)
    greedy = Draw("", 0, 0, 0.0)
    first = chooser.choose(logits, [mask, none], [greedy] * 2, [0, 1])
    second = chooser.choose(logits, [mask, mask], [greedy] * 2, [1, 2])
    both = together(first, second, [3, 2, 0, 1])
    fetched = both.fetch()
    assert both.token_ids[1:3].tolist() == fetched.token_ids[1:3].tolist() == [0, 3]
    assert set(fetched.failures) == {0, 3}
    assert "not numbers" in fetched.failures[0] and "no token" in fetched.failures[3]
    assert fetched.log_probabilities is not None
    assert fetched.log_probabilities[1] == pytest.approx(fetched.log_probabilities[2])
    alone = together(first, None, [0]).fetch()
    assert (alone.token_ids.tolist(), alone.failures) == ([3], {})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=9), max_size=20), st.integers(1, 12))
def test_masks_are_where_they_are_said_to_be(steps: list[list[int]], most: int) -> None:
    width, words = 70, 3
    generator = np.random.default_rng(1)
    masks = [generator.integers(0, 2**32, generator.integers(1, 5), np.uint32) for _ in range(31)]
    store = DeviceMasks(CPU, width, memory=4 * words * most)
    for step in steps:
        places = store.places([masks[index] for index in step])
        allowed = store.allowed(torch.tensor(places))
        for index, place, row in zip(step, places, allowed, strict=True):
            bits = np.unpackbits(masks[index].view(np.uint8), bitorder="little")[:width]
            expected = np.zeros(width, np.uint8)
            expected[: len(bits)] = bits
            assert row.tolist() == expected.astype(bool).tolist()
            assert store.place_of(masks[index]) == place
        assert len(store) <= max(most, max(map(len, steps)))


def test_a_mask_is_sent_once_and_those_met_longest_ago_go_first() -> None:
    store = DeviceMasks(CPU, 32, memory=4 * 3)
    masks = [mask_of([index], 1) for index in range(5)]
    for index in (0, 1, 0, 0, 2, 0, 3):
        store.places([masks[index]])
    assert store.sent == 4  # one each
    assert store.place_of(masks[1]) is None  # for 3 there was no room else
    assert store.place_of(masks[0]) is not None
    assert store.place_of(masks[4]) is None
    store.places([masks[4], masks[4]])
    assert store.sent == 5
    assert store.place_of(masks[2]) is None  # 0 was asked for since


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 150_000), st.integers(0, 9)), max_size=60),
    st.sampled_from([1, 2, 64]),
)
def test_transitions_are_what_was_noted_last_or_unknown(
    steps: list[tuple[int, int, int]], buckets: int
) -> None:
    known = Transitions(CPU, buckets)
    noted: dict[tuple[int, int], int] = {}
    for state, token, place in steps:
        known.note(("grammar", state), token, place)
        noted[state, token] = place
        pairs = list(noted)
        numbers = [known.number(("grammar", each)) for each, _ in pairs]
        found = known.follow(numbers, torch.tensor([token_id for _, token_id in pairs])).tolist()
        assert all(place in (noted[pair], UNKNOWN) for pair, place in zip(pairs, found, strict=True))
        assert found[pairs.index((state, token))] == place
        assert len(known) <= buckets * WAYS
        if len(noted) <= WAYS:
            assert UNKNOWN not in found  # there was room for all
    assert known.follow([0, 1], torch.tensor([7, 150_001])).tolist() == [UNKNOWN, UNKNOWN]


def test_states_that_were_forgotten_are_unknown_and_get_new_numbers() -> None:
    known = Transitions(CPU, 8, most_states=2)
    for state in "abc":
        known.note(state, 5, 1)
    assert known.number("a") == 0
    before = known.number("c")
    known.note("a", 5, 2)
    assert known.number("a") > before
    assert known.follow([known.number("a"), known.number("c")], torch.tensor([5, 5])).tolist() == [2, 1]
