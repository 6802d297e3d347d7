"""Packed linear layers: same results, shapes and sharing; what cannot be packed stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jfbatch.engine.linear import PackedLinear, can_pack, pack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_what_the_layer_did(dtype: torch.dtype, bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"oneDNN packs no {dtype} weights on this machine")
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    for shape in ((7, 24), (1, 5, 24), (1, 0, 24)):
        inputs = torch.randn(shape).to(dtype)
        with torch.inference_mode():
            output, expected = packed(inputs), linear(inputs)
        assert output.shape == expected.shape
        assert output.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert torch.allclose(output, expected, atol=tolerance, rtol=tolerance)
    assert packed.weight.shape == linear.weight.shape


class Subclass(nn.Linear):
    """A linear layer with a forward of its own."""


def test_only_plain_layers_are_replaced_and_shared_ones_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, Subclass(8, 8)), nn.Linear(8, 8).half())
    assert can_pack(torch.float32)
    assert pack_linears(model) == 1
    assert isinstance(model[0], PackedLinear)
    assert model[0] is model[2][0]
    assert isinstance(model[2][1], Subclass)
    assert type(model[3]) is nn.Linear


def test_a_tied_embedding_keeps_its_weight() -> None:
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    expected = head(torch.ones(1, 8))
    pack_linears(model)
    assert embedding.weight.device.type == "cpu"
    assert torch.allclose(model["head"](torch.ones(1, 8)), expected, atol=1e-5)
