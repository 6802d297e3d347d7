"""A decoder layer of the Llama kind on a CPU, in eight calls instead of sixty; often part of a stack.

transformers computes Q, K and V by matrices of their own, rotates them by a chain of small operations and
adds what comes out in a pass of its own; on a CPU that is a fifth of a step. A layer is replaced only where a
trial shows that the replacement computes the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jfbatch.engine.attention import Span, StepLayout, attend_far
from jfbatch.engine.cpu_attention import Projections, Rules, attend
from jfbatch.engine.elementwise import GatedProjection, Normalisation, joined
from jfbatch.engine.kv_cache import SlotPool
from jfbatch.engine.linear import PackedLinear
from jfbatch.errors import ModelError

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, ModelError)


class Attention(nn.Module):
    """What lies between the projections: norms of the heads, rotation, attention.

    attention: the module that it does the work of; rules: what that one asks for.
    """

    def __init__(self, attention: Any, rules: Rules) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.rules = rules
        norms = [getattr(attention, name, None) for name in _HEAD_NORMS]
        empty = np.empty(0, np.float32)
        query_factors, key_factors = (empty if norm is None else norm.factors for norm in norms)
        self.factors = query_factors, key_factors
        self.epsilon = max(0.0 if norm is None else float(norm.epsilon) for norm in norms)

    def forward(self, projected: Tensor, embeddings: tuple[Tensor, Tensor], step: StepLayout) -> Tensor:
        """[tokens, Q K V side by side] -> [tokens, heads * head dim]."""
        step.attention_calls += 1
        keys, values = step.pool.layer(self.layer_idx, self.kv_heads, self.head_dim, self.head_dim)
        first_key = self.heads * self.head_dim
        columns = (0, first_key, first_key + self.kv_heads * self.head_dim)
        projections = Projections(
            *(projected, projected, projected, (self.head_dim, self.head_dim), columns),
            rotation=step.rotation(*embeddings),
            factors=self.factors,
            epsilon=self.epsilon,
        )
        output = attend(projections, self.heads, keys, values, step.parts, self.rules)
        attend_far(step, self.layer_idx, output, self.rules, output)
        return output.flatten(1)


class PackedStep(nn.Module):
    """What takes a step's rows through one or more decoder layers, as transformers calls a layer.

    `is_last`: whether what comes after it reads no token but those with logits.
    """

    is_last = False

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        step: StepLayout | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, tokens, width] -> the same shape and dtype; of the last layer zeros for tokens without logits.

        Raises ModelError where the model does not pass on what a packed step needs.
        """
        if step is None or position_embeddings is None or attention_mask is not None:
            raise ModelError("a decoder layer was not called as a packed step calls it")
        wanted = step.wanted if self.is_last else None
        rows = self.computed(hidden_states[0], position_embeddings, step, wanted)
        if wanted is None:
            return rows.unsqueeze(0)
        whole = torch.zeros_like(hidden_states)
        whole[0, wanted] = rows
        return whole

    def computed(
        self, rows: Tensor, embeddings: tuple[Tensor, Tensor], step: StepLayout, wanted: Tensor | None
    ) -> Tensor:
        """[tokens, width] -> [tokens that are wanted, or all, width]; embeddings: cosines and sines."""
        raise NotImplementedError


class DecoderLayer(PackedStep):
    """norm, Q K V, attention, output + rows, norm, gate and up, gated, down + rows.

    layer: what it replaces, a layer that `has_known_parts`; rules: what that one asks of its attention.
    """

    def __init__(self, layer: Any, rules: Rules) -> None:
        super().__init__()
        attention = layer.self_attn
        self.input_layernorm: nn.Module = layer.input_layernorm
        self.qkv_proj: nn.Module = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.attention = Attention(attention, rules)
        self.o_proj: nn.Module = attention.o_proj
        self.post_attention_layernorm: nn.Module = layer.post_attention_layernorm
        self.mlp: GatedProjection = layer.mlp
        keep_attributes(self, layer)

    def computed(
        self, rows: Tensor, embeddings: tuple[Tensor, Tensor], step: StepLayout, wanted: Tensor | None
    ) -> Tensor:
        """See PackedStep."""
        projected = self.qkv_proj(self.input_layernorm(rows))
        attended = self.attention(projected, embeddings, step)
        if wanted is not None:
            rows, attended = rows[wanted], attended[wanted]
        rows = _added(self.o_proj, attended, rows)
        inner = self.mlp.gates(self.mlp.gate_up_proj(self.post_attention_layernorm(rows)))
        return _added(self.mlp.down_proj, inner, rows)


