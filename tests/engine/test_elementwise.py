"""What replaces a model's small operations computes the same, each row from itself alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from jfbatch.engine.elementwise import GatedProjection, Normalisation, fuse_elementwise

DTYPES = [torch.float32, torch.bfloat16]


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    scales = torch.logspace(-3, 2, count).view(1, count, 1)
    return (torch.randn(1, count, width, generator=generator) * scales).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
@torch.inference_mode()
def test_normalisation_equals_the_models_own(kind: type[nn.Module], dtype: torch.dtype) -> None:
    module = kind(90)
    nn.init.normal_(module.weight, std=0.5)
    holder = nn.ModuleDict({"norm": module.to(dtype)})
    assert fuse_elementwise(holder) == 1 and isinstance(holder["norm"], Normalisation)
    inputs = rows(7, 90, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(holder["norm"](inputs), module(inputs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_gated_projection_equals_the_models_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = LlamaMLP(LlamaConfig(hidden_size=48, intermediate_size=70, num_attention_heads=1)).to(dtype)
    holder = nn.ModuleDict({"mlp": module})
    assert fuse_elementwise(holder) == 1 and isinstance(holder["mlp"], GatedProjection)
    inputs = rows(9, 48, dtype)
    error = (holder["mlp"](inputs).float() - module(inputs).float()).norm()
    assert error <= (1e-5 if dtype == torch.float32 else 2**-6) * module(inputs).float().norm()


@torch.inference_mode()
def test_what_computes_something_else_is_left_alone() -> None:
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.01

    torch.manual_seed(0)
    gelu = Gemma2MLP(Gemma2Config(hidden_size=16, intermediate_size=24, num_attention_heads=1))
    holder = nn.ModuleDict({"norm": OddRMSNorm(16), "mlp": gelu, "sixteen": LlamaRMSNorm(16).half()})
    before = dict(holder)
    assert fuse_elementwise(holder) == 0
    assert dict(holder) == before


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    holder = nn.ModuleDict(
        {"norm": LlamaRMSNorm(78), "mlp": LlamaMLP(LlamaConfig(hidden_size=78, num_attention_heads=1))}
    ).to(dtype)
    assert fuse_elementwise(holder) == 2
    inputs = rows(300, 78, dtype)
    whole = holder["norm"](inputs)
    for part in (slice(0, 1), slice(3, 50), slice(299, 300)):
        assert torch.equal(holder["norm"](inputs[:, part]), whole[:, part])


@torch.inference_mode()
def test_what_is_not_a_number_stays_so() -> None:
    for dtype in DTYPES:
        norm = Normalisation(torch.ones(8, dtype=dtype), 1e-6)
        inputs = torch.ones(1, 2, 8, dtype=dtype)
        inputs[0, 1, 3] = float("nan")
        output = norm(inputs)
        assert torch.isfinite(output[0, 0]).all() and torch.isnan(output[0, 1]).all()
