"""What the machine is made of: opcodes, what its kernels answer, and the arrays of its states.

A thread is one int64: instruction << 32 | stack id. Stack 0 is empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jfbatch.kernel_cache import Kernel, compiled, kept_under_the_source_of

# Opcodes. x, y, z are operands; "next" is an instruction.
BYTE = 0  # consume a byte of set x, then y
SPLIT = 1  # to each of targets[x : x + y]
JUMP = 2  # to x
PUSH = 3  # push count 0, then LOOP x
LOOP = 4  # body x while count < high; pop and go to y once count >= low
INCREMENT = 5  # count += 1, back to LOOP x
CALL = 6  # push return address y, go to x
RETURN = 7  # pop a return address and go there
MATCH = 8  # the whole text is complete
LEAF = 9  # row x of leaf_rows says the next instruction; if z, may also go to y; low = bytes to acceptance
ENTER = 10  # push count 0, go to x; x is a COUNTED
COUNTED = (
    11  # a LEAF that counts characters in the top frame: state `low` of counted leaf `high` (counted.py)
)

# What a function may answer beside OK.
OK = 0
GROW_STATES = 1
GROW_THREADS = 2
GROW_STACKS = 3
GROW_SCRATCH = 4
TOO_LARGE = 5
BUFFER_FULL = 6

UNBOUNDED = 1 << 30
DEAD = -1  # no text continues this way
UNKNOWN = -2  # transition not computed yet

# Counters in Store.meta.
STATES = 0
THREADS = 1
STACKS = 2
EPOCH = 3
CLOSED = 4  # threads in Store.closed
MAX_THREADS = 5  # limit per state
EXPLORED = 6  # states whose rows `explore` has filled, from state 0 on


class Store(NamedTuple):
    """What an automaton has made so far; all arrays have room to spare, `meta` says how much is used.

    rows         int32[states, C]   next state per byte class, DEAD or UNKNOWN
    thread_first, thread_count int32[states]   the state's threads are threads[first : first + count]
    accepting    uint8[states]
    free_count   int32[states]      free characters that may follow, UNBOUNDED, 0 = none (see walk.py)
    state_hash   uint64[states]
    state_table  int32[2^k]         open addressing, state + 1
    threads      int64[..]
    parent       int32[stacks]      the stack below the top frame
    value        int32[stacks]      top frame: return address or count
    stack_table  int32[2^k]         open addressing, stack + 1
    seen_key     int64[2^k]         visited set of the closure in progress
    seen_epoch   int64[2^k]
    work, closed int64[..]          closure: to do, and done
    meta         int64[8]
    """

    rows: NDArray[np.int32]
    thread_first: NDArray[np.int32]
    thread_count: NDArray[np.int32]
    accepting: NDArray[np.uint8]
    free_count: NDArray[np.int32]
    state_hash: NDArray[np.uint64]
    state_table: NDArray[np.int32]
    threads: NDArray[np.int64]
    parent: NDArray[np.int32]
    value: NDArray[np.int32]
    stack_table: NDArray[np.int32]
    seen_key: NDArray[np.int64]
    seen_epoch: NDArray[np.int64]
    work: NDArray[np.int64]
    closed: NDArray[np.int64]
    meta: NDArray[np.int64]


_KERNELS = ("opcodes", "listing", "hashing", "machine", "continuations", "walk", "products")
_KEPT = kept_under_the_source_of(Path(__file__).parent, *_KERNELS)


def jit(function: Kernel) -> Kernel:
    """Compiled once, kept on disk, called without the GIL."""
    return compiled(function, _KEPT)
