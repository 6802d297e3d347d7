"""Logits and masks -> token ids without leaving the device: `sampler.choose`, for the host to read later.

Masking, the best token and the draw are a few operations over whole rows. Only ids, flags and log
probabilities travel, and nothing waits for them before they are fetched; a next pass may have the ids before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine.device_masks import DeviceMasks
from jfbatch.engine.sampler import NO_NUMBER, NOTHING_ALLOWED, Choices, Chosen, Draw, sampled
from jfbatch.engine.transfer import Reading, on_device

_FAULTS = {1: NOTHING_ALLOWED, 2: NO_NUMBER}


class DeviceChooser:
    """Chooses on the device for logits `width` wide."""

    def __init__(self, device: torch.device, width: int, with_log_probabilities: bool = False) -> None:
        self.masks = DeviceMasks(device, width)
        self._device = device
        self._with_log_probabilities = with_log_probabilities

    def choose(
        self,
        logits: Tensor,
        masks: Sequence[NDArray[np.uint32]],
        draws: Sequence[Draw],
        positions: Sequence[int],
    ) -> Chosen:
        """See Chooser."""
        places = on_device(self.masks.places(masks), torch.int64, self._device)
        return self.choose_at(logits, places, draws, positions)

    def choose_at(
        self, logits: Tensor, places: Tensor, draws: Sequence[Draw], positions: Sequence[int]
    ) -> Chosen:
        """`choose` by the masks at `places`, int64 [rows] on the device."""
        if list(positions) != list(range(len(logits))):
            logits = logits.index_select(0, on_device(positions, torch.int64, self._device))
        allowed = self.masks.allowed(places)
        forbidden = torch.where(allowed, logits, -torch.inf)
        best, token_ids = forbidden.max(dim=1)  # NaN where an allowed logit is
        hot = [row for row, draw in enumerate(draws) if draw.temperature > 0]
        if hot:
            rows = on_device(hot, torch.int64, self._device)
            drawn = sampled(forbidden.index_select(0, rows), [draws[row] for row in hot])
            token_ids = token_ids.index_copy(0, rows, drawn)
        # Every allowed token has probability 0: still, the first of them comes next.
        first = allowed.to(torch.uint8).argmax(dim=1)
        token_ids = torch.where(best == -torch.inf, first, token_ids)
        none = ~allowed.gather(1, first.unsqueeze(1)).squeeze(1)
        faults = torch.where(none, 1, torch.where(best < torch.inf, 0, 2))
        log_probabilities = None
        if self._with_log_probabilities:
            chosen = forbidden.gather(1, token_ids.unsqueeze(1)).squeeze(1)
            log_probabilities = chosen - torch.logsumexp(logits, dim=1)
        return _chosen(token_ids, faults, log_probabilities)


def _chosen(token_ids: Tensor, faults: Tensor, log_probabilities: Tensor | None) -> Chosen:
    """Choices whose way to the host begins now: ids, and the keys of _FAULTS or 0."""
    parts = [token_ids, faults]
    if log_probabilities is not None:
        parts.append(log_probabilities.view(torch.int32).long())
    reading = Reading(torch.stack(parts))

    def fetch() -> Choices:
        ids, found, *bits = reading.wait()
        numbers = bits[0].astype(np.int32).view(np.float32) if bits else None
        return Choices(ids, numbers, {int(row): _FAULTS[int(found[row])] for row in np.flatnonzero(found)})

    return Chosen(token_ids, fetch)
