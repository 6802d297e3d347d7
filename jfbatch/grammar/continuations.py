"""What may follow a state of the machine: forced bytes, the end, shortest completing texts.

Compiled kernels like those of machine.py, and under the same rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.machine import step
from jfbatch.grammar.opcodes import (
    BUFFER_FULL,
    BYTE,
    CALL,
    COUNTED,
    DEAD,
    ENTER,
    INCREMENT,
    JUMP,
    LEAF,
    LOOP,
    MATCH,
    PUSH,
    RETURN,
    SPLIT,
    Store,
    jit,
)

if TYPE_CHECKING:
    from jfbatch.grammar.listing import Code

A_BYTE = np.int64(1 << 32)
FAR = np.int64(1 << 61)


@jit
def forced(code: Code, store: Store, state: int, out: NDArray[np.uint8]) -> int:
    """Write the bytes that every text continues with from `state`; returns how many, or -GROW_*."""
    written = 0
    classes = store.rows.shape[1]
    while written < len(out) and not store.accepting[state]:
        target = step(code, store, state, 0)
        if target < DEAD:
            return target + 1
        only = -1
        for c in range(classes):
            if store.rows[state, c] != DEAD:
                if only >= 0 or code.class_size[c] != 1:
                    return written
                only = c
        if only < 0:
            return written
        out[written] = code.class_byte[only]
        written += 1
        state = store.rows[state, only]
    return written


@jit
def is_last(code: Code, store: Store, state: int) -> int:
    """1 if no byte may follow `state`, else 0; -GROW_* if there is no room."""
    answer = step(code, store, state, 0)
    if answer < DEAD:
        return answer + 1
    for c in range(store.rows.shape[1]):
        if store.rows[state, c] != DEAD:
            return 0
    return 1


@jit
def _characters_left(code: Code, at: int, count: int) -> np.int64:
    """Fewest characters that complete a counted leaf from state `at` after `count` of them."""
    leaf = code.counted[code.high[at]]
    for left in range(max(np.int64(0), leaf[2] - count), leaf[3] - count + 1):
        if code.reach[leaf[0] + left * leaf[1] + code.low[at]]:
            return np.int64(left)
    return np.int64(1 << 28)


@jit
def _dependencies(code: Code, at: int) -> tuple[int, int]:
    """The one or two instructions that the distance of `at` is made of (-1 = none); not for SPLIT."""
    op = code.op[at]
    if op in (BYTE, LEAF):
        return np.int64(code.y[at]), np.int64(-1)
    if op == JUMP:
        return np.int64(code.x[at]), np.int64(-1)
    if op in (CALL, LOOP):
        return np.int64(code.x[at]), np.int64(code.y[at])
    if op == PUSH:
        return np.int64(code.x[code.x[at]]), np.int64(code.y[code.x[at]])
    return np.int64(-1), np.int64(-1)


@jit
def _distance(code: Code, at: int) -> np.int64:
    """The distance of one instruction by those of the ones that follow it."""
    distance = code.distance
    op = code.op[at]
    best = FAR
    if op in (MATCH, RETURN, INCREMENT, COUNTED):
        best = np.int64(0)
    elif op == BYTE:
        best = distance[code.y[at]] + A_BYTE
    elif op == SPLIT:
        for target in code.targets[code.x[at] : code.x[at] + code.y[at]]:
            best = min(best, distance[target])
    elif op == JUMP:
        best = distance[code.x[at]]
    elif op in (PUSH, LOOP):
        loop = np.int64(code.x[at]) if op == PUSH else np.int64(at)
        best = distance[code.y[loop]] + np.int64(op == PUSH)
        low = np.int64(code.low[loop])
        if low > 0:
            body = distance[code.x[loop]] + 2
            best = min(best + low * body, FAR) if body < FAR // low else FAR
    elif op == CALL:
        best = distance[code.x[at]] + distance[code.y[at]]
    elif op == LEAF:
        best = np.int64(code.low[at]) * A_BYTE + distance[code.y[at]]
    elif op == ENTER:
        best = _characters_left(code, np.int64(code.x[at]), 0) * A_BYTE
    return min(best + 1, FAR)


@jit
def fill_distances(code: Code) -> None:
    """The cheapest way from each instruction to the end of its level, by relaxation to a fixpoint.

    Cost is bytes first (A_BYTE each), then instructions run, so that a cheapest way never goes in
    circles. A level is a loop body (ends at INCREMENT), a rule (RETURN) or the whole (MATCH). A queue
    holds what may have come nearer (Bellman-Ford as in SPFA, Moore 1959).
    """
    size = len(code.op)
    distance = code.distance
    distance[:] = FAR
    begin = np.zeros(size + 2, np.int64)
    for at in range(size):
        one, other = _dependencies(code, at)
        if one >= 0:
            begin[one + 2] += 1
        if other >= 0:
            begin[other + 2] += 1
        if code.op[at] == SPLIT:
            for target in code.targets[code.x[at] : code.x[at] + code.y[at]]:
                begin[target + 2] += 1
    for at in range(size):
        begin[at + 2] += begin[at + 1]
    users = np.empty(begin[size + 1], np.int32)
    for at in range(size):
        one, other = _dependencies(code, at)
        if one >= 0:
            users[begin[one + 1]] = at
            begin[one + 1] += 1
        if other >= 0:
            users[begin[other + 1]] = at
            begin[other + 1] += 1
        if code.op[at] == SPLIT:
            for target in code.targets[code.x[at] : code.x[at] + code.y[at]]:
                users[begin[target + 1]] = at
                begin[target + 1] += 1
    queue = np.empty(size, np.int32)  # a ring: every instruction is in it at most once
    waiting = np.ones(size, np.uint8)
    for at in range(size):
        queue[at] = at
    head, count = 0, size
    while count > 0:
        at = np.int64(queue[head])
        head = (head + 1) % size
        count -= 1
        waiting[at] = 0
        best = _distance(code, at)
        if best < distance[at]:
            distance[at] = best
            for i in range(begin[at], begin[at + 1]):
                user = users[i]
                if not waiting[user]:
                    waiting[user] = 1
                    queue[(head + count) % size] = user
                    count += 1


@jit
def _thread_distance(code: Code, store: Store, thread: np.int64) -> np.int64:
    """The cheapest way from a thread to a complete text (unit: see fill_distances)."""
    at = np.int64(thread >> 32)
    stack = np.int64(thread & 0xFFFFFFFF)
    total = np.int64(0)
    while True:
        total = min(total + code.distance[at], FAR)
        loop = np.int64(code.loop_of[at])
        if loop >= 0 and code.op[loop] == COUNTED:
            total = min(total + _characters_left(code, at, np.int64(store.value[stack])) * A_BYTE, FAR)
            at = np.int64(code.y[loop])
        elif loop >= 0:
            rest = np.int64(code.low[loop]) - np.int64(store.value[stack]) - 1
            if rest > 0:
                total = min(total + rest * (code.distance[code.x[loop]] + 2), FAR)
            at = np.int64(code.y[loop])
        elif stack == 0:
            return total
        else:
            at = min(np.int64(store.value[stack]), len(code.op) - 1)
        stack = np.int64(store.parent[stack])


@jit
def _nearest_thread(code: Code, store: Store, state: int) -> np.int64:
    first = store.thread_first[state]
    best = np.int64(-1)
    fewest = np.int64(1 << 62)
    for i in range(first, first + store.thread_count[state]):
        distance = _thread_distance(code, store, store.threads[i])
        if distance < fewest:
            fewest = distance
            best = store.threads[i]
    return best


@jit
def ending_length(code: Code, store: Store, state: int) -> int:
    """Length in bytes of a shortest completing text."""
    return _thread_distance(code, store, _nearest_thread(code, store, state)) // A_BYTE


@jit
def shortest_ending(
    code: Code, store: Store, state: int, out: NDArray[np.uint8], frames: NDArray[np.int64]
) -> int:
    """Write a shortest text that completes the output; returns its length.

    -BUFFER_FULL if `out` (bytes) or `frames` (scratch for the stack) is too small.
    """
    thread = _nearest_thread(code, store, state)
    at = np.int64(thread >> 32)
    stack = np.int64(thread & 0xFFFFFFFF)
    depth = 0
    while stack != 0:
        if depth >= len(frames):
            return -BUFFER_FULL
        frames[depth] = store.value[stack]
        stack = np.int64(store.parent[stack])
        depth += 1
    for i in range(depth // 2):
        frames[i], frames[depth - 1 - i] = frames[depth - 1 - i], frames[i]
    written = 0
    while True:
        if written >= len(out) or depth + 1 >= len(frames):
            return -BUFFER_FULL
        op = code.op[at]
        if op == MATCH:
            return written
        if op == BYTE:
            has = code.set_has[code.x[at]]
            out[written] = 0
            for c in range(len(has)):
                if has[c] and (out[written] == 0 or _nicer(code.class_byte[c], out[written])):
                    out[written] = code.class_byte[c]
            written += 1
            at = np.int64(code.y[at])
        elif op == LEAF:
            if code.z[at] and code.low[at] == 0:
                at = np.int64(code.y[at])
                continue
            best = np.int64(-1)
            row = code.leaf_rows[code.x[at]]
            for c in range(len(row)):
                if row[c] < 0:
                    continue
                here = code.low[row[c]]
                if (
                    best < 0
                    or here < code.low[best]
                    or (here == code.low[best] and _nicer(code.class_byte[c], out[written]))
                ):
                    best = np.int64(row[c])
                    out[written] = code.class_byte[c]
            written += 1
            at = best
        elif op == SPLIT:
            best = np.int64(code.targets[code.x[at]])
            for target in code.targets[code.x[at] : code.x[at] + code.y[at]]:
                if code.distance[target] < code.distance[best]:
                    best = np.int64(target)
            at = best
        elif op == COUNTED:
            leaf = code.counted[code.high[at]]
            count = frames[depth - 1]
            left = _characters_left(code, at, count)
            if left == 0 and code.z[at] & 1:
                depth -= 1
                at = np.int64(code.y[at])
                continue
            best = np.int64(-1)
            row = code.leaf_rows[code.x[at]]
            for c in range(len(row)):
                if row[c] >= 0:
                    completes = np.int64(code.z[row[c]] >> 1)
                    rest = left - completes
                    if rest < 0 or not code.reach[leaf[0] + rest * leaf[1] + code.low[row[c]]]:
                        continue
                    if best < 0 or _nicer(code.class_byte[c], out[written]):
                        best = np.int64(row[c])
                        out[written] = code.class_byte[c]
            if best < 0:  # only ever in a tampered cache entry
                return -BUFFER_FULL
            frames[depth - 1] += np.int64(code.z[best] >> 1)
            written += 1
            at = best
        elif op == JUMP:
            at = np.int64(code.x[at])
        elif op in (PUSH, ENTER):
            frames[depth] = 0
            depth += 1
            at = np.int64(code.x[at])
        elif op == LOOP:
            if frames[depth - 1] >= code.low[at]:
                depth -= 1
                at = np.int64(code.y[at])
            else:
                at = np.int64(code.x[at])
        elif op == INCREMENT:
            frames[depth - 1] += 1
            at = np.int64(code.x[at])
        elif op == CALL:
            frames[depth] = code.y[at]
            depth += 1
            at = np.int64(code.x[at])
        elif op == RETURN:
            depth -= 1
            at = min(np.int64(frames[depth]), len(code.op) - 1)


@jit
def _nicer(one: np.uint8, other: np.uint8) -> bool:
    """Whether byte `one` is the better filler: alphanumerics first, then printable, then the rest."""
    return _rank(one) < _rank(other)


@jit
def _rank(byte: np.uint8) -> int:
    if 0x30 <= byte <= 0x39:
        return byte
    if 0x61 <= byte <= 0x7A:
        return 0x100 + byte
    if 0x41 <= byte <= 0x5A:
        return 0x200 + byte
    if 0x20 < byte < 0x7F:
        return 0x300 + byte
    return 0x400 + byte
