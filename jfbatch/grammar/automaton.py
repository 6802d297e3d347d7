"""A program run lazily: states are interned sets of threads, transition rows filled on first visit.

A regular pattern becomes a plain deterministic automaton piece by piece; a recursive one never
stops having new states. No complete determinisation, so compiling costs about nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar import continuations, hashing, machine, opcodes
from jfbatch.grammar.opcodes import Store
from jfbatch.grammar.program import Program

MAX_THREADS_PER_STATE = 100_000
DEFAULT_BUDGET = 512 * 1024 * 1024  # bytes of states, threads and stacks of one automaton
FORCED_LIMIT = 4096  # bytes of forced text looked for at once


class Automaton:
    """States of one program. Calls are serialised by a lock; the kernels below it release the GIL."""

    def __init__(self, program: Program, budget: int = DEFAULT_BUDGET) -> None:
        self.program = program
        self.code = program.code
        self.classes = len(program.code.class_byte)
        self.translation = program.code.class_of_byte.tobytes()  # for bytes.translate
        self.budget = budget
        self.lock = RLock()
        self.store = _new_store(self.classes)
        self.start = self.retry(machine.start_state, program.start)

    @staticmethod
    def restored(program: Program, arrays: dict[str, NDArray[Any]], start: int) -> Automaton:
        """An automaton with the states of `arrays` (fields of Store, checked by the caller)."""
        automaton = Automaton(program)
        store = automaton.store
        sizes = {"threads": opcodes.THREADS, "parent": opcodes.STACKS, "rows": opcodes.STATES}
        for name, array in arrays.items():
            if name in Store._fields:
                room = np.zeros((max(64, 2 * len(array)), *array.shape[1:]), array.dtype)
                room[: len(array)] = array
                store = store._replace(**{name: room})
                if name in sizes:
                    store.meta[sizes[name]] = len(array)
        states, stacks = int(store.meta[opcodes.STATES]), int(store.meta[opcodes.STACKS])
        store = store._replace(
            state_table=_power_of_two_table(states), stack_table=_power_of_two_table(stacks)
        )
        hashing.fill_state_table(store.state_table, store.state_hash, states)
        hashing.fill_stack_table(store.stack_table, store.parent, store.value, stacks)
        automaton.store = store
        automaton.start = start
        return automaton

    @property
    def state_count(self) -> int:
        """States made so far."""
        return int(self.store.meta[opcodes.STATES])

    def advance(self, state: int, data: bytes) -> int:
        """The state after `data`, or -1 if the bytes cannot follow."""
        start = state
        rows = self.store.rows
        for byte_class in data.translate(self.translation):
            target = rows[state, byte_class]
            if target < 0:
                break
            state = target
        else:
            return int(state)
        if target == opcodes.DEAD:
            return opcodes.DEAD
        return self.advance_afresh(start, data)

    def advance_afresh(self, state: int, data: bytes) -> int:
        """`advance` where rows on the way may still have to be filled."""
        array = np.frombuffer(data, np.uint8)
        with self.lock:
            while True:
                target = machine.advance(self.code, self.store, state, array)
                if target >= opcodes.DEAD:
                    return int(target)
                self.grow(-target - 1)

    def is_accepting(self, state: int) -> bool:
        return bool(self.store.accepting[state])

    def is_last(self, state: int) -> bool:
        """Whether no byte may follow."""
        return bool(self.retry(continuations.is_last, state))

    def forced(self, state: int) -> bytes:
        """The bytes every text continues with (at most FORCED_LIMIT of them)."""
        out = np.empty(FORCED_LIMIT, np.uint8)
        length = self.retry(continuations.forced, state, out)
        return out[:length].tobytes()

    def ending_length(self, state: int) -> int:
        """Bytes in a shortest completing text."""
        return self.retry(continuations.ending_length, state)

    def shortest_ending(self, state: int) -> bytes:
        """A shortest text that completes the output from `state`."""
        room = self.ending_length(state) + 2
        frames = 256
        while True:
            out = np.empty(room, np.uint8)
            with self.lock:
                length = continuations.shortest_ending(
                    self.code, self.store, state, out, np.empty(frames, np.int64)
                )
            if length >= 0:
                return out[:length].tobytes()
            frames *= 4
            if frames > 1 << 22:
                raise GrammarTooLarge("the shortest ending nests too deep")

    def explore(self, limit: int) -> bool:
        """Visit states breadth-first until all are filled (True) or `limit` are (False).

        A later call with a higher limit goes on where this one stopped.
        """
        return self.retry(machine.explore, limit) >= self.state_count

    def retry(self, kernel: Callable[..., int], *arguments: Any) -> int:
        """kernel(code, store, ...) under the lock; made again with more room while it answers -GROW_*."""
        with self.lock:
            while True:
                answer = int(kernel(self.code, self.store, *arguments))
                if answer >= 0:
                    return answer
                self.grow(-answer)

    def grow(self, what: int) -> None:
        """Enlarge what a kernel ran out of; GrammarTooLarge past the budget."""
        if what == opcodes.TOO_LARGE:
            raise GrammarTooLarge(
                f"more than {MAX_THREADS_PER_STATE:,} ways to read one text: the pattern is too ambiguous"
            )
        store = self.store
        if what == opcodes.GROW_STATES:
            store = store._replace(
                rows=_doubled(store.rows),
                thread_first=_doubled(store.thread_first),
                thread_count=_doubled(store.thread_count),
                accepting=_doubled(store.accepting),
                free_count=_doubled(store.free_count),
                state_hash=_doubled(store.state_hash),
                state_table=_rehash_states(store),
            )
        elif what == opcodes.GROW_THREADS:
            store = store._replace(threads=_doubled(store.threads))
        elif what == opcodes.GROW_STACKS:
            parent, value = _doubled(store.parent), _doubled(store.value)
            store = store._replace(parent=parent, value=value)
            store = store._replace(stack_table=_rehash_stacks(store))
        elif what == opcodes.GROW_SCRATCH:
            size = 2 * len(store.seen_key)
            store = store._replace(
                seen_key=np.zeros(size, np.int64),
                seen_epoch=np.zeros(size, np.int64),
                work=np.empty(size, np.int64),
                closed=np.empty(size, np.int64),
            )
        if sum(array.nbytes for array in store) > self.budget:
            raise GrammarTooLarge(f"the automaton passed its memory limit of {self.budget >> 20} MB")
        self.store = store


def _new_store(classes: int) -> Store:
    states, threads, stacks, scratch = 64, 256, 64, 256
    store = Store(
        rows=np.full((states, classes), opcodes.UNKNOWN, np.int32),
        thread_first=np.zeros(states, np.int32),
        thread_count=np.zeros(states, np.int32),
        accepting=np.zeros(states, np.uint8),
        free_count=np.zeros(states, np.int32),
        state_hash=np.zeros(states, np.uint64),
        state_table=np.zeros(4 * states, np.int32),
        threads=np.zeros(threads, np.int64),
        parent=np.zeros(stacks, np.int32),
        value=np.zeros(stacks, np.int32),
        stack_table=np.zeros(4 * stacks, np.int32),
        seen_key=np.zeros(scratch, np.int64),
        seen_epoch=np.zeros(scratch, np.int64),
        work=np.empty(scratch, np.int64),
        closed=np.empty(scratch, np.int64),
        meta=np.zeros(8, np.int64),
    )
    store.meta[opcodes.STACKS] = 1  # stack 0 is the empty one, in no table
    store.meta[opcodes.MAX_THREADS] = MAX_THREADS_PER_STATE
    return store


def _power_of_two_table(entries: int) -> NDArray[np.int32]:
    return np.zeros(max(256, 1 << (4 * entries - 1).bit_length()), np.int32)


def _doubled(array: NDArray) -> NDArray:  # type: ignore[type-arg]
    grown = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def _rehash_states(store: Store) -> NDArray[np.int32]:
    table = np.zeros(2 * len(store.state_table), np.int32)
    hashing.fill_state_table(table, store.state_hash, store.meta[opcodes.STATES])
    return table


def _rehash_stacks(store: Store) -> NDArray[np.int32]:
    table = np.zeros(2 * len(store.stack_table), np.int32)
    hashing.fill_stack_table(table, store.parent, store.value, store.meta[opcodes.STACKS])
    return table
