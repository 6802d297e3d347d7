"""The attention function that transformers' unchanged model code calls in a packed step.

A step is one flat list of tokens of many rows. Its StepLayout, handed down through the model's
keyword arguments, says where each token's K and V go and how the tokens group. On a CPU, tokens go to a
compiled kernel (cpu_attention.py), but for the far parts of long prompts. Elsewhere
decoding rows attend densely over the whole slot range, extends gather their own slots, and fresh
prefills attend among themselves; query heads are grouped per kv head, so K and V are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from jfbatch.engine import cpu_attention
from jfbatch.engine.cpu_attention import Projections, Rules
from jfbatch.engine.kv_cache import SlotPool
from jfbatch.engine.transfer import on_device
from jfbatch.errors import ModelError

ATTENTION_NAME = "jfbatch_packed"

# Extends up to this many tokens are padded together; longer ones attend one row at a time.
LONGEST_PADDED = 64
# On a CPU, prompts attend by the kernel up to this position: only later is SDPA faster, and then by
# blocks of so many queries.
KERNEL_REACH = 512
BLOCK = 64
# Below this share of the slots, gathering a group's rows is cheaper than attending over all of them
# (measured: 27 against 21 us per row and layer at length 256).
DENSE_SHARE = 0.75

# Keyword arguments that change nothing here, or whose value None / False means "not used".
_HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "deterministic", "cache_position"})


@dataclass(frozen=True)
class Span:
    """One row's tokens in a step: flat tokens [first, first + count) at positions start.. of a slot.

    prompt: the length of the row's prompt.
    """

    slot: int
    start: int
    first: int
    count: int
    prompt: int = 0

    def cut(self, position: int) -> tuple[Span, Span]:
        """The tokens before a position, and those from it on; either may be empty."""
        before = min(max(position - self.start, 0), self.count)
        return replace(self, count=before), replace(
            self, start=self.start + before, first=self.first + before, count=self.count - before
        )


@dataclass
class PaddedGroup:
    """Rows that attend together, padded to one number of queries.

    slots is None where the group runs over the pool's whole slot range (row r is slot r).
    """

    slots: Tensor | None  # [rows]
    tokens: Tensor  # [rows, queries] flat token index, padding repeats a real token
    positions: Tensor  # [rows, queries]
    real: Tensor | None  # flat [rows * queries] index of the real queries; None = all, in token order
    real_tokens: Tensor  # the flat token of each of them
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [rows, 1, 1, queries, length]; made once per step and window."""
        key = (window, dtype)
        if key not in self.masks:
            self.masks[key] = additive_mask(self.positions, length, window, dtype)[:, None, None]
        return self.masks[key]


