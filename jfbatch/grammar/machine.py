"""The machine under an automaton: threads, their closure, interned states, transition rows.

Everything here is numba over plain arrays, releases the GIL and never grows an array: a function
that runs out of room says which array (GROW_*), the caller enlarges it and calls again. All
functions may be interrupted so and repeated, because what they add is hash-consed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.hashing import mix, stack_slot
from jfbatch.grammar.opcodes import (
    BYTE,
    CALL,
    CLOSED,
    COUNTED,
    DEAD,
    ENTER,
    EPOCH,
    EXPLORED,
    GROW_SCRATCH,
    GROW_STACKS,
    GROW_STATES,
    GROW_THREADS,
    INCREMENT,
    JUMP,
    LEAF,
    LOOP,
    MATCH,
    MAX_THREADS,
    OK,
    PUSH,
    RETURN,
    SPLIT,
    STACKS,
    STATES,
    THREADS,
    TOO_LARGE,
    UNBOUNDED,
    UNKNOWN,
    Store,
    jit,
)

if TYPE_CHECKING:
    from jfbatch.grammar.listing import Code


@jit
def push_frame(
    parents: NDArray[np.int32],
    values: NDArray[np.int32],
    table: NDArray[np.int32],
    meta: NDArray[np.int64],
    parent: int,
    value: int,
) -> int:
    """The stack `value` on top of `parent`, hash-consed; -1 if there is no room.

    Takes the arrays of the Store that it needs, not the Store: passing that costs more than the work.
    """
    mask = len(table) - 1
    slot = stack_slot(parent, value, mask)
    while True:
        found = table[slot] - 1
        if found < 0:
            break
        if parents[found] == parent and values[found] == value:
            return found
        slot = (slot + 1) & mask
    stack = meta[STACKS]
    if stack >= len(parents) or 2 * stack >= len(table):
        return -1
    parents[stack] = parent
    values[stack] = value
    table[slot] = stack + 1
    meta[STACKS] = stack + 1
    return stack


@jit
def _later(
    seen_key: NDArray[np.int64],
    seen_epoch: NDArray[np.int64],
    work: NDArray[np.int64],
    epoch: int,
    top: int,
    thread: np.int64,
) -> int:
    """Put a thread on the closure's to-do list unless it has been there; the new top, or -1."""
    mask = len(seen_key) - 1
    slot = np.int64(mix(np.uint64(thread)) & np.uint64(mask))
    probes = 0
    while seen_epoch[slot] == epoch:
        if seen_key[slot] == thread:
            return top
        slot = (slot + 1) & mask
        probes += 1
        if probes > 64:
            return -1
    if top >= len(work):
        return -1
    seen_key[slot] = thread
    seen_epoch[slot] = epoch
    work[top] = thread
    return top + 1


