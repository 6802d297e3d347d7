"""Who runs next: which rows hold a place in the KV pool, and which of their tokens a step computes.

All prompts of the look-ahead are sorted by token ids, so rows that share a prefix are admitted side
by side; the first one computes the prefix and the others copy its K and V. A row is admitted only
if everything that runs fits the KV budget at its longest, so nothing is ever preempted.

Where decode steps are replayed as graphs ("steady"), a step that prefills is not, and none outlives a move
of the pool: then rows are admitted several at a time, and the pool is at once as large as they may need.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jfbatch.engine.attention import DENSE_SHARE
from jfbatch.engine.kv_cache import GROWTH, SlotPool, rounded_length, rung
from jfbatch.engine.runner import Segment
from jfbatch.engine.sequence import Sequence

# Shorter shared prefixes are computed again: waiting for the row that computes them costs more.
SHORTEST_SHARED = 16
# The pool gives length back once this much of it is unused.
SHRINK_AT = 4 * GROWTH
# Prompt tokens of a step at most: enough to use the machine well, and few enough to hold.
PREFILL_CHUNK = 2048
# Where steps are replayed: the shortest pool, and the share of the places that are free before rows come in.
SHORTEST_STEADY = 128
ADMITTED_TOGETHER = 1 / 8


@dataclass(frozen=True)
class Planned:
    """A row's part of the step about to run. `decides`: whether its next token is chosen after it."""

    sequence: Sequence
    segment: Segment

    @property
    def decides(self) -> bool:
        return bool(self.segment.logits)


