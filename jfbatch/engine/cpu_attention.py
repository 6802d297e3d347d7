"""Attention on a CPU: decode steps, jumps, drafts and prompts of ordinary length.

K and V are read as they are stored (K with its positions innermost), everything else is float32. Four
queries of a row share each pass over its past, every one in lanes of its own and in one order. So a
row's result does not depend on which rows or how many drafts share its step; with bfloat16 scores one
greedy token in a thousand did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine import cpu_kernels
from jfbatch.engine.cpu_kernels import BLOCK
from jfbatch.errors import ModelError

NO_WINDOW = 1 << 40


def can_attend(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel reads K and V of this device and dtype."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Rules:
    """What one layer asks of its attention beside causality."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads], logits of a key that carries no value


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: Sequence[NDArray[np.int64]],
    rules: Rules,
) -> Tensor:
    """Store K and V of a step's tokens, and let those attend that are to: causally, to their own slot.

    Parameters
    ----------
    query: [tokens, heads, head dim].
    key, value: [tokens, kv heads, head dim] of the step's tokens.
    keys, values: the storage, [slots, kv heads, length, head dim], in a dtype that `can_attend`; keys
        are contiguous with length and head dim exchanged, values as they are; length is a multiple of 4.
    parts: one per thread, int64 [spans, 5]: (slot, start, first, count, whether they attend) says that
        tokens first.. sit at positions start.. of that slot. No slot is in two parts.

    Returns float32 [tokens, heads, value dim]; what no attending span covers is undefined.
    Raises ModelError for heads that are too large.
    """
    if max(keys.shape[-1], values.shape[-1]) > BLOCK:
        raise ModelError(f"attention heads of more than {BLOCK} dimensions cannot be run on a CPU")
    output = torch.empty(*query.shape[:2], values.shape[-1])
    arguments = (
        query.float().contiguous().numpy(),
        stored(key.to(keys.dtype).contiguous()),
        stored(value.to(values.dtype).contiguous()),
        stored(keys.transpose(2, 3)),
        stored(values),
    )
    settings = (
        np.float32(rules.scaling),
        NO_WINDOW if rules.window is None else rules.window,
        np.float32(rules.softcap or 0.0),
        np.empty(0, np.float32) if rules.sinks is None else rules.sinks.detach().float().numpy(),
        output.numpy(),
    )
    in_parallel([partial(cpu_kernels.attend, *arguments, part, *settings) for part in parts])
    return output


def stored(tensor: Tensor) -> NDArray[Any]:
    """A tensor as numpy sees it: bfloat16, which numpy lacks, as its bits."""
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def shared_out(spans: Sequence[tuple[int, int, int, int, bool]]) -> list[NDArray[np.int64]]:
    """The spans of a step in one part for each of torch's threads, of about the same work.

    All spans of a slot are in one part, in their order.
    """
    slots: dict[int, list[tuple[int, int, int, int, bool]]] = {}
    for span in spans:
        slots.setdefault(span[0], []).append(span)
    work = {slot: sum(span[3] * (span[1] + span[3]) for span in own) for slot, own in slots.items()}
    count = max(1, min(torch.get_num_threads(), len(slots)))
    parts: list[list[tuple[int, int, int, int, bool]]] = [[] for _ in range(count)]
    busy = [0] * count
    for slot in sorted(slots, key=lambda slot: -work[slot]):  # the largest first, each to the least busy
        least = busy.index(min(busy))
        parts[least].extend(slots[slot])
        busy[least] += work[slot]
    return [np.array(part, np.int64).reshape(-1, 5) for part in parts]


def in_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, the first one in this thread; returns when all are done. They must release the GIL."""
    others = [_workers().submit(call) for call in calls[1:]]
    calls[0]()
    for other in others:
        other.result()


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="jfbatch-kernel")
