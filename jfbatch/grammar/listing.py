"""A program while it is written, and the arrays it becomes.

`Listing` collects instructions in lists; `assemble` sorts the bytes into classes that the program
tells apart and gives `Code`, which the machine runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar.continuations import fill_distances
from jfbatch.grammar.deadline import check_deadline

if TYPE_CHECKING:
    from jfbatch.grammar.counted import CountedDfa
    from jfbatch.grammar.language import Dfa

MAX_INSTRUCTIONS = 8_000_000


class Code(NamedTuple):
    """A program as arrays; `machine.py` runs it. n = instructions, C = byte classes.

    op, x, y, z       int32[n]   opcode and operands, see opcodes.py
    loop_of           int32[n]   the LOOP whose count is the top frame here, -1: a return address is
    distance          int64[n]   cheapest way from here to the end of this level (continuations.py)
    low, high         int32[n]   bounds of a LOOP; high -1 is without end
    targets           int32[..]  what SPLITs lead to
    set_has           uint8[S,C] which byte classes belong to a byte set
    leaf_rows         int32[Q,C] instruction after a leaf state on a byte class, -1 = dead
    class_of_byte     uint8[256] byte -> byte class
    class_byte        uint8[C]   the byte of a class to write when any would do
    class_size        int32[C]   how many bytes a class has
    counted           int64[K,5] counted leaves: offset in live and reach, states, low, high, last
                                 count that is far from its bounds
    live, reach       uint8[..]  their bitmaps (counted.py), counts x states
    free              uint8[n]   a free character begins here, again and again: 1 counted, 2 without end
    """

    op: NDArray[np.int32]
    x: NDArray[np.int32]
    y: NDArray[np.int32]
    z: NDArray[np.int32]
    loop_of: NDArray[np.int32]
    distance: NDArray[np.int64]
    low: NDArray[np.int32]
    high: NDArray[np.int32]
    targets: NDArray[np.int32]
    set_has: NDArray[np.uint8]
    leaf_rows: NDArray[np.int32]
    class_of_byte: NDArray[np.uint8]
    class_byte: NDArray[np.uint8]
    class_size: NDArray[np.int32]
    free: NDArray[np.uint8]
    counted: NDArray[np.int64]
    live: NDArray[np.uint8]
    reach: NDArray[np.uint8]


class Listing:
    """Instructions being written. Addresses are places in the lists op, x, y and loop_of."""

    def __init__(self) -> None:
        self.op: list[int] = []
        self.x: list[int] = []
        self.y: list[int] = []
        self.loop_of: list[int] = []
        self.bounds: dict[int, tuple[int, int]] = {}  # LOOP -> low and high
        self.targets: list[int] = []
        self.sets: dict[int, int] = {}  # byte set -> its number
        self.free: dict[int, int] = {}  # see Code.free
        self.leaves: list[tuple[int, Dfa]] = []  # (first instruction, automaton)
        self.counted: list[tuple[int, CountedDfa]] = []

    def emit(self, op: int, x: int = 0, y: int = 0, loop: int = -1) -> int:
        at = len(self.op)
        if at % 4096 == 0:
            self.check_limits()
        self.op.append(op)
        self.x.append(x)
        self.y.append(y)
        self.loop_of.append(loop)
        return at

    def check_limits(self) -> None:
        check_deadline()
        if len(self.op) >= MAX_INSTRUCTIONS:
            raise GrammarTooLarge(f"the pattern needs more than {MAX_INSTRUCTIONS:,} instructions")

    def byte_set(self, bits: int) -> int:
        return self.sets.setdefault(bits, len(self.sets))

    def assemble(self) -> Code:
        members = _set_members(list(self.sets) or [0])  # [S, 256]
        columns = [members] + [dfa.class_of_byte[None, :] for _, dfa in self.leaves]
        stacked = np.concatenate(columns, axis=0).astype(np.uint8)
        class_of_byte, first_bytes = byte_classes(stacked)
        classes = len(first_bytes)
        leaf_rows, x = self.leaf_rows(classes, first_bytes), np.array(self.x, np.int32)
        z, low, high = (np.zeros(len(self.op), np.int32) for _ in range(3))
        row = 0
        for first, dfa in self.leaves:
            states = slice(first, first + len(dfa.accepting))
            x[states] = np.arange(row, row + len(dfa.accepting))
            z[states], low[states] = dfa.accepting, dfa.distance
            row += len(dfa.accepting)
        counted = np.zeros((max(len(self.counted), 1), 5), np.int64)
        offset = 0
        for number, (first, leaf) in enumerate(self.counted):
            size = len(leaf.boundary)
            states = slice(first, first + size)
            z[states] |= leaf.boundary << 1
            low[states], high[states] = np.arange(size), number
            counted[number] = offset, size, leaf.low, leaf.high, leaf.high - leaf.spread
            offset += leaf.live.size
        for loop, (fewest, most) in self.bounds.items():
            low[loop], high[loop] = fewest, most
        code = Code(
            op=np.array(self.op, np.int32),
            x=x,
            y=np.array(self.y, np.int32),
            z=z,
            loop_of=np.array(self.loop_of, np.int32),
            distance=np.zeros(len(self.op), np.int64),
            low=low,
            high=high,
            targets=np.array(self.targets or [0], np.int32),
            set_has=np.ascontiguousarray(members[:, first_bytes]),
            leaf_rows=leaf_rows,
            class_of_byte=class_of_byte,
            class_byte=_preferred_bytes(class_of_byte, classes),
            class_size=np.bincount(class_of_byte, minlength=classes).astype(np.int32),
            free=np.zeros(len(self.op), np.uint8),
            counted=counted,
            live=_joined([leaf.live for _, leaf in self.counted]),
            reach=_joined([leaf.reach for _, leaf in self.counted]),
        )
        for instruction, kind in self.free.items():
            code.free[instruction] = kind
        fill_distances(code)
        return code

    def leaf_rows(self, classes: int, first_bytes: NDArray[np.int64]) -> NDArray[np.int32]:
        if not self.leaves:
            return np.full((1, classes), -1, np.int32)
        rows = []
        for first, dfa in self.leaves:
            table = dfa.transitions[:, dfa.class_of_byte[first_bytes]]
            rows.append(np.where(table >= 0, table + first, -1).astype(np.int32))
        return np.ascontiguousarray(np.concatenate(rows, axis=0))


def _joined(tables: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return np.concatenate([table.ravel() for table in tables]) if tables else np.zeros(1, np.uint8)


def byte_classes(columns: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bytes with equal columns of uint8[S, 256] are one class: (class per byte, first byte per class)."""
    rows = np.ascontiguousarray(columns.T)
    data, width = rows.tobytes(), rows.shape[1]
    numbers: dict[bytes, int] = {}
    first_bytes: list[int] = []
    class_of_byte = np.empty(256, np.uint8)
    for byte in range(256):
        number = numbers.setdefault(data[byte * width : (byte + 1) * width], len(numbers))
        if number == len(first_bytes):
            first_bytes.append(byte)
        class_of_byte[byte] = number
    return class_of_byte, np.array(first_bytes, np.int64)


def _set_members(sets: list[int]) -> NDArray[np.uint8]:
    """256-bit integers to uint8[S, 256]."""
    packed = b"".join(bits.to_bytes(32, "little") for bits in sets)
    table = np.frombuffer(packed, np.uint8).reshape(len(sets), 32)
    return np.unpackbits(table, axis=1, bitorder="little")


_NICE = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + bytes(range(0x20, 0x100))
_FILLERS = np.frombuffer(bytes(dict.fromkeys(_NICE + bytes(range(0x20)))), np.uint8)


def _preferred_bytes(class_of_byte: NDArray[np.uint8], classes: int) -> NDArray[np.uint8]:
    """The byte of each class to write when any would do: digits, then letters, then the lowest."""
    preferred = np.zeros(classes, np.uint8)
    preferred[class_of_byte[_FILLERS[::-1]]] = _FILLERS[::-1]  # the last write to a class stays
    return preferred
