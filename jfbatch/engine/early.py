"""Choices that the device makes in a pass ahead, before the host knows what the rows' states are there.

Where a row's step was noted before (transitions.py), its next mask is known on the device, and its next token
is chosen as soon as its logits are there. The host, once it has come as far, uses such a choice if the mask
was the right one, and chooses for the other rows itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine.device_choice import DeviceChooser
from jfbatch.engine.sampler import Choices, Chosen, Draw
from jfbatch.engine.sequence import Sequence as Row
from jfbatch.engine.transfer import Reading, on_device
from jfbatch.engine.transitions import Transitions
from jfbatch.engine.window import Window


def draw_of(row: Row, ahead: int = 0) -> Draw:
    """How a row's next token is chosen, or the one `ahead` tokens later."""
    request = row.request
    return Draw(request.key, request.seed, row.output_tokens + ahead, request.temperature)


class Foresight:
    """Where the masks probably are that rows need once they have taken what is being chosen.

    late: the rows -> their indices among the choices `token_ids`, int64 on the device.
    """

    @staticmethod
    def of(late: Mapping[Row, int], token_ids: Tensor, transitions: Transitions) -> Foresight | None:
        """None where less than half of the rows are in states from which any step was noted."""
        known = sum(transitions.number(row.matcher.state_key()) > 0 for row in late)
        return Foresight(late, token_ids, transitions) if 2 * known >= len(late) else None

    def __init__(self, late: Mapping[Row, int], token_ids: Tensor, transitions: Transitions) -> None:
        self.rows = {row: number for number, row in enumerate(late)}
        self.draws = [draw_of(row, 1) for row in late]
        numbers = [transitions.number(row.matcher.state_key()) for row in late]
        indices = on_device(list(late.values()), torch.int64, token_ids.device)
        self.places = transitions.follow(numbers, token_ids.index_select(0, indices))
        self.reading = Reading(self.places)  # begins before the pass ahead does

    def choose(self, chooser: DeviceChooser, logits: Tensor, positions: Mapping[Row, int]) -> Early:
        """What the rows go on with after that, from logits at their `positions` of the pass ahead."""
        rows = [positions[row] for row in self.rows]
        places = self.places.clamp(min=0)  # a row whose mask is not known chooses by any: in vain
        return Early(self.rows, self.reading, chooser.choose_at(logits, places, self.draws, rows))


@dataclass(frozen=True)
class Early:
    """Choices made early: of `rows`, by the masks at the places that are on their way to the host."""

    rows: Mapping[Row, int]
    places: Reading
    chosen: Chosen

    def usable(
        self, windows: Sequence[Window], masks: Sequence[NDArray[np.uint32]], chooser: DeviceChooser
    ) -> dict[int, int]:
        """The windows whose choice was made by their mask -> its row. To be asked before masks are sent."""
        places = self.places.wait()
        found = {}
        for index, (window, mask) in enumerate(zip(windows, masks, strict=True)):
            row = self.rows.get(window.sequence) if window.late else None
            if row is not None and chooser.masks.place_of(mask) == places[row]:
                found[index] = row
        return found


def together(first: Chosen, second: Chosen | None, order: Sequence[int]) -> Chosen:
    """The choices of two, one behind the other, taken in this order."""
    parts = [first] if second is None else [first, second]
    token_ids = torch.cat([part.token_ids for part in parts])
    token_ids = token_ids.index_select(0, on_device(order, torch.int64, token_ids.device))

    def fetch() -> Choices:
        fetched = [part.fetch() for part in parts]
        ids = np.concatenate([choices.token_ids for choices in fetched])
        numbers = [one.log_probabilities for one in fetched if one.log_probabilities is not None]
        start = 0
        failures: dict[int, str] = {}
        for choices in fetched:
            failures |= {start + row: why for row, why in choices.failures.items()}
            start += len(choices.token_ids)
        return Choices(
            ids[list(order)],
            np.concatenate(numbers)[list(order)] if numbers else None,
            {index: failures[row] for index, row in enumerate(order) if row in failures},
        )

    return Chosen(token_ids, fetch)
