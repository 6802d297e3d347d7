"""What the device knows of automata: from which state a token led to which mask, as rows have gone before.

Grammars are explored as they are used, and so is this: the host notes each step that a row takes, and the
next row in that state has its mask found on the device, before the host knows which token was chosen. A table
of fixed size, in buckets of a few places; what is new takes the place of what was put there longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from jfbatch.engine.transfer import on_device

BUCKETS, WAYS = 1 << 14, 8  # 2 MiB on the device
MOST_STATES = 1 << 16
UNKNOWN = -1
_STATE_FACTOR, _TOKEN_FACTOR = 2_654_435_761, 40_503  # products stay below 2^63


class Transitions:
    """(state, token) -> the place of the next state's mask (device_masks.py).

    States are known by numbers, given when first noted and never given again. That a mask is still at its
    place is for the caller to check.
    """

    def __init__(self, device: torch.device, buckets: int = BUCKETS, most_states: int = MOST_STATES) -> None:
        self._device = device
        self._buckets = buckets
        self._most_states = most_states
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._last_number = 0
        self._slots: dict[int, int] = {}  # key -> where it is
        self._keys = [0] * (buckets * WAYS)
        self._values = [UNKNOWN] * (buckets * WAYS)
        self._turns = bytearray(buckets)  # the next of a bucket's ways to be given up
        self._changed: set[int] = set()
        self._device_keys = torch.zeros(buckets, WAYS, dtype=torch.int64, device=device)
        self._device_values = torch.full((buckets, WAYS), UNKNOWN, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self._slots)

    def number(self, state: Hashable | None) -> int:
        """The number of a state; 0 if no token from there has been noted."""
        return self._numbers.get(state, 0)

    def note(self, state: Hashable, token_id: int, place: int) -> None:
        """`token_id` leads from this state to one whose mask is at `place`."""
        number = self._numbers.get(state)
        if number is None:
            number = self._last_number = self._last_number + 1
            self._numbers[state] = number
            if len(self._numbers) > self._most_states:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(state)
        key = number << 32 | token_id
        slot = self._slots.get(key)
        if slot is None:
            slot = self._make_place(number, token_id)
            self._slots[key] = slot
            self._keys[slot] = key
        elif self._values[slot] == place:
            return
        self._values[slot] = place
        self._changed.add(slot)

    def _make_place(self, number: int, token_id: int) -> int:
        bucket = (number * _STATE_FACTOR + token_id * _TOKEN_FACTOR >> 8) & (self._buckets - 1)
        way = self._turns[bucket]
        self._turns[bucket] = (way + 1) % WAYS
        slot = bucket * WAYS + way
        self._slots.pop(self._keys[slot], None)
        return slot

    def follow(self, numbers: Sequence[int], token_ids: Tensor) -> Tensor:
        """int64 [rows], on the device: the places of the masks that come next, or UNKNOWN.

        numbers: of the rows' states. token_ids: int64 [rows], what is taken there, on the device.
        """
        self._send()
        states = on_device(numbers, torch.int64, self._device)
        buckets = (states * _STATE_FACTOR + token_ids * _TOKEN_FACTOR >> 8) & (self._buckets - 1)
        found = self._device_keys.index_select(0, buckets) == (states << 32 | token_ids).unsqueeze(1)
        values = self._device_values.index_select(0, buckets)
        return torch.where(found, values, UNKNOWN).amax(dim=1)

    def _send(self) -> None:
        """Bring the device up to date."""
        if not self._changed:
            return
        slots = list(self._changed)
        self._changed.clear()
        news = on_device(
            [slots, [self._keys[slot] for slot in slots], [self._values[slot] for slot in slots]],
            torch.int64,
            self._device,
        )
        self._device_keys.view(-1).index_copy_(0, news[0], news[1])
        self._device_values.view(-1).index_copy_(0, news[0], news[2])