class Scheduler:
    """Holds the rows that wait and the rows that run.

    batch_size: most rows that run together. prefill_chunk: most prompt tokens per step, by default
    PREFILL_CHUNK. kv_memory: most bytes of KV storage. steady: whether steps are replayed.
    """

    def __init__(
        self,
        pool: SlotPool,
        batch_size: int,
        prefill_chunk: int | None,
        kv_memory: int,
        steady: bool = False,
    ) -> None:
        self.pool = pool
        self.batch_size = batch_size
        self.prefill_chunk = prefill_chunk or PREFILL_CHUNK
        self.kv_memory = kv_memory
        self.steady = steady
        self._full: int | None = None  # how many ran when others had to wait, as they still do
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.shared_tokens = 0  # prompt tokens copied instead of computed
        self._resident: dict[int, list[int]] = {}  # what retired rows left in their slots
        self._left_gaps = False  # perhaps, where rows retired while none might be moved

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Put rows among those that wait, in order of their token ids."""
        for sequence in sequences:
            insort(self.waiting, sequence, key=lambda waiting: waiting.token_ids)

    def kv_bytes(self, rows: int, length: int) -> int:
        """Bytes of a pool for `rows` rows of up to `length` tokens."""
        return rows * rounded_length(length) * self.pool.bytes_per_token

    def admit(self, moving: bool = True) -> None:
        """Give free places to waiting rows, as far as batch size and KV budget allow.

        moving: whether running rows may change their slots for it. Not while a choice of theirs is open: if
        it turns out that a model gave what is not a number, all of it must be in the row's one slot.
        """
        if self.steady and not self._are_enough():
            return
        longest = max((sequence.longest for sequence in self.running), default=0)
        while self.waiting and len(self.running) < self.batch_size:
            longest = max(longest, self.waiting[0].longest)
            if self.running and not self._has_room(longest, moving):
                break
            self._place(self.waiting[0])
            del self.waiting[0]  # now, as placing it may run out of memory
        self._full = len(self.running) if self.waiting else None

    def _are_enough(self) -> bool:
        """Whether so many places are free, or so few rows wait for one, that a step that prefills pays."""
        if self._full is None or not self.running:
            return True
        free = self._full - len(self.running)
        return free >= min(max(int(self._full * ADMITTED_TOGETHER), 1), len(self.waiting))

    def _has_room(self, longest: int, moving: bool) -> bool:
        """Whether one more row fits the budget, all being `longest`; makes room between the slots in use."""
        rows = len(self.running) + 1
        if self.kv_bytes(rows, longest) > self.kv_memory:
            return False
        slots = max(sequence.slot for sequence in self.running) + 1
        if slots > len(self.running) and self.kv_bytes(max(slots, rows), longest) > self.kv_memory:
            if not moving:
                return False
            self._close_gaps()
        return True

    def _place(self, sequence: Sequence) -> None:
        """Take the lowest free slot and reuse the longest prefix any slot has or will have."""
        taken = {other.slot for other in self.running}
        sequence.slot = next(slot for slot in range(self.batch_size) if slot not in taken)
        most = sequence.certain - 1  # one token at least is computed, for its logits
        leader, shared = None, SHORTEST_SHARED - 1
        for other in self.running:
            common = min(common_prefix(sequence.token_ids, other.token_ids), other.certain, most)
            if common > shared:
                leader, shared = other, common
        source, left = None, shared
        for slot, ids in self._resident.items():
            common = min(common_prefix(sequence.token_ids, ids), most)
            if common > left and slot < self.pool.slots:
                source, left = slot, common
        if source is not None:
            self._reserve([sequence])
            if source >= self.pool.slots:  # a long row needed what it held
                source = None
        if source is not None:
            if source != sequence.slot:
                self.pool.copy(source, sequence.slot, left)
            sequence.cached = left
            self.shared_tokens += left
        elif leader is not None:
            sequence.leader, sequence.shared = leader, shared
        self._resident.pop(sequence.slot, None)
        self.running.append(sequence)

    def plan(self, undecided: Collection[Sequence] = (), late: Collection[Sequence] = ()) -> list[Planned]:
        """The tokens of the next step: decoding rows entirely, then prefills up to the chunk.

        undecided: rows whose next tokens are being chosen; they sit out, but for the `late` ones among
        them, which go on with the one token that the device is choosing (here its id is 0).
        """
        self._reserve(self.running, late)
        planned = []
        budget = self.prefill_chunk
        for sequence in self.running:
            if sequence in late:
                planned.append(Planned(sequence, _late_segment(sequence)))
                continue
            leader = sequence.leader
            if sequence in undecided or (leader in undecided and leader and not leader.sampled_tokens):
                continue  # nothing is copied before it is known that the model gave numbers
            if not self._copy_shared(sequence):
                continue
            count, budget = self._fitting(sequence, budget)
            if count:
                planned.append(Planned(sequence, _segment(sequence, count)))
        return planned

    def _fitting(self, sequence: Sequence, budget: int) -> tuple[int, int]:
        """How many of a row's tokens the next step computes, and the prefill budget that is left."""
        sequence.cached = min(sequence.cached, sequence.certain - 1)
        if sequence.sampled_tokens:
            return sequence.pending, budget
        needed = sequence.certain - sequence.cached
        if needed > budget:
            return budget, 0
        return sequence.pending, budget - needed

    def _copy_shared(self, sequence: Sequence) -> bool:
        """Copy the prefix that the row's leader computes; False while it is not there yet."""
        leader = sequence.leader
        if leader is None:
            return True
        if leader.slot < 0:  # retired; its K and V may be overwritten
            sequence.leader = None
            return True
        if leader.cached < sequence.shared:
            return False
        held = leader.token_ids[: sequence.shared]
        sequence.shared = common_prefix(held, sequence.token_ids)  # its output may have been retokenised
        self.pool.copy(leader.slot, sequence.slot, sequence.shared)
        sequence.cached = sequence.shared
        self.shared_tokens += sequence.shared
        sequence.leader = None
        return True

    def _reserve(self, rows: list[Sequence], late: Collection[Sequence] = ()) -> None:
        """Let the pool hold every token of the running rows and of `rows`; give back what is far too long."""
        everyone = list({id(sequence): sequence for sequence in (*self.running, *rows)}.values())
        slots, length = self._steady_size(everyone) if self.steady else self._present_size(everyone, late)
        if (slots, length) != (self.pool.slots, self.pool.length):
            self._resident = {
                slot: ids[:length] for slot, ids in self._resident.items() if slot < self.pool.slots
            }
            self.pool.resize(slots, length)

    def _present_size(self, everyone: list[Sequence], late: Collection[Sequence]) -> tuple[int, int]:
        """Slots and length that hold these rows as they are."""
        length = max(len(sequence.token_ids) for sequence in everyone)
        length = rounded_length(max(length, *(sequence.certain + 1 for sequence in late), 0))
        needed = max(sequence.slot for sequence in everyone) + 1
        slots = max(self.pool.slots, needed)
        unused = self.pool.length if self.pool.for_kernel else 0  # its kernel reads no more than it needs
        if (
            self.pool.length - SHRINK_AT - unused // 2 < length < self.pool.length
            and self.kv_bytes(slots, self.pool.length) <= self.kv_memory
        ):
            length = self.pool.length
        if self.kv_bytes(slots, length) > self.kv_memory:
            slots = needed  # what few long rows need is not held by slots of many short ones
        if slots > self.pool.slots:  # room for those that wait too, so that the pool is moved once
            expected = min(self.batch_size, len(everyone) + len(self.waiting))
            if self.kv_bytes(max(slots, expected), length) <= self.kv_memory:
                slots = max(slots, expected)
        if self.pool.for_kernel and length > self.pool.length:
            longest = rounded_length(max(sequence.longest for sequence in everyone))
            roomy = min(max(length, longest), 2 * length)
            if self.kv_bytes(slots, roomy) <= self.kv_memory:
                length = roomy
        return slots, length

    def _steady_size(self, everyone: list[Sequence]) -> tuple[int, int]:
        """Slots and length that hold these rows at their longest, those that come as well, and some more."""
        needed = max(sequence.slot for sequence in everyone) + 1
        longest = rounded_length(max(sequence.longest for sequence in everyone))
        if self.pool.slots >= needed and self.pool.length >= longest:
            return self.pool.slots, self.pool.length
        roomy = max(rung(longest, SHORTEST_STEADY), self.pool.length)
        wide = max(min(rung(len(everyone) + len(self.waiting)), self.batch_size), needed, self.pool.slots)
        kept = max(needed, self.pool.slots)
        sizes = ((wide, roomy), (kept, roomy), (wide, longest), (kept, longest), (needed, longest))
        return next((size for size in sizes if self.kv_bytes(*size) <= self.kv_memory), sizes[-1])

    @property
    def is_sparse(self) -> bool:
        """Whether the running rows, once nothing waits, leave many slots between them unused."""
        if self.waiting or not self.running:
            return False
        return len(self.running) < DENSE_SHARE * (max(sequence.slot for sequence in self.running) + 1)

    def retire(self, sequences: Iterable[Sequence], moving: bool = True) -> None:
        """Free the places of finished rows; once nothing waits, close the gaps they leave, if those cost.

        moving: as in `admit`. Without it the gaps stay for a next time.
        """
        finished = {id(sequence): sequence for sequence in sequences if sequence.slot >= 0}
        if finished:
            self.running = [sequence for sequence in self.running if id(sequence) not in finished]
            for sequence in finished.values():
                self._resident[sequence.slot] = sequence.token_ids[: sequence.cached]
                sequence.slot = -1
            self._left_gaps |= not moving
        dense = not self.pool.for_kernel  # the CPU's kernel reads no slot that it is not told to
        if dense and moving and (finished or self._left_gaps) and not self.waiting:
            self._close_gaps()

    def _close_gaps(self) -> None:
        """Move rows down so that the slots in use are 0..n-1: a step attends over all slots below."""
        self._left_gaps = False
        taken = {sequence.slot for sequence in self.running}
        gaps = [slot for slot in range(len(self.running)) if slot not in taken]
        for sequence in self.running:
            if sequence.slot >= len(self.running):
                target = gaps.pop()
                self.pool.copy(sequence.slot, target, sequence.cached)
                sequence.computed = ()  # what was computed beyond stays behind
                self._resident.pop(target, None)
                sequence.slot = target

    def evict_all(self) -> list[Sequence]:
        """Take every running row out, free the KV storage and return the rows, to be started again."""
        evicted, self.running = self.running, []
        self._resident.clear()
        self.pool.clear()
        return evicted


def _segment(sequence: Sequence, count: int) -> Segment:
    stop = sequence.cached + count
    first = sequence.cached
    logits = []
    if stop == len(sequence.token_ids):
        choices = range(sequence.certain + 1, stop + 1)
        logits = [index - 1 - first for index in choices if index not in sequence.given]
        logits.insert(0, sequence.certain - 1 - first)
    ids = sequence.token_ids[first:stop]
    return Segment(sequence.slot, first, ids, logits, sequence.prompt_tokens)


def _late_segment(sequence: Sequence) -> Segment:
    return Segment(sequence.slot, sequence.certain, [0], [0], sequence.prompt_tokens)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the common prefix, by halving with slice comparisons."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
