"""Token masks that stay on the device: each is sent once, and a row says by a number which one is its own.

Masks are read-only and shared by the rows in one state, so the array itself is the key: it is held here as
long as its copy is, so that no other array can be taken for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine.transfer import copied_to, on_device

MEMORY = 64 << 20  # bytes of masks on the device; 4,000 of a vocabulary of 128,000 tokens
_FIRST_ROOM = 64  # masks


class DeviceMasks:
    """The masks met last, for logits `width` wide, in at most `memory` bytes (but at least one step's)."""

    def __init__(self, device: torch.device, width: int, memory: int = MEMORY) -> None:
        self._device = device
        self._words = -(-width // 32)
        self._width = width
        self._most = max(memory // (4 * self._words), 1)
        self._held: OrderedDict[int, tuple[int, NDArray[np.uint32]]] = OrderedDict()  # met longest ago first
        self._store = torch.zeros(0, self._words, dtype=torch.int32, device=device)
        self._bits = on_device([1 << bit for bit in range(8)], torch.uint8, device)
        self.sent = 0  # masks

    def __len__(self) -> int:
        return len(self._held)

    def places(self, masks: Sequence[NDArray[np.uint32]]) -> list[int]:
        """Where the masks are; those not met before, or too long ago, are sent now.

        masks: uint32 [words], bit t of a mask = token t may come next; tokens beyond it are forbidden.
        Places are good until the next call.
        """
        missing = {id(mask): mask for mask in masks}
        for key in [key for key in missing if key in self._held]:
            self._held.move_to_end(key)
            del missing[key]
        if missing:
            self._send(list(missing.values()), len({id(mask) for mask in masks}))
        return [self._held[id(mask)][0] for mask in masks]

    def place_of(self, mask: NDArray[np.uint32]) -> int | None:
        """Where the mask is; None if it is not on the device."""
        held = self._held.get(id(mask))
        if held is None:
            return None
        self._held.move_to_end(id(mask))
        return held[0]

    def _send(self, masks: list[NDArray[np.uint32]], together: int) -> None:
        """Copy masks to the device, in place of those met longest ago where there is no more room.

        together: how many masks must be there at once, these among them.
        """
        self._make_room(len(masks), together)
        packed = np.zeros((len(masks), self._words), np.uint32)
        places = []
        for row, mask in zip(packed, masks, strict=True):
            content = mask[: self._words]
            row[: len(content)] = content
            full = len(self._held) >= len(self._store)
            place = self._held.popitem(last=False)[1][0] if full else len(self._held)
            self._held[id(mask)] = place, mask
            places.append(place)
        where = on_device(places, torch.int64, self._device)
        self._store.index_copy_(0, where, copied_to(self._device, packed.view(np.int32)))
        self.sent += len(masks)

    def _make_room(self, more: int, together: int) -> None:
        wanted = max(len(self._held) + more, _FIRST_ROOM)
        room = min(1 << (wanted - 1).bit_length(), self._most)
        room = max(room, together)
        if room > len(self._store):
            grown = torch.zeros(room, self._words, dtype=torch.int32, device=self._device)
            grown[: len(self._store)] = self._store
            self._store = grown

    def allowed(self, places: Tensor) -> Tensor:
        """bool [rows, width]: the tokens that the masks at `places` (int64 [rows], on the device) allow."""
        packed = self._store.index_select(0, places).view(torch.uint8)
        return ((packed.unsqueeze(2) & self._bits) != 0).flatten(1)[:, : self._width]