@jit
def add_closure(code: Code, store: Store, instruction: int, stack: int) -> int:
    """Add to Store.closed every consuming or matching thread reachable without a byte."""
    seen_key, seen_epoch, work = store.seen_key, store.seen_epoch, store.work
    parent, value, stack_table, meta = store.parent, store.value, store.stack_table, store.meta
    closed_threads = store.closed
    epoch = meta[EPOCH]
    top = _later(seen_key, seen_epoch, work, epoch, 0, (np.int64(instruction) << 32) | np.int64(stack))
    if top < 0:
        return GROW_SCRATCH
    while top > 0:
        top -= 1
        thread = work[top]
        at = np.int64(thread >> 32)
        stack = np.int64(thread & 0xFFFFFFFF)
        op = code.op[at]
        go = np.int64(-1)
        if op in (BYTE, MATCH, LEAF, COUNTED):
            closed = meta[CLOSED]
            if closed >= meta[MAX_THREADS]:
                return TOO_LARGE
            if closed >= len(closed_threads):
                return GROW_SCRATCH
            closed_threads[closed] = thread
            meta[CLOSED] = closed + 1
            if op == COUNTED:
                leaf = code.counted[code.high[at]]
                if code.z[at] & 1 == 0 or not leaf[2] <= value[stack] <= leaf[3]:
                    continue
                stack = np.int64(parent[stack])
            elif op != LEAF or code.z[at] == 0:
                continue
            go = np.int64(code.y[at])
        elif op == SPLIT:
            for target in code.targets[code.x[at] : code.x[at] + code.y[at]]:
                top = _later(seen_key, seen_epoch, work, epoch, top, (np.int64(target) << 32) | stack)
                if top < 0:
                    return GROW_SCRATCH
            continue
        elif op == JUMP:
            go = np.int64(code.x[at])
        elif op in (PUSH, ENTER):
            stack = push_frame(parent, value, stack_table, meta, stack, 0)
            go = np.int64(code.x[at])
        elif op == CALL:
            stack = push_frame(parent, value, stack_table, meta, stack, code.y[at])
            go = np.int64(code.x[at])
        elif op == INCREMENT:
            go = np.int64(code.x[at])
            count = value[stack] + 1
            if code.high[go] < 0 and count > code.low[go]:
                count = code.low[go]
            stack = push_frame(parent, value, stack_table, meta, parent[stack], count)
        elif op == LOOP:
            count = value[stack]
            if count >= code.low[at]:
                top = _later(
                    seen_key,
                    seen_epoch,
                    work,
                    epoch,
                    top,
                    (np.int64(code.y[at]) << 32) | np.int64(parent[stack]),
                )
                if top < 0:
                    return GROW_SCRATCH
            if code.high[at] >= 0 and count >= code.high[at]:
                continue
            go = np.int64(code.x[at])
        elif op == RETURN:
            go = np.int64(value[stack])
            stack = np.int64(parent[stack])
            if go >= len(code.op):  # only ever in a tampered cache entry
                return TOO_LARGE
        if stack < 0:
            return GROW_STACKS
        top = _later(seen_key, seen_epoch, work, epoch, top, (go << 32) | np.int64(stack))
        if top < 0:
            return GROW_SCRATCH
    return OK


@jit
def _free_characters(code: Code, store: Store, thread: np.int64) -> int:
    """How many free characters the loop that this thread is in still takes."""
    at = np.int64(thread >> 32)
    loop = np.int64(code.loop_of[at])
    if code.free[at] != 1 or code.high[loop] < 0:
        return UNBOUNDED
    return np.int64(code.high[loop]) - np.int64(store.value[thread & 0xFFFFFFFF])


@jit
def intern_state(code: Code, store: Store) -> int:
    """The state of the threads in Store.closed: found or made; -GROW_* if there is no room."""
    size = store.meta[CLOSED]
    threads = store.closed[:size]
    threads.sort()
    hashed = np.uint64(size)
    for thread in threads:
        hashed = mix(hashed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(thread))
    mask = len(store.state_table) - 1
    slot = np.int64(hashed & np.uint64(mask))
    while True:
        found = store.state_table[slot] - 1
        if found < 0:
            break
        if store.state_hash[found] == hashed and store.thread_count[found] == size:
            first = store.thread_first[found]
            same = True
            for i in range(size):
                if store.threads[first + i] != threads[i]:
                    same = False
                    break
            if same:
                return found
        slot = (slot + 1) & mask
    state = store.meta[STATES]
    if state >= len(store.thread_first) or 2 * state >= len(store.state_table):
        return -GROW_STATES
    begin = store.meta[THREADS]
    if begin + size > len(store.threads):
        return -GROW_THREADS
    accepts = 0
    free = 0
    for i in range(size):
        store.threads[begin + i] = threads[i]
        at = threads[i] >> 32
        if code.op[at] == MATCH:
            accepts = 1
        elif code.free[at]:
            free = max(free, _free_characters(code, store, threads[i]))
    store.free_count[state] = free
    store.thread_first[state] = begin
    store.thread_count[state] = size
    store.accepting[state] = accepts
    store.state_hash[state] = hashed
    store.rows[state, :] = UNKNOWN
    store.state_table[slot] = state + 1
    store.meta[STATES] = state + 1
    store.meta[THREADS] = begin + size
    return state


@jit
def start_state(code: Code, store: Store, start: int) -> int:
    """The state before any byte, or -GROW_*/-TOO_LARGE."""
    store.meta[EPOCH] += 1
    store.meta[CLOSED] = 0
    answer = add_closure(code, store, start, 0)
    if answer != OK:
        return -answer
    return intern_state(code, store)