def additive_mask(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[..., length]: 0 where a query at each of `positions` may see the key, else minus infinity."""
    allowed = causal_allowed(positions, length, window)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, -torch.inf)


def causal_allowed(positions: Tensor, length: int, window: int | None) -> Tensor:
    """bool [..., length]: which key positions a query at each of `positions` may see."""
    columns = torch.arange(length, device=positions.device)
    allowed = columns <= positions.unsqueeze(-1)
    if window is not None:
        allowed &= columns > positions.unsqueeze(-1) - window
    return allowed


class Layout(Protocol):
    """Where the tokens of one step come from and how they attend; counts the layers that asked."""

    attention_calls: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """Store K and V, [1, kv heads, tokens, head dim]; returns [tokens, heads, value dim].

        query: [1, heads, tokens, head dim].
        """
        ...


class StepLayout:
    """A Layout made anew for every step, of any tokens of any rows.

    wanted: the tokens with logits, where only those are read in the end. awake: whether the threads that
    share the kernel's work need not be woken for it. `threads`: how many these are; `parts`: what the first
    of them attend to, the others to nothing.
    """

    def __init__(
        self, pool: SlotPool, spans: Sequence[Span], wanted: Tensor | None = None, awake: bool = False
    ) -> None:
        self.pool = pool
        self.wanted = wanted
        self.threads = cpu_attention.thread_count()
        self.used_slots = max(span.slot for span in spans) + 1
        self.attention_calls = 0
        device = pool.device
        slots = [span.slot for span in spans for _ in range(span.count)]
        positions = [span.start + offset for span in spans for offset in range(span.count)]
        self.slots = on_device(slots, torch.int64, device)  # [tokens]
        self.positions = on_device(positions, torch.int64, device)  # [tokens]
        self.fresh: list[Span] = []
        self.long: list[Span] = []
        self.groups: list[PaddedGroup] = []
        self._write_indices: dict[int, Tensor] = {}
        self.compiled = pool.for_kernel
        self.parts: list[NDArray[np.int64]] = []  # the kernel's
        self.rules: dict[int, Rules] = {}  # what each layer has asked for
        self._rotation: tuple[Tensor, tuple[NDArray[np.float32], NDArray[np.float32]]] | None = None
        if self.compiled:
            self._divide(spans, 1 if awake else cpu_attention.LEAST_WORK)
        else:
            self._group(spans)

    def _divide(self, spans: Sequence[Span], least_work: int) -> None:
        """Prompts beyond the kernel's reach attend in blocks, all else by the kernel.

        Where a token goes depends on its place in its row alone, and so does its rounding.
        """
        divided: list[tuple[int, int, int, int, bool]] = []
        for span in spans:
            near, far = span.cut(KERNEL_REACH)
            far, output = far.cut(span.prompt)
            if far.count:
                self.long.append(far)
            for part, attends in ((near, True), (far, False), (output, True)):
                if part.count:
                    divided.append((part.slot, part.start, part.first, part.count, attends))
        self.parts = cpu_attention.shared_out(divided, self.threads, self.pool.kv_heads, least_work)

    def _group(self, spans: Sequence[Span]) -> None:
        buckets: dict[int, list[Span]] = {}
        for span in spans:
            if span.start == 0 and span.count > 1:
                self.fresh.append(span)
            elif span.count > LONGEST_PADDED:
                self.long.append(span)
            else:
                buckets.setdefault(1 << (span.count - 1).bit_length(), []).append(span)
        for _, members in sorted(buckets.items()):
            self.groups.append(self._padded(members))

    def _padded(self, spans: list[Span]) -> PaddedGroup:
        device = self.pool.device
        dense = len(spans) >= DENSE_SHARE * self.used_slots
        rows = self.used_slots if dense else len(spans)
        queries = max(span.count for span in spans)
        tokens = [[spans[0].first] * queries for _ in range(rows)]
        positions = [[0] * queries for _ in range(rows)]
        real: list[int] = []
        real_tokens: list[int] = []
        for index, span in enumerate(spans):
            row = span.slot if dense else index
            for offset in range(queries):
                inside = min(offset, span.count - 1)
                tokens[row][offset] = span.first + inside
                positions[row][offset] = span.start + inside
                if offset < span.count:
                    real.append(row * queries + offset)
                    real_tokens.append(span.first + offset)
        in_order = real_tokens == list(range(len(self.slots))) and real == real_tokens and len(real) == rows
        return PaddedGroup(
            slots=None if dense else on_device([span.slot for span in spans], torch.int64, device),
            tokens=on_device(tokens, torch.int64, device),
            positions=on_device(positions, torch.int64, device),
            real=None if in_order else on_device(real, torch.int64, device),
            real_tokens=on_device(real_tokens, torch.int64, device),
        )

    def rotation(self, cosines: Tensor, sines: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A rotary embedding [1, tokens, head dim] as the kernel reads it; made once per step."""
        if self._rotation is None or self._rotation[0] is not cosines:
            first, second = (part[0].float().contiguous().numpy() for part in (cosines, sines))
            self._rotation = cosines, (first, second)
        return self._rotation[1]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store [kv head, tokens, head dim] of K and V; returns the layer's pool, used slots only."""
        heads, tokens, key_dim = key.shape
        keys, values = self.pool.layer(layer, heads, key_dim, value.shape[-1])
        if heads not in self._write_indices:
            head = torch.arange(heads, device=key.device)
            rows = (self.slots[:, None] * heads + head) * self.pool.length + self.positions[:, None]
            self._write_indices[heads] = rows.reshape(-1)
        index = self._write_indices[heads]
        for storage, new in ((keys, key), (values, value)):
            flat = storage.view(-1, storage.shape[-1])
            flat.index_copy_(0, index, new.transpose(0, 1).reshape(tokens * heads, -1).to(storage.dtype))
        return keys[: self.used_slots], values[: self.used_slots]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """See Layout."""
        self.rules[layer] = rules
        rows = query[0].transpose(0, 1)  # [tokens, heads, head dim]
        if self.compiled:
            keys, values = self.pool.layer(layer, key.shape[1], key.shape[-1], value.shape[-1])
            flat = [part[0].transpose(0, 1).flatten(1).contiguous() for part in (query, key, value)]
            projections = Projections(flat[0], flat[1], flat[2], (key.shape[-1], value.shape[-1]))
            output = cpu_attention.attend(projections, query.shape[1], keys, values, self.parts, rules)
            attend_far(self, layer, rows, rules, output)
            return output
        keys, values = self.write(layer, key[0], value[0])
        output = query.new_empty(rows.shape[0], rows.shape[1], value.shape[-1])
        for group in self.groups:
            attended = _attend_group(group, rows, keys, values, rules)
            if group.real is None:
                output = attended.flatten(0, 1)
            else:
                output[group.real_tokens] = attended.flatten(0, 1)[group.real]
        for span in self.fresh:
            part = slice(span.first, span.first + span.count)
            output[part] = _attend_alone(query[:, :, part], key[:, :, part], value[:, :, part], 0, rules)
        attend_far(self, layer, rows, rules, output)
        return output


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    step: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention contract: [1, heads, tokens, head dim] in, [1, tokens, heads, head dim] out.

    Raises ModelError where a layer asks for what a packed step cannot give.
    """
    layer = getattr(module, "layer_idx", None)
    _refuse_unknown(module, step, layer, attention_mask, is_causal, kwargs)
    assert step is not None and layer is not None
    step.attention_calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules = Rules(scale, sliding_window or None, softcap, s_aux)
    return step.attend(layer, query, key, value, rules).unsqueeze(0), None


def attend_far(step: StepLayout, layer: int, rows: Tensor, rules: Rules, output: Tensor) -> None:
    """Let the step's long spans attend to their slots: rows [tokens, heads, head dim] -> those of output."""
    attend = _attend_in_blocks if step.compiled else _attend_alone
    for span in step.long:
        part = slice(span.first, span.first + span.count)
        keys, values = step.pool.past(layer, span.slot, span.start + span.count)
        query = rows[part].transpose(0, 1).unsqueeze(0)
        output[part] = attend(query, keys.unsqueeze(0), values.unsqueeze(0), span.start, rules)


def _refuse_unknown(
    module: nn.Module,
    step: Layout | None,
    layer: int | None,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if step is None or layer is None:
        raise ModelError(f"{name} does not pass on what a packed step needs; this architecture cannot be run")
    if attention_mask is not None:
        raise ModelError(f"{name} brings its own attention mask; this architecture cannot be run")
    if is_causal is False:
        raise ModelError(f"{name} attends in both directions; this architecture cannot be run")
    for argument, content in kwargs.items():
        if argument not in _HARMLESS and content is not None and content is not False:
            raise ModelError(f"{name} asks its attention for {argument!r}; this architecture cannot be run")


def _attend_group(group: PaddedGroup, rows: Tensor, keys: Tensor, values: Tensor, rules: Rules) -> Tensor:
    """[rows, queries, heads, head dim] for one padded group, over the pool or its gathered slots."""
    if group.slots is not None:
        keys, values = keys.index_select(0, group.slots), values.index_select(0, group.slots)
    query = rows.unsqueeze(1) if group.real is None else rows[group.tokens]
    mask = group.mask(keys.shape[2], rules.window, keys.dtype)
    return grouped_heads(query, keys, values, mask, rules)


def grouped_heads(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rules: Rules) -> Tensor:
    """matmul + mask + softmax + matmul with the query heads of one kv head side by side.

    query [rows, queries, heads, head dim]; keys, values [rows, kv heads, length, head dim];
    mask additive, [rows, 1, 1, queries, length]. Scores are softmaxed in float32.
    """
    rows, queries, heads, key_dim = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    share = heads // kv_heads
    grouped = (query * rules.scaling).to(keys.dtype).view(rows, queries, kv_heads, share, key_dim)
    grouped = grouped.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, share * queries, key_dim)
    scores = torch.matmul(grouped, keys.transpose(2, 3)).view(rows, kv_heads, share, queries, length)
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores += mask
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores.dtype).view(1, kv_heads, share, 1, 1)
        scores = torch.cat([scores, sinks.expand(rows, -1, -1, queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if rules.sinks is not None:
        weights = weights[..., :-1]
    weights = weights.to(values.dtype).reshape(rows, kv_heads, share * queries, length)
    attended = torch.matmul(weights, values).view(rows, kv_heads, share, queries, -1)
    return attended.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1).to(query.dtype)


def _attend_alone(query: Tensor, keys: Tensor, values: Tensor, start: int, rules: Rules) -> Tensor:
    """[tokens, heads, head dim] of one row whose queries sit at positions start.. of its own keys.

    query [1, heads, tokens, head dim]; keys, values [1, kv heads, start + tokens, head dim].
    """
    heads, tokens = query.shape[1], query.shape[2]
    length, share = keys.shape[2], heads // keys.shape[1]
    positions = torch.arange(start, start + tokens, device=query.device)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if rules.softcap is not None or rules.sinks is not None:
        mask = additive_mask(positions, length, rules.window, keys.dtype)[None, None, None]
        return grouped_heads(query.transpose(1, 2), keys, values, mask, rules)[0]
    keys, values = keys.repeat_interleave(share, dim=1), values.repeat_interleave(share, dim=1)
    window = rules.window if rules.window is not None and rules.window < length else None
    plain = start == 0 and window is None
    visible = None if plain else causal_allowed(positions, length, window)
    attended = scaled_dot_product_attention(
        query, keys, values, attn_mask=visible, is_causal=plain, scale=rules.scaling
    )
    return attended[0].transpose(0, 1)


def _attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, start: int, rules: Rules) -> Tensor:
    """`_attend_alone` by blocks of queries between multiples of BLOCK, each padded to a whole block.

    So the operations on a token are the same however its prefill was cut into steps.
    """
    stop = start + query.shape[2]
    first, last = start // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK
    keys, values = (pad(past.to(query.dtype), (0, 0, 0, last - stop)) for past in (keys, values))
    padded = pad(query, (0, 0, start - first, last - stop))
    blocks = [
        _attend_alone(
            padded[:, :, base - first : base - first + BLOCK],
            keys[:, :, : base + BLOCK],
            values[:, :, : base + BLOCK],
            base,
            rules,
        )
        for base in range(first, last, BLOCK)
    ]
    return torch.cat(blocks)[start - first : stop - first]


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers. Outside its mask registry: masks are made here."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
