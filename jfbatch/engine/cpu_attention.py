"""Attention on a CPU: decode steps, jumps, drafts and prompts of ordinary length.

K and V are read as they are stored (kv_layout.py), sums are float32. Several queries of a row share each pass
over its past, the sums of each in registers of its own and in one order. So a row's result does not depend on
which rows or how many drafts share its step; with the scores of torch's own products in bfloat16 one greedy
token in a thousand did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine import cpu_kernels

NO_WINDOW = 1 << 40
# Tokens times positions that a thread attends to sooner than it could wake another one: about 50 us.
LEAST_WORK = 1500
# Fewer slots than these for each thread may be too unequal to share them out whole.
_FEW_SLOTS = 4
_MOST_THREADS = 64
_SUBMITTING = threading.Lock()
_NOTHING: NDArray[np.float32] = np.empty(0, np.float32)


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


@dataclass(frozen=True)
class Projections:
    """Q, K and V of a step's tokens before they attend, each in a matrix [tokens, columns] of one dtype.

    dims: the dimensions of a head of K and of V. Heads lie side by side, the first one at `columns`; the
    three may be one matrix. Where the kernel is to normalise and rotate: `rotation`, cosines and sines
    float32 [tokens, head dim]; `factors` of the root mean square norms of Q and K, float32 [head dim] or
    empty, and their `epsilon`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    dims: tuple[int, int]
    columns: tuple[int, int, int] = (0, 0, 0)
    rotation: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
    factors: tuple[NDArray[np.float32], NDArray[np.float32]] = (_NOTHING, _NOTHING)
    epsilon: float = 0.0


def attend(
    projections: Projections,
    heads: int,
    keys: Tensor,
    values: Tensor,
    parts: Sequence[NDArray[np.int64]],
    rules: Rules,
) -> Tensor:
    """Store K and V of a step's tokens, and let those attend that are to: causally, to their own slot.

    Parameters
    ----------
    heads: of the queries.
    keys, values: the storage as kv_layout.py has it for the kernel, in a dtype that `can_attend`; its length
        is a multiple of kv_cache.GROWTH.
    parts: one per thread, int64 [spans, 7]: (slot, start, first, count, whether they attend, member, members)
        says that tokens first.. sit at positions start.. of that slot, and which share of the kv heads is
        meant: member 0 of 1 for all. No head of a slot is in two parts.

    Returns [tokens, heads, value dim] in the dtype of the queries. For spans that do not attend it holds
    their queries, normalised and rotated, where these are as wide.
    """
    key_dim, value_dim = projections.dims
    query = projections.query
    output = query.new_empty(query.shape[0], heads, value_dim)
    unturned = np.empty((query.shape[0], 0), np.float32)
    arguments = (
        (stored(query), stored(projections.key), stored(projections.value)),
        projections.columns,
        projections.rotation or (unturned, unturned),
        projections.factors,
        np.float32(projections.epsilon),
        key_dim,
        stored(keys),
        stored(values),
    )
    settings = (
        np.float32(rules.scaling),
        NO_WINDOW if rules.window is None else rules.window,
        np.float32(rules.softcap or 0.0),
        _NOTHING if rules.sinks is None else rules.sinks.detach().float().numpy(),
        stored(output),
    )
    in_parallel([partial(cpu_kernels.attend, *arguments, part, *settings) for part in parts])
    return output


def thread_count() -> int:
    """How many threads share a kernel's work: as many as torch uses, up to a limit."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def stored(tensor: Tensor) -> NDArray[Any]:
    """A tensor as numpy sees it: bfloat16, which numpy lacks, as its bits."""
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def shared_out(
    spans: Sequence[tuple[int, int, int, int, bool]],
    threads: int,
    kv_heads: int,
    least_work: int = LEAST_WORK,
) -> list[NDArray[np.int64]]:
    """The spans of a step in one part for each thread, of about the same work; see `attend`.

    Where slots are few, each of their kv heads may be in another part. Parts are fewer than threads where one
    would have less than `least_work`, in tokens times positions.
    """
    slots: dict[int, list[tuple[int, int, int, int, bool]]] = {}
    for span in spans:
        slots.setdefault(span[0], []).append(span)
    work = {slot: sum(span[3] * (span[1] + span[3]) for span in own) for slot, own in slots.items()}
    count = max(1, min(threads, sum(work.values()) // max(least_work, 1)))
    shares = kv_heads if count > 1 and len(slots) < _FEW_SLOTS * count else 1
    pieces = {(slot, share): effort / shares for slot, effort in work.items() for share in range(shares)}
    return [
        np.array([(*span, share, shares) for slot, share in part for span in slots[slot]], np.int64).reshape(
            -1, 7
        )
        for part in _evenly(pieces, count)
    ]


def _evenly(work: Mapping[tuple[int, int], float], count: int) -> list[list[tuple[int, int]]]:
    """The pieces in so many parts of about the same work: the largest first, each to the least busy part."""
    parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    busy = [0.0] * count
    for piece in sorted(work, key=lambda piece: -work[piece]):
        least = busy.index(min(busy))
        parts[least].append(piece)
        busy[least] += work[piece]
    return parts


def in_parallel(calls: Sequence[Callable[[], object]], on_failure: Callable[[], None] | None = None) -> None:
    """Make all calls at once, the first one in this thread; returns when all are done. They release the GIL.

    on_failure: called if one of them fails or cannot be made, for calls that wait for each other. Raises what
    one of them raised, and RuntimeError where a thread cannot be started.
    """

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:
            if on_failure is not None:
                on_failure()
            raise

    others: list[Future[None]] = []
    try:
        with _SUBMITTING:  # the calls of one caller come before those of another in every thread
            for number, call in enumerate(calls[1:]):
                others.append(_worker(number).submit(guarded, call))
        calls[0]()
    except BaseException:
        if on_failure is not None:
            on_failure()
        raise
    finally:
        for other in others:
            other.exception()
    for other in others:
        other.result()


def by_rows(kernel: Callable[..., None], arrays: Sequence[NDArray[Any]], parts: int) -> None:
    """Call a kernel with arrays of equally many rows, in at most so many parts, one per thread of torch."""
    parts = min(thread_count(), parts) if parts > 1 else 1
    if parts == 1:
        kernel(*arrays)
        return
    rows = len(arrays[0])
    bounds = [rows * index // parts for index in range(parts + 1)]
    in_parallel(
        [partial(kernel, *(array[start:stop] for array in arrays)) for start, stop in pairwise(bounds)]
    )


@cache
def _worker(number: int) -> ThreadPoolExecutor:
    """A thread for the calls of this number: those that wait for each other must not queue in one thread."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"jfbatch-kernel-{number}")
