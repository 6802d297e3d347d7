"""Hash tables of states and stacks: open addressing over plain arrays. Kernels, as in machine.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.opcodes import jit


@jit
def mix(value: np.uint64) -> np.uint64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@jit
def stack_slot(parent: int, value: int, mask: int) -> int:
    """Where the search for a stack begins in a table of mask + 1 slots."""
    hashed = mix(np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(value))
    return np.int64(hashed & np.uint64(mask))


@jit
def fill_state_table(table: NDArray[np.int32], state_hash: NDArray[np.uint64], states: int) -> None:
    """Put the first `states` states into an empty open-addressing table."""
    mask = len(table) - 1
    for state in range(states):
        slot = np.int64(state_hash[state] & np.uint64(mask))
        while table[slot] != 0:
            slot = (slot + 1) & mask
        table[slot] = state + 1


@jit
def fill_stack_table(
    table: NDArray[np.int32], parent: NDArray[np.int32], value: NDArray[np.int32], stacks: int
) -> None:
    """Put stacks 1.. into an empty open-addressing table (stack 0, the empty one, is in none)."""
    mask = len(table) - 1
    for stack in range(1, stacks):
        slot = stack_slot(parent[stack], value[stack], mask)
        while table[slot] != 0:
            slot = (slot + 1) & mask
        table[slot] = stack + 1
