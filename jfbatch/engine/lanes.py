"""A step on a few CPU cores as independent steps side by side, each on a core of its own.

Threads that share every matrix product wait for each other two hundred times a step, and idle in all that
lies between the products. Where each core gets rows enough to use the weights well, a core takes rows of its
own through all layers instead; results are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from jfbatch.engine.attention import Span, StepLayout
from jfbatch.engine.cpu_attention import evenly
from jfbatch.engine.kv_cache import SlotPool

# Fewer tokens than this on a core are worth less than sharing the products.
LEAST = 16
# Python's part of a layer runs one lane at a time: more lanes than this would wait for it.
MOST = 4
# What a token costs beside attention, in positions that it attends to.
_REST = 1000


@dataclass(frozen=True)
class Lane:
    """Rows of a step: which of its flat tokens are theirs, [tokens], and their own layout."""

    tokens: Tensor
    layout: StepLayout


class LanedLayout:
    """The layout of a step whose rows are computed in lanes."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self.positions = torch.empty(sum(len(lane.tokens) for lane in lanes), dtype=torch.int64)
        for lane in lanes:
            self.positions[lane.tokens] = lane.layout.positions

    @property
    def attention_calls(self) -> int:
        return min(lane.layout.attention_calls for lane in self.lanes)


def divided(spans: Sequence[Span], lanes: int) -> list[list[Span]]:
    """The spans of a step, one for each slot, in so many lists of about the same work, in their order."""
    by_slot = {span.slot: span for span in spans}
    work = {span.slot: span.count * (_REST + span.start + span.count / 2) for span in spans}
    parts = ([by_slot[slot] for slot in part] for part in evenly(work, lanes))
    return [sorted(part, key=lambda span: span.first) for part in parts]


def laid_out(
    pool: SlotPool, spans: Sequence[Span], wanted: Tensor | None, threads: int
) -> StepLayout | LanedLayout:
    """The layout of a step: in a lane for each of so many threads, if every one gets enough tokens.

    wanted: ascending, the tokens with logits; None for all.
    """
    parts = divided(spans, threads) if 1 < threads <= MOST else []
    if not parts or min(map(_tokens, parts)) < LEAST:
        return StepLayout(pool, spans, wanted)
    lanes = []
    for part in parts:
        tokens = torch.cat([torch.arange(span.first, span.first + span.count) for span in part])
        first, own = 0, []
        for span in part:
            own.append(replace(span, first=first))
            first += span.count
        own_wanted = None if wanted is None else torch.isin(tokens, wanted).nonzero().flatten()
        lanes.append(Lane(tokens, StepLayout(pool, own, own_wanted, threads=1)))
    return LanedLayout(lanes)


def _tokens(spans: Sequence[Span]) -> int:
    return sum(span.count for span in spans)


class LanedModel(nn.Module):
    """A model without its LM head that takes the lanes of a step through itself at the same time.

    model: its layers are DecoderLayers, which share nothing between tokens but the KV storage; that must
    have been written before, so that no lane allocates it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        self._workers: _Workers | None = None

    def __getattr__(self, name: str) -> Any:
        """What the model has: others look for its parts here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, input_ids: Tensor, position_ids: Tensor, step: Any, **settings: Any) -> Any:
        """As the model's own, for a packed step; tokens [1, tokens]."""
        if not isinstance(step, LanedLayout):
            return self.inner(input_ids=input_ids, position_ids=position_ids, step=step, **settings)

        def through(lane: Lane) -> Any:
            with torch.inference_mode():
                return self.inner(
                    input_ids=input_ids[:, lane.tokens],
                    position_ids=position_ids[:, lane.tokens],
                    step=lane.layout,
                    **settings,
                )

        if self._workers is None or self._workers.count < len(step.lanes):
            self._workers = _Workers(len(step.lanes))
        outputs = self._workers.each(through, step.lanes)
        first = outputs[0].last_hidden_state
        states = first.new_empty(1, input_ids.shape[1], first.shape[-1])
        for lane, output in zip(step.lanes, outputs, strict=True):
            states[:, lane.tokens] = output.last_hidden_state
        outputs[0].last_hidden_state = states
        return outputs[0]


def lay_lanes(model: Any) -> None:
    """Let the part of a model below its LM head take lanes, in place."""
    prefix = model.base_model_prefix
    setattr(model, prefix, LanedModel(getattr(model, prefix)))


class _Workers:
    """Threads in which torch uses one core."""

    def __init__(self, count: int) -> None:
        self.count = count
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, "jfbatch-lane", initializer=_use_one_core)
        everyone = threading.Barrier(count)
        try:
            wait([self._pool.submit(everyone.wait) for _ in range(count)])
        except RuntimeError:  # no thread can be started: the others would wait for it for ever
            everyone.abort()
            raise
        torch.set_num_threads(threads)  # what a thread sets is what later ones begin with

    def each(self, function: Callable[[Lane], Any], lanes: Sequence[Lane]) -> list[Any]:
        """The function's results for all lanes. Raises what the first of them raised, once all are done."""
        futures = [self._pool.submit(function, lane) for lane in lanes]
        wait(futures)
        return [future.result() for future in futures]


def _use_one_core() -> None:
    torch.get_num_threads()  # else the first operation would set the number anew
    torch.set_num_threads(1)
