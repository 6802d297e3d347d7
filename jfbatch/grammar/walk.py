"""Compiled kernels of the masks: the trie walk, and which states have the same mask.

Under the rules of machine.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.machine import (
    BYTE,
    CLOSED,
    DEAD,
    GROW_SCRATCH,
    GROW_STACKS,
    MATCH,
    OK,
    UNKNOWN,
    Store,
    fill_row,
    intern_state,
    jit,
    push_frame,
)

if TYPE_CHECKING:
    from jfbatch.grammar.program import Code


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
            if loop >= 0:
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
                stack = push_frame(store, stack, frames[d])
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
def free_characters(code: Code, store: Store, state: int, plain: NDArray[np.uint8], most: int) -> int:
    """One more than how many free characters may follow (at most `most`); 0 if `state` reads none.

    Also 0 where another thread could read more of the bytes of plain text (`plain`, uint8[256])
    than the free ones allow: then only a walk can tell.
    """
    best = -1
    others = False  # another thread reads plain bytes too
    first = store.thread_first[state]
    for i in range(first, first + store.thread_count[state]):
        thread = store.threads[i]
        at = np.int64(thread >> 32)
        if code.free[at]:
            count = most
            loop = np.int64(code.loop_of[at])
            if code.free[at] == 1 and code.high[loop] >= 0:
                count = min(most, np.int64(code.high[loop]) - np.int64(store.value[thread & 0xFFFFFFFF]))
            best = max(best, count)
        elif not others and code.op[at] != MATCH:
            for byte in range(256):
                if plain[byte]:
                    c = code.class_of_byte[byte]
                    if code.op[at] == BYTE:
                        others |= code.set_has[code.x[at], c] != 0
                    else:
                        others |= code.leaf_rows[code.x[at], c] >= 0
    if others and best < most:
        return 0
    return best + 1
