"""Keys and values of every row in flight: one dense pool per layer, [slot, kv head, length, head dim].

A row owns one slot. The pool's length is the attended length (bf16 matmul is fast on dense operands
only), so it grows in small steps and the tail is masked. Truncating a row is lowering its length,
which the pool never sees; sharing a prefix is copying it from one slot to another.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 32


def rounded_length(length: int) -> int:
    """The pool length that holds `length` tokens: the next multiple of the growth step."""
    return -(-max(length, 1) // GROWTH) * GROWTH


class SlotPool:
    """KV storage for `slots` rows of up to `length` tokens.

    Layers are allocated when first written, from the shapes that the model hands over, so the pool
    knows nothing of architectures. Storage is zeroed once: what is masked is still multiplied, and
    NaN times zero is NaN.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.slots = 0
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._shapes: dict[int, tuple[int, int, int]] = {}  # layer -> kv heads, key dim, value dim

    @property
    def layer_count(self) -> int:
        """How many layers have written so far."""
        return len(self._shapes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers (0 before the first step)."""
        width = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in self._shapes.values())
        return width * self.dtype.itemsize

    def resize(self, slots: int, length: int) -> None:
        """Make room for exactly `slots` rows of `rounded_length(length)` tokens, keeping what fits."""
        length = rounded_length(length)
        if (slots, length) == (self.slots, self.length):
            return
        kept_slots, kept_length = min(slots, self.slots), min(length, self.length)
        self.slots, self.length = slots, length
        for layer, (heads, key_dim, value_dim) in self._shapes.items():
            old_keys, old_values = self._layers[layer]
            keys, values = self._allocate(heads, key_dim), self._allocate(heads, value_dim)
            keys[:kept_slots, :, :kept_length] = old_keys[:kept_slots, :, :kept_length]
            values[:kept_slots, :, :kept_length] = old_values[:kept_slots, :, :kept_length]
            self._layers[layer] = keys, values

    def layer(self, layer: int, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, [slot, kv head, length, head dim], allocated on the first call."""
        if layer not in self._layers:
            self._shapes[layer] = (heads, key_dim, value_dim)
            self._layers[layer] = self._allocate(heads, key_dim), self._allocate(heads, value_dim)
        return self._layers[layer]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def clear(self) -> None:
        """Give the storage back; shapes stay known."""
        self.slots = self.length = 0
        for layer, (heads, key_dim, value_dim) in self._shapes.items():
            self._layers[layer] = self._allocate(heads, key_dim), self._allocate(heads, value_dim)

    def _allocate(self, heads: int, head_dim: int) -> Tensor:
        shape = (self.slots, heads, self.length, head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
