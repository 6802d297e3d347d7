"""Decoder layers in eight calls compute what the model's own do, and only those that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from jfbatch.engine.decoder_layer import DecoderLayer
from jfbatch.engine.decoder_stack import DecoderStack
from jfbatch.engine.runner import Runner, Segment

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "llama": lambda shape: LlamaForCausalLM(LlamaConfig(**shape)),
    "llama with biases": lambda shape: LlamaForCausalLM(
        LlamaConfig(**shape, attention_bias=True, mlp_bias=True)
    ),
    "qwen2": lambda shape: Qwen2ForCausalLM(Qwen2Config(**shape)),
    "qwen3": lambda shape: Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16)),
    "mistral": lambda shape: MistralForCausalLM(MistralConfig(**shape, sliding_window=20)),
    "windows in some layers": lambda shape: Qwen2ForCausalLM(
        Qwen2Config(**shape, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    ),
}


def made(name: str, dtype: torch.dtype, shape: dict[str, Any] = SHAPE) -> Any:
    torch.manual_seed(3)
    model = MODELS[name](shape)
    for parameter in model.parameters():  # biases and norms that do something
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model.to(dtype)


def tokens(row: int, count: int) -> list[int]:
    return torch.randint(1, 160, (count,), generator=torch.Generator().manual_seed(row)).tolist()


def layers_of(runner: Runner) -> list[Any]:
    return list(runner.model.model.layers)


@torch.inference_mode()
def logits(runner: Runner) -> Tensor:
    """Of a row in three parts, past the kernel's reach, beside one that decodes token by token."""
    runner.pool.resize(0, 1)
    runner.pool.resize(2, 640)
    long, short = tokens(1, 620), tokens(2, 40)
    found = [runner.forward([Segment(0, 0, long[:500], [499], 610), Segment(1, 0, short[:38], [37], 38)])]
    found.append(
        runner.forward([Segment(0, 500, long[500:615], [0, 114], 610), Segment(1, 38, short[38:39])])
    )
    found.append(runner.forward([Segment(0, 615, long[615:], [4], 610), Segment(1, 39, short[39:], [0])]))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_replaced_layers_computes_the_same(name: str, dtype: torch.dtype) -> None:
    fused = Runner(made(name, dtype))
    assert all(type(layer) is DecoderLayer for layer in layers_of(fused))
    plain = Runner(made(name, dtype), pack=False)
    expected, found = logits(plain), logits(fused)
    if dtype == torch.float32:  # K and V are rounded to bfloat16, once in a while the other way
        assert (expected - found).norm() <= 2e-3 * expected.norm()
    else:
        assert (expected - found).norm() <= 0.05 * expected.norm()


@torch.inference_mode()
def test_a_token_alone_has_the_logits_it_has_in_company() -> None:
    runner = Runner(made("llama", torch.float32))
    runner.pool.resize(2, 32)
    segments = [Segment(0, 0, tokens(1, 9), [8]), Segment(1, 0, tokens(2, 1), [0])]
    together = runner.forward(segments)
    assert torch.equal(runner.forward(segments[1:]), together[1:])


class Lessened(LlamaDecoderLayer):
    """Has the parts of a Llama layer, and adds nine tenths of what that adds."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        whole = super().forward(hidden_states, *arguments, **keywords)
        return hidden_states + 0.9 * (whole - hidden_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_adds_a_little_less_is_left_alone(dtype: torch.dtype) -> None:
    odd = made("llama", torch.float32)
    odd.model.layers[1] = Lessened(odd.config, 1)
    assert [type(layer) is DecoderLayer for layer in layers_of(Runner(odd.to(dtype)))] == [True, False, True]


def test_rounding_alone_leaves_no_layer_out() -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    for seed in range(6):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **wide})).to(torch.bfloat16)
        assert all(isinstance(layer, DecoderStack) for layer in layers_of(Runner(model)))


def test_what_computes_something_else_is_left_alone() -> None:
    gemma = Runner(Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)))
    assert not any(isinstance(layer, DecoderLayer) for layer in layers_of(gemma))
    half = Runner(made("llama", torch.float16))
    assert not any(isinstance(layer, DecoderLayer) for layer in layers_of(half))
