"""How the keys or values of one layer lie in memory.

ROWS: [slot, kv head, length, head dim], as matrix products and SDPA read them.

KEYS and VALUES are for the CPU's kernel, which multiplies a query by many keys, or weights by many
dimensions of values, at a time. What it adds up one after the other lies together, in groups that fill
32 bits: keys [slot, kv head, head dim / group, length, group], values [slot, kv head, length / group,
head dim, group].
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

# The kernel's vectors may be this long; the head dimension of values is padded to whole ones.
VECTOR = 16


class Order(Enum):
    """Which of the module's three orders."""

    ROWS = auto()
    KEYS = auto()
    VALUES = auto()


@dataclass(frozen=True)
class KVLayout:
    """The layout of K or V with so many heads of so many dimensions."""

    order: Order
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """How many numbers lie together: 2 of bfloat16, 1 of float32. Lengths are multiples of it."""
        return max(4 // self.dtype.itemsize, 1)

    @property
    def width(self) -> int:
        """Dimensions of a head as stored, with padding."""
        if self.order is Order.ROWS:
            return self.head_dim
        whole = self.group if self.order is Order.KEYS else VECTOR
        return -(-self.head_dim // whole) * whole

    def shape(self, slots: int, length: int) -> tuple[int, ...]:
        """Of the storage of so many slots."""
        match self.order:
            case Order.ROWS:
                return slots, self.heads, length, self.width
            case Order.KEYS:
                return slots, self.heads, self.width // self.group, length, self.group
            case Order.VALUES:
                return slots, self.heads, length // self.group, self.width, self.group

    def first(self, storage: Tensor, length: int) -> Tensor:
        """The view of the first positions of every slot; where they lie in groups, of whole ones."""
        match self.order:
            case Order.ROWS:
                return storage[:, :, :length]
            case Order.KEYS:
                return storage[:, :, :, :length]
            case Order.VALUES:
                return storage[:, :, : -(-length // self.group)]

    def position(self, storage: Tensor, slot: int, position: int) -> Tensor:
        """The view of one position of a slot."""
        match self.order:
            case Order.ROWS:
                return storage[slot, :, position]
            case Order.KEYS:
                return storage[slot, :, :, position]
            case Order.VALUES:
                return storage[slot, :, position // self.group, :, position % self.group]

    def rows(self, storage: Tensor, slot: int, length: int) -> Tensor:
        """[kv heads, length, head dim] of a slot's first positions; a copy where they lie otherwise."""
        past = self.first(storage[slot].unsqueeze(0), length)[0]
        match self.order:
            case Order.ROWS:
                return past
            case Order.KEYS:
                past = past.permute(0, 2, 1, 3)
            case Order.VALUES:
                past = past.permute(0, 1, 3, 2)
        return past.reshape(self.heads, -1, self.width)[:, :length, : self.head_dim]