@jit
def _next_count(code: Code, store: Store, thread: np.int64, target: int) -> int:
    """The count of characters when a COUNTED thread goes to `target`; -1 if nothing could be completed."""
    leaf = code.counted[code.high[target]]
    count = np.int64(store.value[thread & 0xFFFFFFFF]) + (code.z[target] >> 1)
    if count > leaf[3] or not code.live[leaf[0] + count * leaf[1] + code.low[target]]:
        return -1
    return count


@jit
def fill_row(code: Code, store: Store, state: int) -> int:
    """Compute the transitions of a state for all byte classes.

    Classes that move the same threads the same way share one closure: they are told apart by a
    64-bit sum over (thread, target). Cost: threads x classes + one closure per distinct class. The row
    is written as a whole, so that none is half known after an answer other than OK.
    """
    classes = store.rows.shape[1]
    first = store.thread_first[state]
    last = first + store.thread_count[state]
    signature = np.zeros(classes, np.uint64)
    for i in range(first, last):
        at = store.threads[i] >> 32
        op = code.op[at]
        if op == BYTE:
            has = code.set_has[code.x[at]]
            token = mix(np.uint64(i - first + 1) * np.uint64(0x9E3779B97F4A7C15))
            for c in range(classes):
                if has[c]:
                    signature[c] += token
        elif op in (LEAF, COUNTED):
            row = code.leaf_rows[code.x[at]]
            for c in range(classes):
                if row[c] >= 0 and (op == LEAF or _next_count(code, store, store.threads[i], row[c]) >= 0):
                    signature[c] += mix(
                        np.uint64(i - first + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(row[c] + 1)
                    )
    made = np.full(classes, DEAD, np.int32)
    for c in range(classes):
        if signature[c] == 0:
            continue
        known = -1
        for d in range(c):
            if signature[d] == signature[c]:
                known = d
                break
        if known >= 0:
            made[c] = made[known]
            continue
        store.meta[EPOCH] += 1
        store.meta[CLOSED] = 0
        for i in range(first, last):
            thread = store.threads[i]
            at = thread >> 32
            op = code.op[at]
            go = -1
            if op == BYTE:
                if code.set_has[code.x[at], c]:
                    go = code.y[at]
            elif op in (LEAF, COUNTED):
                go = code.leaf_rows[code.x[at], c]
            if go >= 0:
                stack = np.int64(thread & 0xFFFFFFFF)
                if op == COUNTED:
                    count = _next_count(code, store, thread, go)
                    if count < 0:
                        continue
                    parent = store.parent[stack]
                    stack = push_frame(
                        store.parent, store.value, store.stack_table, store.meta, parent, count
                    )
                    if stack < 0:
                        return GROW_STACKS
                answer = add_closure(code, store, go, stack)
                if answer != OK:
                    return answer
        target = intern_state(code, store)
        if target < 0:
            return -target
        made[c] = target
    store.rows[state, :] = made
    return OK


@jit
def step(code: Code, store: Store, state: int, byte_class: int) -> int:
    """The state after a byte of this class: a state, DEAD, or below DEAD: -(GROW_* or TOO_LARGE) - 1."""
    target = store.rows[state, byte_class]
    if target == UNKNOWN:
        answer = fill_row(code, store, state)
        if answer != OK:
            return -answer - 1
        target = store.rows[state, byte_class]
    return target


@jit
def advance(code: Code, store: Store, state: int, data: NDArray[np.uint8]) -> int:
    """The state after all of `data` (as `step`)."""
    for byte in data:
        state = step(code, store, state, code.class_of_byte[byte])
        if state < 0:
            return state
    return state


@jit
def explore(code: Code, store: Store, limit: int) -> int:
    """Fill the rows of states in order, from where the last call stopped, up to state `limit`.

    Returns how many are filled by now, or -GROW_*/-TOO_LARGE.
    """
    done = store.meta[EXPLORED]
    while done < store.meta[STATES] and done < limit:
        answer = fill_row(code, store, done)
        if answer != OK:
            return -answer
        done += 1
        store.meta[EXPLORED] = done
    return done
