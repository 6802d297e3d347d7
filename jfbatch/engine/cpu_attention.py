"""Attention of few queries over long pasts on a CPU, compiled by numba: decode steps, jumps and drafts.

K and V are read as they are stored (bfloat16 or float32), everything else is float32, and every row is
computed from its own past alone, in one order. So a row's result does not depend on which rows or how
many drafts share its step; with bfloat16 scores one greedy token in a thousand did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

NO_WINDOW = 1 << 40
NO_SINK = np.float32(-3e38)

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)


def _jit(function: Kernel) -> Kernel:
    """Compiled once per machine; sums may be taken in any order, but always the same one."""
    compiled: Kernel = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=True)(function)
    return compiled


def _widened(number: Any) -> Any:
    """A stored number (bfloat16 as uint16, or float32) as float32; for compiled code only."""
    raise NotImplementedError


@overload(_widened, inline="always")
def _widened_of(number):  # type: ignore[no-untyped-def]  # numba compares the signatures
    if isinstance(number, numba.types.Integer):
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


@_jit
def _exp(x: Any) -> Any:
    """exp(x) for x <= 0, to two units in the last place; unlike libm's it runs on whole vectors."""
    scaled = max(x, np.float32(-87.0)) * _LOG2E
    whole = np.int32(scaled - np.float32(0.5))  # rounded: what is cut off is negative
    rest = (scaled - np.float32(whole)) * _LN2
    power = np.float32(1 / 5040) * rest + np.float32(1 / 720)
    power = power * rest + np.float32(1 / 120)
    power = power * rest + np.float32(1 / 24)
    power = power * rest + np.float32(1 / 6)
    power = power * rest + np.float32(1 / 2)
    power = power * rest + np.float32(1)
    power = power * rest + np.float32(1)
    return np.int32((whole + np.int32(127)) * np.int32(1 << 23)).view(np.float32) * power


@_jit
def _attend(
    query: NDArray[np.float32],  # [tokens, heads, head dim], scaled
    keys: Any,  # [slots, kv heads, length, head dim]
    values: Any,  # [slots, kv heads, length, value dim]
    spans: NDArray[np.int64],  # [spans, 4]: slot, start, first token, count
    window: int,
    softcap: np.float32,  # 0 for none
    sinks: NDArray[np.float32],  # [heads] or empty
    output: NDArray[np.float32],  # [tokens, heads, value dim]
) -> None:
    share = query.shape[1] // keys.shape[1]
    weights = np.empty(keys.shape[2], np.float32)
    for index in range(len(spans)):
        slot, start, first, count = spans[index]
        for kv in range(keys.shape[1]):
            past_keys, past_values = keys[slot, kv], values[slot, kv]
            for token in range(first, first + count):
                stop = start + token - first + 1
                begin = max(stop - window, 0)
                for head in range(kv * share, (kv + 1) * share):
                    sink = sinks[head] if len(sinks) else NO_SINK
                    _score(query[token, head], past_keys, begin, stop, weights)
                    if softcap > 0:
                        for j in range(begin, stop):
                            weights[j] = np.tanh(weights[j] / softcap) * softcap
                    _softmax(weights, begin, stop, sink)
                    _sum(weights, past_values, begin, stop, output[token, head])


@_jit
def _score(query: Any, keys: Any, begin: int, stop: int, scores: Any) -> None:
    """scores[j] = query . keys[j] for j in begin..stop-1."""
    for j in range(begin, stop):
        total = np.float32(0)
        for d in range(len(query)):
            total += query[d] * _widened(keys[j, d])
        scores[j] = total


@_jit
def _softmax(row: Any, begin: int, stop: int, sink: Any) -> None:
    """Softmax of row[begin:stop] in place, with one more logit that carries no value."""
    most = sink
    for j in range(begin, stop):
        most = max(most, row[j])
    total = np.float32(0) if sink == NO_SINK else _exp(sink - most)
    for j in range(begin, stop):
        row[j] = _exp(row[j] - most)
        total += row[j]
    share = np.float32(1) / total
    for j in range(begin, stop):
        row[j] *= share


@_jit
def _sum(weights: Any, values: Any, begin: int, stop: int, output: Any) -> None:
    """output = sum of weights[j] * values[j] for j in begin..stop-1, four at a time."""
    for d in range(len(output)):
        output[d] = 0
    j = begin
    while j + 4 <= stop:
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(len(output)):
            pair = a * _widened(values[j, d]) + b * _widened(values[j + 1, d])
            output[d] += pair + (c * _widened(values[j + 2, d]) + e * _widened(values[j + 3, d]))
        j += 4
    while j < stop:
        for d in range(len(output)):
            output[d] += weights[j] * _widened(values[j, d])
        j += 1


def can_attend(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel reads K and V of this device and dtype."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of rows that each sit at the end of their own slot.

    Parameters
    ----------
    query: [tokens, heads, head dim], already scaled.
    keys, values: [slots, kv heads, length, head dim], in a dtype that `can_attend`.
    spans: (slot, start, first, count) per row: tokens first.. at positions start.. of that slot.

    Returns float32 [tokens, heads, value dim]; what no span covers is undefined. Runs on as many threads
    as torch does.
    """
    wide = query.float().contiguous()
    output = torch.empty(*wide.shape[:2], values.shape[-1])
    threads = max(1, min(torch.get_num_threads(), len(spans)))
    parts = _shared_out(spans, threads)
    arguments = (wide.numpy(), _stored(keys), _stored(values))
    rules = (
        NO_WINDOW if window is None else window,
        np.float32(softcap or 0.0),
        np.empty(0, np.float32) if sinks is None else sinks.detach().float().numpy(),
    )
    helpers = [_workers().submit(_attend, *arguments, part, *rules, output.numpy()) for part in parts[1:]]
    _attend(*arguments, parts[0], *rules, output.numpy())
    for helper in helpers:
        helper.result()
    return output


def _stored(tensor: Tensor) -> NDArray[Any]:
    """K or V as numpy sees it: bfloat16, which numpy lacks, as its bits."""
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _shared_out(spans: Sequence[tuple[int, int, int, int]], parts: int) -> list[NDArray[np.int64]]:
    """The spans in `parts` groups of about the same work; the largest go first, each to the least busy."""
    if parts == 1:
        return [np.array(spans, np.int64)]
    groups: list[list[tuple[int, int, int, int]]] = [[] for _ in range(parts)]
    work = [0] * parts
    for span in sorted(spans, key=lambda span: -span[3] * (span[1] + span[3])):
        least = work.index(min(work))
        groups[least].append(span)
        work[least] += span[3] * (span[1] + span[3])
    return [np.array(group, np.int64) for group in groups]


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="jfbatch-attention")
