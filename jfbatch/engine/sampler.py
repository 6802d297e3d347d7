"""Logits and token masks -> token ids, on a CPU (device_choice.py does the same elsewhere).

Greedy is a masked argmax. With temperature, a token is drawn by inverting the cumulative
distribution at one number that depends on (seed, row key, position) alone, so neither the batch's
size nor its order, nor whether a token was drafted, changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine import masked_argmax
from jfbatch.engine.cpu_attention import by_rows
from jfbatch.engine.transfer import on_device

NOTHING_ALLOWED = "the grammar allows no token of the model's vocabulary here"
NO_NUMBER = "the model gave logits that are not numbers"

_WORTH_SHARING = 16  # rows that one thread handles sooner than two that must be told to

_LEAST_TEMPERATURE = 1e-30

# What the eight tokens of a mask byte get added to their logits: float32 [256, 8].
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen. `position` counts the row's output tokens from 0."""

    key: str
    seed: int
    position: int
    temperature: float


@dataclass(frozen=True)
class Choices:
    """The chosen tokens.

    token_ids: int64 [rows]; log_probabilities: float32 [rows], under the model's own distribution
    before mask and temperature, or None; failures: row index -> why no token could be chosen.
    """

    token_ids: NDArray[np.int64]
    log_probabilities: NDArray[np.float32] | None
    failures: dict[int, str]


@dataclass(frozen=True)
class Chosen:
    """Choices that may still be in the making: `token_ids`, int64 [rows], are the device's.

    `fetch` waits for them; a row that fails has some id, too.
    """

    token_ids: Tensor
    fetch: Callable[[], Choices]


class Chooser(Protocol):
    """Chooses tokens, here or on another device."""

    def choose(
        self,
        logits: Tensor,
        masks: Sequence[NDArray[np.uint32]],
        draws: Sequence[Draw],
        positions: Sequence[int],
    ) -> Chosen:
        """One token per row.

        logits: float32 [positions, vocabulary], left as they are. positions: where each row's logits are.
        masks: uint32 [words] per row, bit t = token t may come next. draws: one per row.
        """
        ...


@dataclass(frozen=True)
class HostChooser:
    """Chooses at once, on the CPU where the logits are."""

    with_log_probabilities: bool = False

    def choose(
        self,
        logits: Tensor,
        masks: Sequence[NDArray[np.uint32]],
        draws: Sequence[Draw],
        positions: Sequence[int],
    ) -> Chosen:
        """See Chooser."""
        stacked = np.zeros((len(masks), max(len(mask) for mask in masks)), np.uint32)
        for row, mask in zip(stacked, masks, strict=True):
            row[: len(mask)] = mask
        choices = choose(logits, stacked, draws, self.with_log_probabilities, positions)
        return Chosen(torch.from_numpy(choices.token_ids), lambda: choices)


