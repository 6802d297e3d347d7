"""Products of rows with packed weights: any number of rows, bfloat16 rounded to the nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from jfbatch.engine import cpu_layers
from jfbatch.engine.cpu_attention import stored
from jfbatch.engine.decoder_stack import PanelStack
from jfbatch.engine.vector_products import PANEL, TILE_ROWS

DTYPES = [torch.float32, torch.bfloat16]


def made(panels: int, terms: int, dtype: torch.dtype, bias: bool) -> tuple[nn.Linear, PanelStack]:
    torch.manual_seed(panels + terms)
    linear = nn.Linear(terms, panels * PANEL, bias=bias, dtype=dtype).requires_grad_(False)
    stack = PanelStack(2, linear, 1)
    stack.take(1, linear)
    return linear, stack


def product(
    stack: PanelStack, inputs: Tensor, output: Tensor, accumulate: bool = False, members: int = 1
) -> Tensor:
    weights, biases = stack.arrays.weights[1], stack.arrays.biases[1]
    for member in range(members):
        work = 0, len(inputs), member, members
        cpu_layers.linear(weights, biases, stored(inputs), stored(output), work, accumulate)
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 2 * TILE_ROWS + 1) | st.sampled_from([125, 126, 127, 300]),
    panels=st.integers(1, 5),
    terms=st.sampled_from([64, 128, 576]),
    bias=st.booleans(),
    members=st.integers(1, 7),
)
def test_products_are_those_of_torch_but_for_rounding(
    dtype: torch.dtype, rows: int, panels: int, terms: int, bias: bool, members: int
) -> None:
    linear, stack = made(panels, terms, dtype, bias)
    inputs = torch.randn(rows, terms).to(dtype)
    held = torch.randn(rows, panels * PANEL).to(dtype)
    exact = nn.functional.linear(
        inputs.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
    )
    bound = 1e-5 if dtype == torch.float32 else 2**-8
    for accumulate, expected in ((False, exact), (True, exact + held.double())):
        found = product(stack, inputs, held.clone(), accumulate, members).double()
        assert ((found - expected).abs() <= bound * (1 + expected.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    _, stack = made(3, 192, dtype, bias=True)
    inputs = torch.randn(40, 192).to(dtype)
    expected = product(stack, inputs, torch.empty(40, 3 * PANEL, dtype=dtype))
    for first in range(40):
        for count in (1, 2, 5, 6, 7, 12):
            part = inputs[first : first + count]
            found = product(stack, part, torch.empty(len(part), 3 * PANEL, dtype=dtype))
            assert torch.equal(found, expected[first : first + count])


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    linear = nn.Linear(64, PANEL, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.zero_()
    linear.weight[:, 0], linear.weight[:, 1] = 1.0, 2.0**-8
    stack = PanelStack(2, linear, 1)
    stack.take(1, linear)
    inputs = torch.zeros(4, 64, dtype=torch.bfloat16)
    inputs[:, 0] = torch.tensor([1.0, 1.0 + 2**-7, 1.0, -1.0])
    inputs[:, 1] = torch.tensor([1.0, 1.0, 1.5, -1.0])
    found = product(stack, inputs, torch.empty(4, PANEL, dtype=torch.bfloat16))
    assert found[:, 0].tolist() == [1.0, 1.0 + 2**-6, 1.0 + 2**-7, -1.0]


def test_parts_lie_in_turn() -> None:
    linear = nn.Linear(64, 6 * PANEL, dtype=torch.float32).requires_grad_(False)
    stack = PanelStack(1, linear, 2)
    stack.take(0, linear)
    weights, biases = stack.arrays
    order = [0, 3, 1, 4, 2, 5]
    panels = linear.weight.view(6, PANEL, 64)
    assert np.array_equal(weights[0, :, :, :, 0], panels[order].transpose(1, 2).numpy())
    assert np.array_equal(biases[0], linear.bias.view(6, PANEL)[order].flatten().numpy())
