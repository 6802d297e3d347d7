"""Keys and values of every row in flight: one dense pool per layer, [slot, kv head, length, head dim].

A row owns one slot. The pool's length is the attended length (bf16 matmul is fast on dense operands
only), so it grows in small steps and the tail is masked. Truncating a row is lowering its length,
which the pool never sees; sharing a prefix is copying it from one slot to another. Steps recorded as
graphs read the storage where it lay, so `generation` says when it moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH = 32
# Buffers are this much larger than needed, so that most growth touches no new memory.
HEADROOM = 1.25


def rung(count: int, least: int = 8) -> int:
    """The next of the few sizes that things are padded to: powers of two from `least` on, and halfway up."""
    power = least
    while power < count:
        power *= 2
    halfway = power // 4 * 3
    return halfway if max(count, least) <= halfway else power


def rounded_length(length: int) -> int:
    """The pool length that holds `length` tokens: the next multiple of the growth step."""
    return -(-max(length, 1) // GROWTH) * GROWTH


@dataclass
class _Storage:
    """One layer's K or V: a view of the first bytes of a flat buffer.

    across: whether the buffer holds length innermost. If not, one row of `head_dim` numbers follows the
    view, for what nobody reads.
    """

    heads: int
    head_dim: int
    across: bool
    buffer: Tensor
    view: Tensor  # [slot, kv head, length, head dim]

    @property
    def rows(self) -> Tensor:
        """[slots * kv heads * length + 1, head dim]: the view, and the row behind it."""
        return self.buffer[: self.view.numel() + self.head_dim].view(-1, self.head_dim)


class SlotPool:
    """KV storage for `slots` rows of up to `length` tokens.

    Layers are allocated when first written, from the shapes that the model hands over, so the pool
    knows nothing of architectures. What is masked is still multiplied, and NaN times zero is NaN:
    storage is zeroed when allocated and holds finite numbers ever after (`erase` is for the row
    whose model went wrong).

    keys_across: lay K out with its positions innermost, as the CPU's attention reads it; the views
    given out have the same shape either way.

    Resizing lays a layer out anew in a spare buffer and makes its old buffer the spare of the next
    layer, so that no memory is returned to the system and faulted in again.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, keys_across: bool = False) -> None:
        self.device = device
        self.dtype = dtype
        self.keys_across = keys_across
        self.slots = 0
        self.length = 0
        self.generation = 0  # changes whenever storage moves
        self._layers: dict[int, tuple[_Storage, _Storage]] = {}
        self._spare = torch.zeros(0, dtype=dtype, device=device)

    @property
    def layer_count(self) -> int:
        """How many layers have written so far."""
        return len(self._layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers (0 before the first step)."""
        width = sum(part.heads * part.head_dim for pair in self._layers.values() for part in pair)
        return width * self.dtype.itemsize

    def resize(self, slots: int, length: int) -> None:
        """Make room for exactly `slots` rows of `rounded_length(length)` tokens, keeping what fits."""
        length = rounded_length(length)
        if (slots, length) == (self.slots, self.length):
            return
        kept = (slice(min(slots, self.slots)), slice(None), slice(min(length, self.length)))
        self.slots, self.length = slots, length
        self.generation += 1
        for pair in self._layers.values():
            for storage in pair:
                if not storage.across:  # what was written there is not to be seen in another layout
                    storage.rows[-1] = 0
                buffer, view = self._laid_out(self._spare, storage.heads, storage.head_dim, storage.across)
                view[kept] = storage.view[kept]
                self._spare, storage.buffer, storage.view = storage.buffer, buffer, view

    def layer(self, layer: int, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, [slot, kv head, length, head dim], allocated on the first call."""
        if layer not in self._layers:
            self.generation += 1
            empty = torch.zeros(0, dtype=self.dtype, device=self.device)
            across = self.keys_across
            self._layers[layer] = (
                _Storage(heads, key_dim, across, *self._laid_out(empty, heads, key_dim, across)),
                _Storage(heads, value_dim, False, *self._laid_out(empty, heads, value_dim, False)),
            )
        keys, values = self._layers[layer]
        return keys.view, values.view

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer that has been written, as rows [slots * kv heads * length + 1, head dim].

        The last row lies behind all slots: padding goes there. Not for keys laid out across.
        """
        keys, values = self._layers[layer]
        return keys.rows, values.rows

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for pair in self._layers.values():
            for storage in pair:
                storage.view[target, :, :length] = storage.view[source, :, :length]

    def erase(self, slot: int) -> None:
        """Zero a slot that may hold what is not a number, and every stale copy of it."""
        self._spare.zero_()
        for pair in self._layers.values():
            for storage in pair:
                storage.view[slot] = 0
                storage.buffer[storage.view.numel() :] = 0

    def clear(self) -> None:
        """Give the memory back; shapes stay known."""
        self.slots = self.length = 0
        self.generation += 1
        self._spare = torch.zeros(0, dtype=self.dtype, device=self.device)
        for pair in self._layers.values():
            for storage in pair:
                storage.buffer, storage.view = self._laid_out(
                    self._spare, storage.heads, storage.head_dim, storage.across
                )

    def _laid_out(self, buffer: Tensor, heads: int, head_dim: int, across: bool) -> tuple[Tensor, Tensor]:
        """`buffer`, or a larger zeroed one, and its view as a layer of the pool's present size."""
        size = self.slots * heads * self.length * head_dim
        needed = size if across else size + head_dim
        if buffer.numel() < needed:
            room = int(needed * HEADROOM) if self.device.type == "cpu" else needed
            buffer = torch.zeros(room, dtype=self.dtype, device=self.device)
        if across:
            return buffer, buffer[:size].view(self.slots, heads, head_dim, self.length).transpose(2, 3)
        return buffer, buffer[:size].view(self.slots, heads, self.length, head_dim)
