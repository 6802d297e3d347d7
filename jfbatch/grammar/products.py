"""Compiled kernels over explicit transition tables: products and distances to acceptance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.machine import jit


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
