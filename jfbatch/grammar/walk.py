"""Compiled kernels of the masks: the trie walk, and which states have the same mask.

Under the rules of machine.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.machine import fill_row, intern_state, push_frame, step
from jfbatch.grammar.opcodes import (
    BYTE,
    CLOSED,
    COUNTED,
    DEAD,
    GROW_SCRATCH,
    GROW_STACKS,
    MATCH,
    OK,
    UNBOUNDED,
    UNKNOWN,
    Store,
    jit,
)

if TYPE_CHECKING:
    from jfbatch.grammar.listing import Code


@jit
def clamped_state(code: Code, store: Store, state: int, horizon: int) -> int:
    """The state whose next `horizon` bytes are the same, with counts clamped; or -GROW_*.

    A count further than `horizon` from both its bounds cannot meet them within one token, for a
    loop body takes at least a byte: all such counts of a loop stand for one.
    """
    first = store.thread_first[state]
    size = store.thread_count[state]
    if size > len(store.closed):
        return -GROW_SCRATCH
    frames = np.zeros(64, np.int64)
    loops = np.zeros(64, np.int64)
    moved = False
    for i in range(size):
        thread = store.threads[first + i]
        at = np.int64(thread >> 32)
        stack = np.int64(thread & 0xFFFFFFFF)
        depth = 0
        changed = False
        while not (code.loop_of[at] < 0 and stack == 0) and depth < 64:
            loop = np.int64(code.loop_of[at])
            value = np.int64(store.value[stack])
            frames[depth] = value
            loops[depth] = loop
            if loop >= 0 and code.op[loop] == COUNTED:
                leaf = code.counted[code.high[loop]]
                if value >= leaf[2] and value < leaf[4] - horizon:
                    frames[depth] = leaf[2]
                changed |= frames[depth] != value
                at = np.int64(code.y[loop])
            elif loop >= 0:
                low = np.int64(code.low[loop])
                high = np.int64(code.high[loop])
                if value < low - horizon:
                    frames[depth] = 0
                elif value >= low and high >= 0 and value < high - horizon:
                    frames[depth] = max(low, 0)
                changed |= frames[depth] != value
                at = np.int64(code.y[loop])
            else:
                at = min(value, len(code.op) - 1)
            stack = np.int64(store.parent[stack])
            depth += 1
        if changed:
            moved = True
            for d in range(depth - 1, -1, -1):
                stack = push_frame(store.parent, store.value, store.stack_table, store.meta, stack, frames[d])
                if stack < 0:
                    return -GROW_STACKS
            thread = (np.int64(thread >> 32) << 32) | np.int64(stack)
        store.closed[i] = thread
    if not moved:
        return state
    kept = store.closed[:size]
    kept.sort()
    unique = 0
    for i in range(size):
        if i == 0 or kept[i] != kept[unique - 1]:
            kept[unique] = kept[i]
            unique += 1
    store.meta[CLOSED] = unique
    return intern_state(code, store)


@jit
def walk_trie(
    code: Code,
    store: Store,
    node_byte: NDArray[np.uint8],
    node_depth: NDArray[np.uint16],
    subtree_end: NDArray[np.int32],
    token_first: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    path: NDArray[np.int32],
    resume: NDArray[np.int64],
    mask: NDArray[np.uint32],
) -> int:
    """Set the bits of all tokens whose bytes the automaton can take from state path[0].

    One step per trie node met, dead subtrees skipped: 3 to 5 ns a node. `path[d]` is the state after
    d bytes; resume[0] is the node to go on from, so that a walk cut short by GROW_* continues.
    """
    node = resume[0]
    nodes = len(node_byte)
    while node < nodes:
        depth = np.int64(node_depth[node])
        state = path[depth - 1]
        target = store.rows[state, code.class_of_byte[node_byte[node]]]
        if target == UNKNOWN:
            answer = fill_row(code, store, state)
            if answer != OK:
                resume[0] = node
                return answer
            target = store.rows[state, code.class_of_byte[node_byte[node]]]
        if target == DEAD:
            node = np.int64(subtree_end[node])
            continue
        path[depth] = target
        for i in range(token_first[node], token_first[node + 1]):
            token = token_ids[i]
            mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
        node += 1
    return OK


@jit
def only_free_text(code: Code, store: Store, state: int, plain: NDArray[np.uint8]) -> int:
    """1 if plain bytes (`plain`, uint8[256]) are read from `state` by free characters alone, else 0."""
    first = store.thread_first[state]
    for i in range(first, first + store.thread_count[state]):
        at = np.int64(store.threads[i] >> 32)
        if code.free[at] or code.op[at] == MATCH:
            continue
        for byte in range(256):
            if plain[byte]:
                c = code.class_of_byte[byte]
                if code.op[at] == BYTE:
                    if code.set_has[code.x[at], c]:
                        return 0
                elif code.leaf_rows[code.x[at], c] >= 0:
                    return 0
    return 1


@jit
def letters_to_free_text(code: Code, store: Store, state: int) -> int:
    """How many ASCII letters lead from `state` to one that takes free text without end; -GROW_*."""
    count = 0
    for byte in range(0x41, 0x7B):
        target = step(code, store, state, code.class_of_byte[byte])
        if target < DEAD:
            return target + 1
        if target >= 0 and store.free_count[target] == UNBOUNDED:
            count += 1
    return count


@jit
def walk_plain(
    code: Code,
    store: Store,
    node_byte: NDArray[np.uint8],
    node_depth: NDArray[np.uint16],
    subtree_end: NDArray[np.int32],
    token_first: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    longest: NDArray[np.int32],
    path: NDArray[np.int32],
    resume: NDArray[np.int64],
    mask: NDArray[np.uint32],
    clearing: int,
) -> int:
    """`walk_trie` over tokens of plain text, which free text takes whole subtrees at a time.

    longest[n] int32: most bytes below node n. With `clearing`, the mask comes with all these
    tokens set and the forbidden ones are cleared, which is faster where most are allowed.
    """
    node = resume[0]
    nodes = len(node_byte)
    rows = store.rows
    free_count = store.free_count
    class_of_byte = code.class_of_byte
    while node < nodes:
        depth = np.int64(node_depth[node])
        state = path[depth - 1]
        target = rows[state, class_of_byte[node_byte[node]]]
        if target == UNKNOWN:  # `step`, but without a call: passing a Store costs more than the look-up
            answer = fill_row(code, store, state)
            if answer != OK:
                resume[0] = node
                return answer
            target = rows[state, class_of_byte[node_byte[node]]]
        end = np.int64(subtree_end[node])
        if target == DEAD:
            if clearing:
                for i in range(token_first[node], token_first[end]):
                    token = token_ids[i]
                    mask[token >> 5] &= ~(np.uint32(1) << np.uint32(token & 31))
            node = end
            continue
        if free_count[target] > longest[node]:
            if not clearing:
                for i in range(token_first[node], token_first[end]):
                    token = token_ids[i]
                    mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
            node = end
            continue
        path[depth] = target
        if not clearing:
            for i in range(token_first[node], token_first[node + 1]):
                token = token_ids[i]
                mask[token >> 5] |= np.uint32(1) << np.uint32(token & 31)
        node += 1
    return OK


@jit
def subtree_heights(depth: NDArray[np.uint16], subtree_end: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32[nodes]: the most bytes below each node, which bounds the characters there."""
    heights = np.zeros(len(depth), np.int32)
    for node in range(len(depth) - 1, -1, -1):
        deepest = np.int64(depth[node])
        child = node + 1
        while child < subtree_end[node]:
            deepest = max(deepest, np.int64(depth[child]) + heights[child])
            child = np.int64(subtree_end[child])
        heights[node] = deepest - np.int64(depth[node])
    return heights
