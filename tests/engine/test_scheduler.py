"""Admission, prefill chunks, shared prefixes and slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine.kv_cache import GROWTH, SlotPool
from jfbatch.engine.scheduler import Planned, Scheduler, common_prefix
from jfbatch.engine.sequence import Request, Sequence
from tests.engine.matchers import FreeMatcher


def pool() -> SlotPool:
    made = SlotPool(torch.device("cpu"), torch.float32)
    made.resize(1, 1)
    made.layer(0, 1, 2, 2)
    return made


def scheduler(batch_size: int = 4, prefill_chunk: int = 10, kv_memory: int = 1 << 30) -> Scheduler:
    return Scheduler(pool(), batch_size, prefill_chunk, kv_memory)


def sequence(key: str, prompt: list[int], limit: int = 5) -> Sequence:
    return Sequence(Request(key, prompt, FreeMatcher(1000), limit), limit)


def run(planned: list[Planned]) -> None:
    """As if the step had been computed: nothing is chosen yet."""
    for part in planned:
        part.sequence.cached += len(part.segment.token_ids)


def keys(sequences: list[Sequence]) -> list[str]:
    return [item.request.key for item in sequences]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(left, right) == expected


def test_rows_are_admitted_in_order_of_their_token_ids_whatever_their_arrival() -> None:
    used = scheduler(batch_size=2)
    used.add([sequence("c", [3]), sequence("a", [1])])
    used.add([sequence("b", [2, 9])])
    used.admit()
    assert keys(used.running) == ["a", "b"]
    assert keys(used.waiting) == ["c"]


def test_prefill_is_cut_into_chunks_and_decoding_rows_are_never_held_up() -> None:
    used = scheduler(prefill_chunk=10)
    decoding = sequence("a", [1, 2, 3])
    decoding.cached, decoding.sampled_tokens = 3, 1
    decoding.append(7, b"x")
    used.add([decoding, sequence("b", [5] * 14), sequence("c", [6] * 9)])
    used.admit()
    first = used.plan()
    assert [(p.sequence.request.key, len(p.segment.token_ids), len(p.segment.logits)) for p in first] == [
        ("a", 1, 1),
        ("b", 10, 0),
    ]
    run(first)
    second = used.plan()
    assert [(p.sequence.request.key, len(p.segment.token_ids), len(p.segment.logits)) for p in second] == [
        ("a", 1, 1),  # nothing was chosen for it: its last token is computed again
        ("b", 4, 1),
        ("c", 6, 0),
    ]


def test_drafts_get_logits_of_their_own() -> None:
    used = scheduler()
    row = sequence("a", [1, 2, 3])
    row.set_drafts([8, 9])
    used.add([row])
    used.admit()
    (planned,) = used.plan()
    assert list(planned.segment.token_ids) == [1, 2, 3, 8, 9]
    assert planned.segment.logits == [2, 3, 4]


def test_a_prefix_that_a_running_row_will_have_is_copied_not_computed() -> None:
    used = scheduler(prefill_chunk=25)
    shared = list(range(20))
    used.add([sequence(key, [*shared, 100 + i, 7]) for i, key in enumerate("abc")])
    used.admit()
    first = used.plan()
    assert keys([p.sequence for p in first]) == ["a"]
    run(first)
    slot = used.running[0].slot
    used.pool.layer(0, 1, 2, 2)[0][slot].fill_(5)
    second = used.plan()
    assert {p.sequence.request.key: p.segment.start for p in second if p.sequence.request.key != "a"} == {
        "b": 20,
        "c": 20,
    }
    for other in used.running[1:]:
        assert bool((used.pool.layer(0, 1, 2, 2)[0][other.slot, :, :20] == 5).all())
    assert used.shared_tokens == 40


def test_followers_compute_for_themselves_when_their_leader_is_gone() -> None:
    used = scheduler(prefill_chunk=8)
    shared = list(range(20))
    used.add([sequence("a", [*shared, 1]), sequence("b", [*shared, 2])])
    used.admit()
    run(used.plan())
    used.retire([used.running[0]])
    (planned,) = used.plan()
    assert (planned.sequence.request.key, planned.segment.start) == ("b", 0)


def test_a_retired_row_leaves_its_prefix_to_the_next() -> None:
    used = scheduler(batch_size=1, prefill_chunk=50)
    shared = list(range(20))
    used.add([sequence("a", [*shared, 1]), sequence("b", [*shared, 2])])
    used.admit()
    run(used.plan())
    used.retire(used.running)
    used.admit()
    (planned,) = used.plan()
    assert (planned.sequence.request.key, planned.segment.start) == ("b", 20)


def test_kv_budget_counts_every_row_at_its_longest() -> None:
    one = pool()
    used = Scheduler(one, 8, 10, kv_memory=3 * 64 * one.bytes_per_token)
    used.add([sequence(str(i), [i] * 30, limit=30) for i in range(5)])
    used.admit()
    assert len(used.running) == 3
    used.retire(used.running[:1])
    used.admit()
    assert len(used.running) == 3


def test_gaps_are_closed_once_nothing_waits() -> None:
    used = scheduler(batch_size=4)
    used.add([sequence(str(i), [i, i]) for i in range(4)])
    used.admit()
    run(used.plan())
    keep = used.running[3]
    storage = used.pool.layer(0, 1, 2, 2)[0]
    storage[keep.slot, :, :2] = 9
    used.retire(used.running[:3])
    assert keep.slot == 0
    assert bool((storage[0, :, :2] == 9).all())


def test_a_pool_whose_length_costs_no_time_grows_in_larger_steps_and_stays() -> None:
    lengths = []
    for for_kernel in (False, True):
        made = SlotPool(torch.device("cpu"), torch.float32, for_kernel)
        made.resize(1, 1)
        made.layer(0, 1, 2, 2)
        used = Scheduler(made, 4, 10_000, 1 << 30)
        row = sequence("a", [1] * 1000, limit=200)
        used.add([row])
        used.admit()
        seen = []
        while row.tokens_left:
            run(used.plan())
            row.append(5, b"a")
            seen.append(made.length)
        assert seen == sorted(seen)
        assert seen[-1] == 1216  # what the row can need, and no more
        lengths.append(len(set(seen)))
    assert lengths[1] == 1 < lengths[0]


def test_the_pool_gives_length_back_when_long_rows_are_gone() -> None:
    used = scheduler(prefill_chunk=1000)
    used.add([sequence("long", [1] * 400), sequence("short", [2] * 10)])
    used.admit()
    run(used.plan())
    assert used.pool.length >= 400
    used.retire([used.running[0]])
    used.plan()
    assert used.pool.length == 32


def test_slots_of_many_short_rows_do_not_hold_memory_that_few_long_ones_need() -> None:
    one = pool()
    budget = 8 * 32 * one.bytes_per_token
    used = Scheduler(one, 8, 1000, kv_memory=budget)
    used.add([sequence(str(i), [i, i]) for i in range(8)])
    used.add([sequence(f"long {i}", [50 + i] * 60, limit=4) for i in range(6)])
    used.admit()
    assert len(used.running) == 8
    while used.running:
        used.plan()
        assert one.slots * one.length * one.bytes_per_token <= budget
        used.retire(used.running[::2])
        used.admit()
    assert not used.waiting


def test_a_prefix_in_a_slot_that_a_long_row_cannot_leave_is_computed_again() -> None:
    used = scheduler(batch_size=8, prefill_chunk=1000, kv_memory=8 * 32 * pool().bytes_per_token)
    used.add([sequence(str(i), [i] * 20) for i in range(8)])
    used.admit()
    run(used.plan())
    used.retire(list(used.running))
    used.add([sequence("long", [7] * 20 + [8] * 200)])
    used.admit()
    (planned,) = used.plan()
    assert (used.pool.slots, planned.segment.start) == (1, 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(0, 2), st.integers(2, 60)), min_size=1, max_size=16),
    st.integers(6, 30),
    st.booleans(),
)
def test_the_pool_stays_within_its_budget_whatever_comes(
    rows: list[tuple[int, int, int]], blocks: int, for_kernel: bool
) -> None:
    made = SlotPool(torch.device("cpu"), torch.float32, for_kernel)
    made.resize(1, 1)
    made.layer(0, 1, 2, 2)
    budget = blocks * GROWTH * made.bytes_per_token
    used = Scheduler(made, 6, 50, budget)
    used.add([sequence(str(key), [kind] * length, limit) for key, (length, kind, limit) in enumerate(rows)])
    for _ in range(2000):
        used.admit()
        if not used.running:
            break
        run(used.plan())
        assert made.slots * made.length * made.bytes_per_token <= budget
        for row in list(used.running):
            if row.pending == 0 and row.tokens_left:
                row.append(3, b"x")
        used.retire([row for row in used.running if not row.tokens_left])
    assert not used.waiting and not used.running


def test_a_row_whose_place_cannot_be_had_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    used = scheduler(batch_size=4, prefill_chunk=100)
    used.add([sequence("a", list(range(40)))])
    used.admit()
    run(used.plan())
    used.retire(used.running)
    used.add([sequence("b", [*range(40), 7])])

    def full(*_sizes: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(used, "_reserve", full)
    with pytest.raises(torch.OutOfMemoryError):
        used.admit()
    assert keys(used.waiting) == ["b"] and not used.running


def test_undecided_rows_sit_out_and_late_ones_go_on_with_one_token() -> None:
    used = scheduler()
    late, out, other, fresh = (sequence(key, [number] * 3) for number, key in enumerate("abcd"))
    used.add([late, out, other])
    used.admit()
    run(used.plan())
    other.append(7, b"x")
    used.add([fresh])
    used.admit()
    planned = used.plan(undecided={late, out}, late={late: 0})
    assert [(part.sequence.request.key, part.segment.start) for part in planned] == [
        ("a", 3),
        ("c", 3),
        ("d", 0),
    ]
    assert list(planned[0].segment.token_ids) == [0] and list(planned[0].segment.logits) == [0]
    assert list(planned[1].segment.token_ids) == [7]


def test_the_pool_has_room_for_late_tokens() -> None:
    used = scheduler()
    rows = [sequence(str(number), [number] * 32, limit=40) for number in range(2)]
    used.add(rows)
    used.admit()
    run(used.plan())
    assert used.pool.length == 32
    used.plan(undecided=set(rows), late={rows[1]: 0})
    assert used.pool.length == 64


def test_nothing_is_copied_from_a_row_before_its_first_choice() -> None:
    used = scheduler(prefill_chunk=100)
    leader, follower = sequence("a", [1] * 30 + [2]), sequence("b", [1] * 30 + [3])
    used.add([leader, follower])
    used.admit()
    run(used.plan())
    assert used.plan(undecided={leader}, late={leader: 0})[1:] == []
    leader.append(7, b"x")
    leader.sampled_tokens = 1
    assert [part.sequence.request.key for part in used.plan({leader}, {leader: 0})] == ["a", "b"]
    assert used.shared_tokens == 30


def test_gaps_are_left_while_no_row_may_move_and_closed_later() -> None:
    used = scheduler(batch_size=4)
    rows = [sequence(str(number), [number] * 4) for number in range(4)]
    used.add(rows)
    used.admit()
    run(used.plan())
    used.retire(rows[:2], moving=False)
    assert [row.slot for row in rows[2:]] == [2, 3]
    assert used.is_sparse
    used.retire([])
    assert [row.slot for row in rows[2:]] == [1, 0]
    assert not used.is_sparse


def test_a_row_that_needs_others_moved_is_not_admitted_while_none_may() -> None:
    used = scheduler(batch_size=3)
    rows = [sequence(str(number), [number] * 20, limit=10) for number in range(3)]
    used.add(rows)
    used.admit()
    run(used.plan())
    used.kv_memory = used.kv_bytes(2, 64)
    used.add([sequence("long", [9] * 50, limit=10)])
    used.retire(rows[:2], moving=False)
    used.admit(moving=False)
    assert [row.slot for row in used.running] == [2]
    used.admit()
    assert sorted(row.slot for row in used.running) == [0, 1]


def steady(batch_size: int = 16, kv_memory: int = 1 << 30) -> Scheduler:
    return Scheduler(pool(), batch_size, None, kv_memory, steady=True)


def test_where_steps_are_replayed_the_pool_is_at_once_as_large_as_the_rows_may_need() -> None:
    used = steady()
    used.add([sequence(str(i), [i] * 30, limit=100) for i in range(20)])
    used.admit()
    run(used.plan())
    assert (used.pool.slots, used.pool.length) == (16, 192)  # 130 tokens at most
    moved = used.pool.generation
    for _ in range(100):
        for row in used.running:
            row.append(7, b"x")
        run(used.plan())
    while used.running:
        used.retire(used.running[:3])
        used.admit()
        if used.running:
            run(used.plan())
    assert used.pool.generation == moved
    used.add([sequence("long", [9] * 150, limit=80)])
    used.admit()
    run(used.plan())
    assert (used.pool.slots, used.pool.length) == (16, 256)


def test_a_steady_pool_that_fills_its_budget_does_not_move_for_shorter_rows() -> None:
    budget = 5 * 160 * pool().bytes_per_token
    used = steady(16, budget)
    used.add([sequence(str(i), [i] * (100 - i), limit=50) for i in range(12)])
    used.admit()
    run(used.plan())
    assert (used.pool.slots, used.pool.length) == (5, 160)
    moved = used.pool.generation
    while used.running:
        used.retire(used.running[:1])
        used.admit()
        if used.running:
            run(used.plan())
    assert used.pool.generation == moved and not used.waiting


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 120)), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(7, 40),
)
def test_a_steady_pool_holds_its_rows_within_the_budget(
    rows: list[tuple[int, int]], batch_size: int, blocks: int
) -> None:
    budget = blocks * 32 * pool().bytes_per_token
    used = steady(batch_size, budget)
    used.add([sequence(str(i), [i] * prompt, limit) for i, (prompt, limit) in enumerate(rows)])
    turns = 0
    while used.running or used.waiting:
        used.admit()
        run(used.plan())
        assert used.kv_bytes(used.pool.slots, used.pool.length) <= budget
        assert used.pool.slots > max(row.slot for row in used.running)
        assert used.pool.length >= max(row.longest for row in used.running)
        used.retire(used.running[turns % 2 :: 2] if len(used.running) > 1 else used.running)
        turns += 1
    assert turns <= 2 * len(rows)


def test_where_steps_are_replayed_rows_are_admitted_several_at_a_time() -> None:
    used = steady(16)
    used.add([sequence(str(i), [i] * 4) for i in range(30)])
    used.admit()
    admitted = [len(used.running)]
    while used.running:
        run(used.plan())
        used.retire(used.running[:1])
        before = len(used.running)
        used.admit()
        admitted.append(len(used.running) - before)
    assert admitted[:5] == [16, 0, 2, 0, 2]
    assert sum(admitted) == 30


def test_rows_that_come_late_are_not_kept_waiting_where_places_are_free() -> None:
    used = steady(16)
    for count in range(1, 6):
        used.add([sequence(str(count), [count] * 4)])
        used.admit()
        assert len(used.running) == count
    used.add([sequence(f"more {i}", [i] * 4) for i in range(20)])
    used.admit()
    assert (len(used.running), len(used.waiting)) == (16, 9)
    used.retire(used.running[:1])
    used.waiting = used.waiting[:1]
    used.admit()
    assert (len(used.running), len(used.waiting)) == (16, 0)  # no more than these will come
