"""Keys and values of every row in flight: one dense pool per layer, in one of the orders of kv_layout.py.

A row owns one slot. The pool's length is the attended length (bf16 matmul is fast on dense operands
only), so it grows in small steps and the tail is masked. Truncating a row is lowering its length,
which the pool never sees; sharing a prefix is copying it from one slot to another. Steps recorded as
graphs read the storage where it lay, so `generation` says when it moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jfbatch.engine.kv_layout import KVLayout, Order

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

    Where it lies in rows, one row of `head_dim` numbers follows the view, for what nobody reads.
    """

    layout: KVLayout
    buffer: Tensor
    view: Tensor  # as the layout has it

    @property
    def in_rows(self) -> bool:
        return self.layout.order is Order.ROWS

    @property
    def rows(self) -> Tensor:
        """[slots * kv heads * length + 1, head dim]: the view, and the row behind it."""
        return self.buffer[: self.view.numel() + self.layout.width].view(-1, self.layout.width)


class SlotPool:
    """KV storage for `slots` rows of up to `length` tokens.

    Layers are allocated when first written, from the shapes that the model hands over, so the pool
    knows nothing of architectures. What is masked is still multiplied, and NaN times zero is NaN:
    storage is zeroed when allocated and holds finite numbers ever after (`erase` is for the row
    whose model went wrong).

    for_kernel: lay K and V out as the CPU's kernel reads them, not in rows.

    Resizing lays a layer out anew in a spare buffer and makes its old buffer the spare of the next
    layer, so that no memory is returned to the system and faulted in again.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, for_kernel: bool = False) -> None:
        self.device = device
        self.dtype = dtype
        self.for_kernel = for_kernel
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
    def kv_heads(self) -> int:
        """Of the first layer that has written; 1 before."""
        return next((keys.layout.heads for keys, _ in self._layers.values()), 1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers (0 before the first step)."""
        layouts = [part.layout for pair in self._layers.values() for part in pair]
        width = sum(layout.heads * layout.width for layout in layouts)
        return width * self.dtype.itemsize

    def resize(self, slots: int, length: int) -> None:
        """Make room for exactly `slots` rows of `rounded_length(length)` tokens, keeping what fits."""
        length = rounded_length(length)
        if (slots, length) == (self.slots, self.length):
            return
        kept_slots, kept_length = min(slots, self.slots), min(length, self.length)
        self.slots, self.length = slots, length
        self.generation += 1
        for pair in self._layers.values():
            for storage in pair:
                if storage.in_rows:  # what was written there is not to be seen in another layout
                    storage.rows[-1] = 0
                layout = storage.layout
                buffer, view = self._laid_out(self._spare, layout)
                kept = layout.first(storage.view[:kept_slots], kept_length)
                layout.first(view[:kept_slots], kept_length).copy_(kept)
                self._spare, storage.buffer, storage.view = storage.buffer, buffer, view

    def layer(self, layer: int, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as they are stored, allocated on the first call."""
        if layer not in self._layers:
            self.generation += 1
            orders = (Order.KEYS, Order.VALUES) if self.for_kernel else (Order.ROWS, Order.ROWS)
            empty = torch.zeros(0, dtype=self.dtype, device=self.device)
            layouts = (
                KVLayout(order, heads, width, self.dtype)
                for order, width in zip(orders, (key_dim, value_dim), strict=True)
            )
            keys, values = (_Storage(layout, *self._laid_out(empty, layout)) for layout in layouts)
            self._layers[layer] = keys, values
        keys, values = self._layers[layer]
        return keys.view, values.view

    def past(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of a slot's first tokens, [kv heads, length, head dim]; the layer has been written."""
        keys, values = self._layers[layer]
        return keys.layout.rows(keys.view, slot, length), values.layout.rows(values.view, slot, length)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer that has been written, as rows [slots * kv heads * length + 1, head dim].

        The last row lies behind all slots: padding goes there. Not for a pool of the kernel.
        """
        keys, values = self._layers[layer]
        return keys.rows, values.rows

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for pair in self._layers.values():
            for storage in pair:
                kept = storage.layout.first(storage.view, length)
                kept[target] = kept[source]

    def erase(self, slot: int) -> None:
        """Zero a slot that may hold what is not a number, and every stale copy of it."""
        self._spare.zero_()
        for pair in self._layers.values():
            for storage in pair:
                storage.view[slot] = 0
                storage.buffer[storage.view.numel() :] = 0

    def drop(self, slot: int, position: int) -> None:
        """Zero one token of a slot, of which nobody will know whether it holds numbers."""
        for pair in self._layers.values():
            for storage in pair:
                storage.layout.position(storage.view, slot, position).zero_()

    def clear(self) -> None:
        """Give the memory back; shapes stay known."""
        self.slots = self.length = 0
        self.generation += 1
        self._spare = torch.zeros(0, dtype=self.dtype, device=self.device)
        for pair in self._layers.values():
            for storage in pair:
                storage.buffer, storage.view = self._laid_out(self._spare, storage.layout)

    def _laid_out(self, buffer: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
        """`buffer`, or a larger zeroed one, and its view as a layer of the pool's present size."""
        shape = layout.shape(self.slots, self.length)
        size = math.prod(shape)
        needed = size + layout.width if layout.order is Order.ROWS else size
        if buffer.numel() < needed:
            room = int(needed * HEADROOM) if self.device.type == "cpu" else needed
            buffer = torch.zeros(room, dtype=self.dtype, device=self.device)
        return buffer, buffer[:size].view(shape)
