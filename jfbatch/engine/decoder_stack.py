"""All decoder layers of the Llama kind as one module, on a CPU: a step's rows go through them in one call.

Weights lie in panels of columns, as the products of vector_products.py read them. These take less time than
oneDNN's, before each of which there is a call, and threads to wake.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jfbatch.engine import cpu_layers
from jfbatch.engine.attention import StepLayout, attend_far
from jfbatch.engine.barrier import Barrier
from jfbatch.engine.cpu_attention import NO_WINDOW, in_parallel, stored
from jfbatch.engine.decoder_layer import (
    DecoderLayer,
    PackedStep,
    Trial,
    base_of,
    keep_attributes,
)
from jfbatch.engine.vector_products import HAS_AMX, PANEL

# More threads than these would wait for each other too long, or so it is feared: it has not been measured.
MOST_THREADS = 8
_NO_SPANS = np.empty((0, 7), np.int64)


class DecoderStack(PackedStep):
    """What decoder layers do, one after the other. `linear_shapes`: [out, in] of their linear layers.

    layers: DecoderLayers that `can_stack`, on the CPU, their linear layers not packed. The list is emptied as
    they are copied, so that no weight need be there twice.
    """

    is_last = True

    def __init__(self, layers: list[DecoderLayer]) -> None:
        super().__init__()
        first_layer = layers[0]
        attentions = [layer.attention for layer in layers]
        first = attentions[0]
        self.heads, self.kv_heads, self.head_dim = first.heads, first.kv_heads, first.head_dim
        self.rules = [(attention.layer_idx, attention.rules) for attention in attentions]
        rules = [attention.rules for attention in attentions]
        stacks = [
            PanelStack(len(layers), linear, parts)
            for linear, parts in zip(_linears(layers[0]), (1, 1, 2, 1), strict=True)
        ]
        self.linear_shapes = [tuple(linear.weight.shape) for layer in layers for linear in _linears(layer)]
        qkv, output, gated, down = (stack.arrays for stack in stacks)
        self.layers = cpu_layers.Layers(
            *(qkv, output, gated, down),
            norms=np.array([[norm.factors for norm in _norms(layer)] for layer in layers]),
            query_norms=np.array([attention.factors[0] for attention in attentions]),
            key_norms=np.array([attention.factors[1] for attention in attentions]),
            epsilons=np.array([_epsilons(layer) for layer in layers], np.float32),
            scaling=np.array([rule.scaling for rule in rules], np.float32),
            windows=np.array([NO_WINDOW if rule.window is None else rule.window for rule in rules], np.int64),
            softcaps=np.array([rule.softcap or 0.0 for rule in rules], np.float32),
            sinks=np.empty(0, np.float32),
        )
        for index in range(len(layers)):
            for stack, linear in zip(stacks, _linears(layers.pop(0)), strict=True):
                stack.take(index, linear)
        self.spent: dict[str, float] = {}  # seconds of the last call, by what they went to
        keep_attributes(self, first_layer)

    def computed(
        self, rows: Tensor, embeddings: tuple[Tensor, Tensor], step: StepLayout, wanted: Tensor | None
    ) -> Tensor:
        """See PackedStep."""
        step.attention_calls += len(self.rules)
        rows = rows.clone(memory_format=torch.contiguous_format)
        if wanted is None:
            wanted = torch.arange(len(rows))
        work = _Pass(self, rows, embeddings, step, wanted)
        if step.long:
            for number, (layer, rules) in enumerate(self.rules):
                work.run(2 * number, 2 * number + 1)
                attend_far(step, layer, work.attended, rules, work.attended)
                work.run(2 * number + 1, 2 * number + 2)
        else:
            work.run(0, 2 * len(self.rules))
        self.spent = work.spent()
        return rows[: len(wanted)]


class PanelStack:
    """A linear layer of so many decoder layers, each as large as `like`.

    parts: its columns are so many parts side by side, whose panels are to lie in turn.
    """

    def __init__(self, layers: int, like: nn.Linear, parts: int) -> None:
        columns, terms = like.weight.shape
        group = 4 // like.weight.itemsize
        shape = layers, columns // PANEL // parts, parts, terms // group, PANEL, group
        self._weights = torch.empty(shape, dtype=like.weight.dtype)
        biases = np.zeros((layers, columns), np.float32)
        self.arrays = cpu_layers.Panels(stored(self._weights.flatten(1, 2)), biases)

    def take(self, layer: int, linear: nn.Linear) -> None:
        """Copy the weights and the bias of a layer to its place."""
        target = self._weights[layer]
        panels, parts, terms, _, group = target.shape
        source = linear.weight.view(parts, panels, PANEL, terms, group)
        target.copy_(source.permute(1, 0, 3, 2, 4))
        if linear.bias is not None:
            bias = linear.bias.float().view(parts, panels, PANEL)
            self.arrays.biases[layer] = bias.transpose(0, 1).flatten().numpy()


class _Pass:
    """A step's pass through a stack: rows [tokens, width] change in place. `attended`: what they do inside.

    wanted: the tokens that end up in the first rows.
    """

    def __init__(
        self,
        stack: DecoderStack,
        rows: Tensor,
        embeddings: tuple[Tensor, Tensor],
        step: StepLayout,
        wanted: Tensor,
    ) -> None:
        self.attended = rows.new_empty(len(rows), stack.heads, stack.head_dim)
        self._layers = stack.layers
        self._barrier = Barrier()
        heads = stack.kv_heads, stack.head_dim, stack.head_dim
        self._storage = storage = [step.pool.layer(layer, *heads) for layer, _ in stack.rules]
        cosines, sines = step.rotation(*embeddings)
        self._step = cpu_layers.Step(
            rows=stored(rows),
            projected=stored(rows.new_empty(len(rows), self._layers.qkv.biases.shape[1])),
            attended=stored(self.attended),
            inner=stored(rows.new_empty(len(rows), self._layers.gated.biases.shape[1] // 2)),
            cosines=cosines,
            sines=sines,
            keys=stored(storage[0][0]),
            values=stored(storage[0][1]),
            addresses=np.array([[part.data_ptr() for part in pair] for pair in storage], np.int64),
            wanted=wanted.numpy(),
            barrier=self._barrier.numbers,
        )
        parts = [*step.parts, *[_NO_SPANS] * (step.threads - len(step.parts))]
        self._workers = [
            cpu_layers.Worker(
                member=member,
                members=len(parts),
                spans=spans,
                normed=stored(torch.empty_like(rows)),
                both=stored(rows.new_empty(cpu_layers.BLOCK, 2 * PANEL)),
                spent=np.zeros(len(cpu_layers.PARTS) + 2, np.int64),
            )
            for member, spans in enumerate(parts)
        ]

    def run(self, first: int, end: int) -> None:
        """Take the rows through some halves of layers: up to attention, and what comes after it."""
        shared = self._layers, self._step
        calls = [partial(cpu_layers.run_layers, *shared, worker, first, end) for worker in self._workers]
        in_parallel(calls, on_failure=self._barrier.abort)

    def spent(self) -> dict[str, float]:
        """Seconds of the first thread, by what they went to."""
        seconds = 1e-9 * self._workers[0].spent
        return dict(zip(cpu_layers.PARTS, seconds.tolist(), strict=False))


@torch.inference_mode()
def stack_layers(model: Any, kv_dtype: torch.dtype) -> bool:
    """Make the decoder layers of a model one module, in place, where that is possible and computes the same.

    Their linear layers must not have been packed.
    """
    base = base_of(model)
    layers = list(base.layers)
    if not can_stack(layers):
        return False
    trial = Trial(base.rotary_emb, layers[0].qkv_proj.weight, kv_dtype)
    (expected, _), (found, _) = trial.of(layers[0]), trial.of(DecoderStack(layers[:1]))
    if not trial.agree(expected, found, k_and_v_rounded=kv_dtype == torch.bfloat16):
        return False
    base.layers = nn.ModuleList()
    base.layers.append(DecoderStack(layers))
    return True


def can_stack(layers: Sequence[Any]) -> bool:
    """Whether a stack does what these layers do, and sooner: all of one shape, of whole panels."""
    if torch.get_num_threads() > MOST_THREADS or not all(type(layer) is DecoderLayer for layer in layers):
        return False
    if any(layer.attention.rules.sinks is not None for layer in layers):
        return False
    shapes = {tuple(linear.weight.shape for linear in _linears(layer)) for layer in layers}
    if len(shapes) > 1 or len({_kind(layer) for layer in layers}) > 1:
        return False
    if HAS_AMX and layers[0].qkv_proj.weight.dtype == torch.bfloat16:
        return False
    return all(width % PANEL == 0 for shape in shapes.pop() for width in shape)


def _kind(layer: Any) -> tuple[Any, ...]:
    """What must be the same of all layers beside the shapes of their weights."""
    attention = layer.attention
    dtypes = {linear.weight.dtype for linear in _linears(layer)}
    norms = tuple(factors.shape for factors in attention.factors)
    return attention.heads, attention.kv_heads, attention.head_dim, norms, frozenset(dtypes)


def _linears(layer: Any) -> tuple[Any, ...]:
    return layer.qkv_proj, layer.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj


def _norms(layer: Any) -> tuple[Any, Any]:
    return layer.input_layernorm, layer.post_attention_layernorm


def _epsilons(layer: Any) -> list[float]:
    return [*(norm.epsilon for norm in _norms(layer)), layer.attention.epsilon]
