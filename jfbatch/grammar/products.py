"""Compiled kernels over explicit transition tables: products and distances to acceptance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.opcodes import jit


@jit
def product(
    left: NDArray[np.int32],
    right: NDArray[np.int32],
    left_start: int,
    right_start: int,
    exclude: int,
    limit: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Reachable pairs of two transition tables over the same classes, breadth-first.

    left int32[Q1, C], right int32[Q2, C]. With `exclude`, the right side may be dead (-1) in a pair.
    Returns transitions int32[n, C], pairs int32[n, 2], and n, which is -1 past `limit`.
    """
    classes = left.shape[1]
    width = right.shape[0] + 1
    number = np.full(left.shape[0] * width, -1, np.int32)
    room = 1024
    transitions = np.empty((room, classes), np.int32)
    pairs = np.empty((room, 2), np.int32)
    pairs[0, 0] = left_start
    pairs[0, 1] = right_start
    number[left_start * width + right_start + 1] = 0
    count = 1
    done = 0
    while done < count:
        for c in range(classes):
            one = left[pairs[done, 0], c]
            other = right[pairs[done, 1], c] if pairs[done, 1] >= 0 else np.int32(-1)
            if one < 0 or (other < 0 and not exclude):
                transitions[done, c] = -1
                continue
            slot = np.int64(one) * width + other + 1
            target = number[slot]
            if target < 0:
                if count >= limit:
                    return transitions, pairs, -1
                if count == room:
                    room *= 2
                    wider = np.empty((room, classes), np.int32)
                    wider[:count] = transitions[:count]
                    transitions = wider
                    longer = np.empty((room, 2), np.int32)
                    longer[:count] = pairs[:count]
                    pairs = longer
                target = np.int32(count)
                number[slot] = target
                pairs[count, 0] = one
                pairs[count, 1] = other
                count += 1
            transitions[done, c] = target
        done += 1
    return transitions, pairs, count


@jit
def distances_to_acceptance(
    transitions: NDArray[np.int32], accepting: NDArray[np.bool_]
) -> NDArray[np.int32]:
    """Fewest bytes from each state to an accepting one, -1 = none: breadth-first over reversed edges."""
    states, classes = transitions.shape
    begin = np.zeros(states + 2, np.int64)
    for state in range(states):
        for c in range(classes):
            target = transitions[state, c]
            if target >= 0:
                begin[target + 2] += 1
    for state in range(states):
        begin[state + 2] += begin[state + 1]
    sources = np.empty(begin[states + 1], np.int32)
    for state in range(states):
        for c in range(classes):
            target = transitions[state, c]
            if target >= 0:
                sources[begin[target + 1]] = state
                begin[target + 1] += 1
    distance = np.full(states, -1, np.int32)
    queue = np.empty(states, np.int32)
    head = 0
    tail = 0
    for state in range(states):
        if accepting[state]:
            distance[state] = 0
            queue[tail] = state
            tail += 1
    while head < tail:
        state = queue[head]
        head += 1
        for i in range(begin[state], begin[state + 1]):
            source = sources[i]
            if distance[source] < 0:
                distance[source] = distance[state] + 1
                queue[tail] = source
                tail += 1
    return distance


@jit
def paired_states(
    transitions: NDArray[np.int32],
    others: NDArray[np.int32],
    class_of_byte: NDArray[np.uint8],
    other_class_of_byte: NDArray[np.uint8],
    start: int,
    other_start: int,
) -> NDArray[np.int32]:
    """For each state of one automaton, the state the other is in after the same text.

    int32[Q]. The first must have been made as a product with the other, so that there is only one.
    """
    paired = np.full(len(transitions), -1, np.int32)
    queue = np.empty(len(transitions), np.int32)
    paired[start] = other_start
    queue[0] = start
    head, tail = 0, 1
    while head < tail:
        state = queue[head]
        head += 1
        for byte in range(256):
            target = transitions[state, class_of_byte[byte]]
            if target >= 0 and paired[target] < 0:
                paired[target] = others[paired[state], other_class_of_byte[byte]]
                queue[tail] = target
                tail += 1
    return paired


@jit
def characters_to_acceptance(
    transitions: NDArray[np.int32], accepting: NDArray[np.bool_], boundary: NDArray[np.uint8], high: int
) -> NDArray[np.uint8]:
    """uint8[high + 1, Q]: whether exactly k more completed characters can lead from q to acceptance.

    By layers of k; states inside a character take over from those behind them in the same layer.
    """
    states, classes = transitions.shape
    reach = np.zeros((high + 1, states), np.uint8)
    for state in range(states):
        reach[0, state] = accepting[state] and boundary[state]
    edges = np.empty((states * classes, 2), np.int32)
    count = 0
    for state in range(states):
        for c in range(classes):
            target = transitions[state, c]
            if target < 0:
                continue
            known = False
            for d in range(c):
                if transitions[state, d] == target:
                    known = True
                    break
            if not known:
                edges[count, 0] = state
                edges[count, 1] = target
                count += 1
    for k in range(high + 1):
        if k > 0:
            for i in range(count):
                if boundary[edges[i, 1]] and reach[k - 1, edges[i, 1]]:
                    reach[k, edges[i, 0]] = 1
        changed = True
        while changed:
            changed = False
            for i in range(count):
                source, target = edges[i, 0], edges[i, 1]
                if not boundary[target] and reach[k, target] and not reach[k, source]:
                    reach[k, source] = 1
                    changed = True
    return reach


@jit
def live_counts(reach: NDArray[np.uint8], low: int, high: int) -> NDArray[np.uint8]:
    """uint8[high + 1, Q]: whether after n characters some k keeps low <= n + k <= high (a sliding window)."""
    states = reach.shape[1]
    live = np.zeros((high + 1, states), np.uint8)
    for state in range(states):
        inside = 0
        first, last = np.int64(0), np.int64(-1)  # the window of k, empty at first
        for n in range(high, -1, -1):
            while last < high - n:
                last += 1
                inside += reach[last, state]
            wanted = max(0, low - n)
            while first < wanted:
                inside -= reach[first, state] if first <= last else 0
                first += 1
            live[n, state] = inside > 0
    return live
