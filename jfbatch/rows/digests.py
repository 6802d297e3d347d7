"""A table from 16-byte digests to integers in about 50 bytes an entry, for identities of millions of rows.

The one idea: open addressing over flat arrays; a dict of bytes objects would need three times the memory.
"""

from __future__ import annotations

import struct
from array import array

_SPLIT = struct.Struct("<QQ")
_MAXIMUM_LOAD = 0.66


class DigestTable:
    """digest (16 bytes) -> signed 64-bit integer."""

    def __init__(self) -> None:
        self._allocate(1 << 10)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def insert(self, digest: bytes, value: int) -> int | None:
        """Set `value` if the digest is new and return None; else change nothing and return its value."""
        slot, found = self._find(digest)
        if found:
            return self._values[slot]
        self._fill(slot, digest, value)
        return None

    def increment(self, digest: bytes) -> int:
        """Count the digest once more; returns how often it had been counted before."""
        slot, found = self._find(digest)
        if found:
            self._values[slot] += 1
            return self._values[slot] - 1
        self._fill(slot, digest, 1)
        return 0

    def _allocate(self, slots: int) -> None:
        self._mask = slots - 1
        self._low = array("Q", bytes(8 * slots))
        self._high = array("Q", bytes(8 * slots))
        self._values = array("q", bytes(8 * slots))

    def _find(self, digest: bytes) -> tuple[int, bool]:
        low, high = _SPLIT.unpack(digest)
        # An all-zero low half marks an empty slot; a digest that has one is moved to 1.
        low = low or 1
        lows, highs, mask = self._low, self._high, self._mask
        slot = low & mask
        while (present := lows[slot]) != 0:
            if present == low and highs[slot] == high:
                return slot, True
            slot = (slot + 1) & mask
        return slot, False

    def _fill(self, slot: int, digest: bytes, value: int) -> None:
        low, high = _SPLIT.unpack(digest)
        self._low[slot], self._high[slot], self._values[slot] = low or 1, high, value
        self._count += 1
        if self._count > _MAXIMUM_LOAD * (self._mask + 1):
            self._grow()

    def _grow(self) -> None:
        old_low, old_high, old_values = self._low, self._high, self._values
        self._allocate(2 * (self._mask + 1))
        lows, highs, values, mask = self._low, self._high, self._values, self._mask
        for low, high, value in zip(old_low, old_high, old_values, strict=True):
            if low:
                slot = low & mask
                while lows[slot]:
                    slot = (slot + 1) & mask
                lows[slot], highs[slot], values[slot] = low, high, value
