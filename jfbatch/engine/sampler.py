"""Logits and token masks -> token ids.

Greedy is a masked argmax. With temperature, a token is drawn by inverting the cumulative
distribution at one number that depends on (seed, row key, position) alone, so neither the batch's
size nor its order, nor whether a token was drafted, changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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


def uniform(seed: int, key: str, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (BLAKE2b as the generator)."""
    message = f"{seed}\0{position}\0{key}".encode("utf-8", "surrogatepass")
    return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "big") >> 11) * 2.0**-53


@torch.inference_mode()
def choose(
    logits: Tensor, masks: NDArray[np.uint32], draws: Sequence[Draw], with_log_probabilities: bool = False
) -> Choices:
    """Choose one token per row.

    Parameters
    ----------
    logits: float32 [rows, vocabulary]; overwritten.
    masks: uint32 [rows, words], bit t of a row = token t may come next. Logits beyond the mask are
        forbidden; bits beyond the logits are ignored.
    draws: one per row.

    A row whose allowed logits hold NaN, or whose mask allows nothing, is reported in `failures`;
    its token id means nothing.
    """
    rows, width = logits.shape
    normalizers = torch.logsumexp(logits, dim=1) if with_log_probabilities else None
    forbidden = forbidden_tokens(masks, width, logits.device)
    logits.masked_fill_(forbidden, -torch.inf)
    best, token_ids = logits.max(dim=1)
    hot = [row for row in range(rows) if draws[row].temperature > 0]
    if hot:
        token_ids[hot] = _sampled(logits[hot], [draws[row] for row in hot])
    log_probabilities = None
    if normalizers is not None:
        chosen = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        log_probabilities = (chosen - normalizers).cpu().numpy()
    ids = token_ids.cpu().numpy()
    failures: dict[int, str] = {}
    for row in np.flatnonzero(~np.isfinite(best.cpu().numpy())):
        fault = _explain(logits[row], ~forbidden[row])
        if isinstance(fault, str):
            failures[int(row)] = fault
        else:
            ids[row] = fault
    return Choices(ids, log_probabilities, failures)


def forbidden_tokens(masks: NDArray[np.uint32], width: int, device: torch.device) -> Tensor:
    """bool [rows, width] on `device`: True where a token may not come next."""
    packed = np.ascontiguousarray(~masks).view(np.uint8)
    covered = masks.shape[1] * 32
    if device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_))
    else:  # the packed bits travel, the device unpacks them
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        words = torch.from_numpy(packed).to(device).unsqueeze(-1)
        bits = ((words >> shifts) & 1).bool().flatten(1)
    if covered >= width:
        return bits[:, :width]
    return torch.nn.functional.pad(bits, (0, width - covered), value=True)


def _sampled(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Token ids [rows] drawn from softmax(logits / temperature); masked logits are -inf."""
    temperatures = torch.tensor([draw.temperature for draw in draws], device=logits.device)
    best = logits.max(dim=1, keepdim=True).values
    weights = torch.exp((logits - best) / temperatures.unsqueeze(1)).nan_to_num_(0.0)
    cumulative = weights.double().cumsum_(dim=1)
    points = [uniform(draw.seed, draw.key, draw.position) for draw in draws]
    targets = torch.tensor(points, dtype=torch.float64, device=logits.device) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, targets.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=logits.shape[1] - 1)


def _explain(masked_logits: Tensor, allowed: Tensor) -> int | str:
    """A token for a row whose best allowed logit is not finite, or why there is none."""
    if not bool(allowed.any()):
        return "the grammar allows no token of the model's vocabulary here"
    if bool(torch.isnan(masked_logits).any()):
        return "the model gave NaN logits"
    # +inf or, for every allowed token, -inf: still an order, in which the first best one wins.
    best = masked_logits.max()
    return int(((masked_logits == best) & allowed).nonzero()[0, 0])