def uniform(seed: int, key: str, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (BLAKE2b as the generator)."""
    message = f"{seed}\0{position}\0{key}".encode("utf-8", "surrogatepass")
    return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "big") >> 11) * 2.0**-53


@torch.inference_mode()
def choose(
    logits: Tensor,
    masks: NDArray[np.uint32],
    draws: Sequence[Draw],
    with_log_probabilities: bool = False,
    positions: Sequence[int] | None = None,
) -> Choices:
    """Choose one token per row.

    Parameters
    ----------
    logits: float32 [positions, vocabulary]; may be overwritten where no `positions` are given.
    positions: where each row's logits are; by default one position per row.
    masks: uint32 [rows, words], bit t of a row = token t may come next. Logits beyond the mask are
        forbidden; bits beyond the logits are ignored.
    draws: one per row.

    A row whose allowed logits hold NaN, or whose mask allows nothing, is reported in `failures`;
    its token id means nothing.
    """
    greedy = not with_log_probabilities and all(draw.temperature == 0 for draw in draws)
    if greedy:
        return _best_allowed(logits, masks, range(len(draws)) if positions is None else positions)
    if positions is not None:
        logits = logits[list(positions)]
    normalizers = torch.logsumexp(logits, dim=1) if with_log_probabilities else None
    forbid(logits, masks)
    token_ids = _first_best(logits)
    best = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    hot = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if hot:
        token_ids[hot] = sampled(logits[hot], [draws[row] for row in hot])
    log_probabilities = None
    if normalizers is not None:
        chosen = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        log_probabilities = (chosen - normalizers).numpy()
    ids, best_values = token_ids.numpy(), best.numpy()
    failures = _settle(ids, ~np.isfinite(best_values), ~(best_values < np.inf), masks, logits.shape[1])
    return Choices(ids, log_probabilities, failures)


def _best_allowed(logits: Tensor, masks: NDArray[np.uint32], positions: Sequence[int]) -> Choices:
    """Greedy choices on a CPU, in one pass over the logits of the rows' positions."""
    ids, wrong = np.empty(len(positions), np.int64), np.empty(len(positions), np.bool_)
    numbers, bits = logits.numpy(), logits.view(torch.uint32).numpy()
    places = np.array(positions, np.int64)
    by_rows(
        partial(masked_argmax.best_allowed, numbers, bits),
        (places, masks, ids, wrong),
        len(places) // _WORTH_SHARING,
    )
    return Choices(ids, None, _settle(ids, wrong | (ids < 0), wrong, masks, logits.shape[1]))


def _settle(
    ids: NDArray[np.int64],
    odd: NDArray[np.bool_],
    wrong: NDArray[np.bool_],
    masks: NDArray[np.uint32],
    width: int,
) -> dict[int, str]:
    """Give each odd row a token after all, in place, or say why it has none.

    `wrong`: whether an allowed logit is not a number, or infinite.
    """
    failures: dict[int, str] = {}
    for row in np.flatnonzero(odd):
        allowed = np.flatnonzero(np.unpackbits(masks[row].view(np.uint8), bitorder="little"))
        allowed = allowed[allowed < width]
        if not len(allowed):
            failures[int(row)] = NOTHING_ALLOWED
        elif wrong[row]:
            failures[int(row)] = NO_NUMBER
        else:  # every allowed token has probability 0: still, one of them comes next
            ids[row] = allowed[0]
    return failures


def forbid(logits: Tensor, masks: NDArray[np.uint32]) -> None:
    """Set the logits of tokens outside the masks to -inf, in place, whatever they are.

    A penalty looked up per mask byte is far faster than a mask made of its bits.
    """
    width = logits.shape[1]
    packed = np.ascontiguousarray(masks).view(np.uint8)
    penalties = torch.from_numpy(_PENALTIES.take(packed, axis=0).reshape(len(masks), -1))
    covered = min(penalties.shape[1], width)
    penalties = penalties[:, :covered]
    logits[:, :covered] = torch.where(penalties < 0, penalties, logits[:, :covered])
    logits[:, covered:] = -torch.inf


def _first_best(logits: Tensor) -> Tensor:
    """int64 [rows]: the first largest logit of each row, or a NaN. numpy's argmax is the fast one."""
    return torch.from_numpy(logits.numpy().argmax(axis=1))


def sampled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [rows] drawn from softmax(logits / temperature), on any device; masked logits are -inf."""
    # Less than this is 0 in float32; the likeliest token is certain long before.
    least = [max(draw.temperature, _LEAST_TEMPERATURE) for draw in draws]
    temperatures = on_device(least, torch.float32, logits.device)
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperatures.unsqueeze(1)
    cumulative = torch.softmax(scaled, dim=1).double().cumsum_(dim=1)
    points = [uniform(draw.seed, draw.key, draw.position) for draw in draws]
    targets = on_device(points, torch.float64, logits.device) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=logits.shape[1] - 1)
