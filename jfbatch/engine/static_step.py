"""Steps of few short segments in tensors of fixed shapes and addresses, so that CUDA graphs can replay them.

Everything that differs between steps of one size is data in one buffer of inputs. Each of the pool's
first slots has a row of one or of QUERIES queries, which attends over the pool as it lies; what a
segment has beyond takes further rows, which gather their slot. Padding tokens write behind all slots
and read whatever is there; nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jfbatch.engine.attention import LONGEST_PADDED, Layout, additive_mask, grouped_heads
from jfbatch.engine.cpu_attention import Rules
from jfbatch.engine.graphs import Graphs, Recorder, StepCounts
from jfbatch.engine.kv_cache import SlotPool, rung

if TYPE_CHECKING:
    from jfbatch.engine.runner import LateTokens, Segment

QUERIES = 8  # of a row, where any segment has more than one token
MOST_TOKENS = 1024  # and slots; larger steps gain little: their kernels take longer than their launches
SHORTEST_LENGTH = 128  # that is attended over

Compute = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]
"""(tokens [1, n], positions [1, n], keep [k], layout) -> logits [k, vocabulary]: a model's forward pass."""


@dataclass(frozen=True)
class StepSize:
    """What a step is padded to; steps of equal sizes do the same work on other data.

    tokens, logits: how many. slots: the first so many have a row each of `queries` queries. extra:
    further rows, of QUERIES queries. length: the key positions that all attend over, or mask.
    """

    tokens: int
    logits: int
    slots: int
    length: int
    queries: int
    extra: int

    @staticmethod
    def of(segments: Sequence[Segment], pool: SlotPool) -> StepSize | None:
        """The size of a step; None where a segment is long or the step large, which is computed eagerly."""
        counts = [len(segment.token_ids) for segment in segments]
        longest, tokens = max(counts), rung(sum(counts))
        slots = min(rung(1 + max(segment.slot for segment in segments)), pool.slots)
        if longest > LONGEST_PADDED or max(tokens, slots) > MOST_TOKENS:
            return None
        wanted = sum(len(segment.logits) for segment in segments)
        reach = max(segment.start + len(segment.token_ids) for segment in segments)
        return StepSize(
            tokens=tokens,
            logits=min(slots, tokens) if wanted <= slots else tokens,
            slots=slots,
            length=min(rung(reach, SHORTEST_LENGTH), pool.length),
            queries=1 if longest == 1 else QUERIES,
            # A segment of n > QUERIES tokens takes at most (n - 1) / QUERIES of them.
            extra=tokens // QUERIES if longest > QUERIES else 0,
        )


@cache
def input_parts(size: StepSize) -> dict[str, slice]:
    """The pieces of the buffer of inputs, int64.

    tokens, positions, slots: of each token. keep: the tokens whose logits are wanted. places: the query
    of each token. query_tokens, query_positions: the token of each query and where it is in its row.
    extra_slots: the slot of each extra row. late: the tokens whose ids the device has.
    """
    queries = size.slots * size.queries + size.extra * QUERIES
    lengths = {
        **dict.fromkeys(("tokens", "positions", "slots", "places", "late"), size.tokens),
        "keep": size.logits,
        **dict.fromkeys(("query_tokens", "query_positions"), queries),
        "extra_slots": size.extra,
    }
    stops = accumulate(lengths.values())
    return {name: slice(stop - lengths[name], stop) for name, stop in zip(lengths, stops, strict=True)}