def _added(linear: nn.Module, inputs: Tensor, rows: Tensor) -> Tensor:
    """linear(inputs) + rows."""
    total: Tensor = linear(inputs, rows) if isinstance(linear, PackedLinear) else linear(inputs) + rows
    return total


def keep_attributes(module: nn.Module, replaced: nn.Module) -> None:
    """Give a module what the one that it replaces has: the model may look at it, such as attention_type."""
    for name, attribute in vars(replaced).items():
        if not name.startswith("_") and not hasattr(module, name):
            setattr(module, name, attribute)


def base_of(model: Any) -> Any:
    """What of a model lies below its LM head."""
    return getattr(model, getattr(model, "base_model_prefix", ""), model)


@torch.inference_mode()
def fuse_layers(model: Any, kv_dtype: torch.dtype) -> int:
    """Replace the decoder layers that can be, in place, on the CPU; returns how many.

    Norms and gated projections must have been replaced (elementwise.py), linear layers not yet packed.
    """
    base = base_of(model)
    layers, rotary = getattr(base, "layers", None), getattr(base, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return 0
    count = 0
    for index, layer in enumerate(layers):
        fused = _proven(layer, rotary, kv_dtype) if has_known_parts(layer) else None
        if fused is not None:
            fused.is_last = index == len(layers) - 1
            layers[index] = fused
            count += 1
    return count


def has_known_parts(layer: Any) -> bool:
    """Whether a layer consists of what a DecoderLayer does, as far as its modules tell."""
    if {name for name, _ in layer.named_children()} != _PARTS or not isinstance(layer.mlp, GatedProjection):
        return False
    attention = layer.self_attn
    linears: list[Any] = [getattr(attention, name, None) for name in _PROJECTIONS]
    if not all(type(linear) is nn.Linear for linear in linears) or not hasattr(attention, "head_dim"):
        return False
    if len({linear.bias is None for linear in linears[:3]}) > 1:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)]
    return all(isinstance(norm, Normalisation) for norm in norms)


def _proven(layer: Any, rotary: Any, kv_dtype: torch.dtype) -> DecoderLayer | None:
    """A replacement that computes the same; None where there is none."""
    attention = layer.self_attn
    trial = Trial(rotary, attention.q_proj.weight, kv_dtype)
    try:
        expected, step = trial.of(layer)
        candidate = DecoderLayer(layer, step.rules[attention.layer_idx])
        found, _ = trial.of(candidate)
    except _FAULTS:
        return None
    return candidate if trial.agree(expected, found) else None


class Trial:
    """Two short rows, on which layers can be compared.

    rotary: the model's module that positions are embedded by; weight [columns, width]: one of the layers'.
    """

    def __init__(self, rotary: Any, weight: Tensor, kv_dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(1, 9, weight.shape[1], generator=generator).to(weight.dtype)
        self._rotary = rotary
        self._kv_dtype = kv_dtype

    def of(self, layer: Any) -> tuple[Tensor, StepLayout]:
        """What a layer makes of the rows, and the step in which it did."""
        pool = SlotPool(self.rows.device, self._kv_dtype, for_kernel=True)
        pool.resize(2, 8)
        step = StepLayout(pool, [Span(0, 0, 0, 5), Span(1, 2, 5, 4)])
        positions = step.positions.unsqueeze(0)
        embeddings = self._rotary(self.rows, position_ids=positions)
        computed: Tensor = layer(
            self.rows, position_embeddings=embeddings, position_ids=positions, use_cache=False, step=step
        )
        return computed, step

    def agree(self, expected: Tensor, found: Tensor, k_and_v_rounded: bool = False) -> bool:
        """Whether two results are the same but for rounding.

        k_and_v_rounded: whether K and V of different sums were rounded to bfloat16 on the way, where a few go
        the other way.
        """
        added = (expected.float() - self.rows.float()).norm(dim=-1)
        if self.rows.dtype == torch.float32:
            relative, rounding = 2**-9 if k_and_v_rounded else 1e-5, 1e-6
        else:
            relative, rounding = 2**-5, 2**-8
        error = (expected.float() - found.float()).norm(dim=-1)
        return bool((error <= relative * added + rounding * expected.float().norm(dim=-1)).all())