def step_inputs(
    segments: Sequence[Segment], size: StepSize, spare_slot: int, late: Sequence[int] = ()
) -> dict[str, NDArray[np.int64]]:
    """The numbers of a step, without padding (which is 0) but for `slots`: padding is in `spare_slot`."""
    ids = [token for segment in segments for token in segment.token_ids]
    counts = np.array([len(segment.token_ids) for segment in segments])
    starts = np.array([segment.start for segment in segments])
    firsts = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(segments)), counts)  # of each token
    offsets = np.arange(len(ids)) - firsts[row]
    slots = np.full(size.tokens, spare_slot)
    slots[: len(ids)] = np.array([segment.slot for segment in segments])[row]
    positions = starts[row] + offsets
    # The queries of extra rows follow those of the slots.
    extras = -(-np.maximum(counts - size.queries, 0) // QUERIES)
    extra_starts = size.slots * size.queries + QUERIES * (np.cumsum(extras) - extras)
    own = slots[: len(ids)] * size.queries + offsets
    places = np.where(offsets < size.queries, own, extra_starts[row] + offsets - size.queries)
    queries = size.slots * size.queries + size.extra * QUERIES
    query_tokens, query_positions = np.zeros(queries, np.int64), np.zeros(queries, np.int64)
    query_tokens[places] = np.arange(len(ids))
    query_positions[places] = positions
    wanted = [
        first + index for first, segment in zip(firsts, segments, strict=True) for index in segment.logits
    ]
    return {
        "tokens": np.array(ids),
        "positions": positions,
        "slots": slots,
        "places": places,
        "keep": np.array(wanted, np.int64),
        "query_tokens": query_tokens,
        "query_positions": query_positions,
        "extra_slots": np.repeat([segment.slot for segment in segments], extras),
        "late": np.array(late, np.int64),
    }


class _Buffer:
    """The inputs of a step at one address on the device, filled by one copy that nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        most = StepSize(MOST_TOKENS, MOST_TOKENS, MOST_TOKENS, 0, QUERIES, MOST_TOKENS // QUERIES)
        length = _total(most)
        self._host = torch.zeros(length, dtype=torch.int64, pin_memory=on_cuda)
        self._device = torch.zeros(length, dtype=torch.int64, device=device)
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def load(self, size: StepSize, inputs: dict[str, NDArray[np.int64]]) -> None:
        """Let the device have these numbers before what is launched next."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before is on its way no more
        total = _total(size)
        numbers = self._host.numpy()
        numbers[:total] = 0
        for name, part in input_parts(size).items():
            content = inputs[name]
            numbers[part.start : part.start + len(content)] = content
        self._device[:total].copy_(self._host[:total], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def part(self, size: StepSize, name: str) -> Tensor:
        """One of `input_parts`, on the device."""
        return self._device[input_parts(size)[name]]


def _total(size: StepSize) -> int:
    return max(int(part.stop) for part in input_parts(size).values())


class StaticLayout:
    """A Layout whose tensors depend on the step's size and on the buffer of inputs alone."""

    def __init__(self, pool: SlotPool, size: StepSize, buffer: _Buffer) -> None:
        part = partial(buffer.part, size)
        self.attention_calls = 0
        self.tokens, self.positions = part("tokens").unsqueeze(0), part("positions").unsqueeze(0)
        self.keep = part("keep")
        self._pool = pool
        self._size = size
        self._slots = part("slots")
        self._places = part("places")
        self._query_tokens = part("query_tokens")
        self._extra_slots = part("extra_slots")
        self._own = size.slots * size.queries  # queries of the slots' own rows
        positions = part("query_positions")
        self._own_positions = positions[: self._own].view(size.slots, size.queries)
        self._extra_positions = positions[self._own :].view(size.extra, QUERIES)
        self._write_indices: dict[int, Tensor] = {}  # by number of heads
        self._masks: dict[tuple[int | None, torch.dtype], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """See Layout."""
        size = self._size
        keys, values = self._write(layer, key[0], value[0])
        own_mask, extra_mask = self._mask(rules.window, keys.dtype)
        # [queries, heads, head dim]
        queries = query[0].transpose(0, 1).index_select(0, self._query_tokens)
        rows = queries[: self._own].view(size.slots, size.queries, *queries.shape[1:])
        own = grouped_heads(rows, keys[: size.slots], values[: size.slots], own_mask, rules)
        attended = own.flatten(0, 1)
        if size.extra:
            rows = queries[self._own :].view(size.extra, QUERIES, *queries.shape[1:])
            keys, values = (storage.index_select(0, self._extra_slots) for storage in (keys, values))
            extra = grouped_heads(rows, keys, values, extra_mask, rules)
            attended = torch.cat([attended, extra.flatten(0, 1)])
        return attended.index_select(0, self._places)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store [kv head, tokens, head dim] of K and V; returns the layer's pool, attended length only."""
        heads, tokens, key_dim = key.shape
        pool, length = self._pool, self._size.length
        keys, values = pool.layer(layer, heads, key_dim, value.shape[-1])
        index = self._write_index(heads)
        for storage, new in zip(pool.rows(layer), (key, value), strict=True):
            storage.index_copy_(0, index, new.transpose(0, 1).reshape(tokens * heads, -1).to(storage.dtype))
        return keys[:, :, :length], values[:, :, :length]

    def _write_index(self, heads: int) -> Tensor:
        """[tokens * heads]: the row of each in the pool's storage; the one behind all slots for padding."""
        pool = self._pool
        if heads not in self._write_indices:
            head = torch.arange(heads, device=pool.device)
            rows = (self._slots[:, None] * heads + head) * pool.length + self.positions[0][:, None]
            self._write_indices[heads] = rows.clamp_(max=pool.slots * heads * pool.length).flatten()
        return self._write_indices[heads]

    def _mask(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Additive masks [rows, 1, 1, queries, length] of the slots' rows and of the extra rows."""
        length = self._size.length
        key = (None if window is None or window >= length else window, dtype)
        if key not in self._masks:
            own, extra = (
                additive_mask(positions, length, key[0], dtype)[:, None, None]
                for positions in (self._own_positions, self._extra_positions)
            )
            self._masks[key] = own, extra
        return self._masks[key]


class StaticSteps:
    """Computes steps in fixed shapes, by graphs where there is a recorder. All under inference mode.

    compute: the model's forward pass. pool: its storage, not laid out across.
    """

    def __init__(
        self, compute: Compute, pool: SlotPool, counts: StepCounts, recorder: Recorder | None
    ) -> None:
        self._compute = compute
        self._pool = pool
        self.graphs = Graphs(recorder, counts)
        self._buffer = _Buffer(pool.device)
        self._logits: dict[int, Tensor] = {}  # by their number
        self._generation = pool.generation
        self.typical = True

    def size(self, segments: Sequence[Segment]) -> StepSize | None:
        """What a step would be padded to; None where it is computed eagerly."""
        return None if self.graphs.given_up else StepSize.of(segments, self._pool)

    def run(self, segments: Sequence[Segment], size: StepSize, late: LateTokens | None) -> Tensor:
        """float32 logits [number of `logits`, vocabulary] in segment order; they are the caller's own.

        Afterwards `typical` says whether the step's time is that of steps to come.
        """
        if self._pool.generation != self._generation:
            self.graphs.forget()
            self._generation = self._pool.generation
        places = () if late is None else late.places
        inputs = step_inputs(segments, size, self._pool.slots, places)
        self._buffer.load(size, inputs)
        if late is not None:
            tokens = self._buffer.part(size, "tokens")
            tokens.index_copy_(0, self._buffer.part(size, "late")[: len(places)], late.ids)
        replayed = self.graphs.run(size, partial(self._work, size))
        self.typical = replayed or not self.graphs.active
        # A copy, as the next step's logits come to the same place.
        return self._logits[size.logits][: len(inputs["keep"])].to(torch.float32, copy=True)

    def forget(self) -> None:
        """Give back the memory that steps before have left."""
        self.graphs.forget()
        self._logits.clear()

    def _work(self, size: StepSize) -> None:
        """The step, from the inputs to the logits: what is recorded."""
        layout = StaticLayout(self._pool, size, self._buffer)
        logits = self._compute(layout.tokens, layout.positions, layout.keep, layout)
        if size.logits not in self._logits:
            self._logits[size.logits] = torch.empty_like(logits)
        self._logits[size.logits].copy_(logits)
