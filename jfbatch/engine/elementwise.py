"""What lies between the linear layers on a CPU, each in one pass: normalisation and gated activation.

transformers writes these as chains of small operations, which together take a fifth of a decode step. A
module is replaced only where a trial shows that the replacement computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jfbatch.engine import cpu_kernels
from jfbatch.engine.cpu_attention import by_rows, stored

_DTYPES = (torch.float32, torch.bfloat16)
# Numbers that one thread handles sooner than two that must be told to, which takes about 20 us.
_NORMALISED_ALONE = 1 << 18
_GATED_ALONE = 1 << 16


class Normalisation(nn.Module):
    """Root mean square normalisation of the last axis. `weight` [width], `epsilon` as configured."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.factors = self.weight.float().contiguous().numpy()
        self.epsilon = np.float32(epsilon)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()
        output = torch.empty_like(flat)
        kernel = partial(cpu_kernels.normalise, self.factors, self.epsilon)
        by_rows(kernel, (stored(flat), stored(output)), flat.numel() // _NORMALISED_ALONE)
        return output.view(rows.shape)


class SiluGates(nn.Module):
    """silu(gates) * rows, which come side by side."""

    def forward(self, both: Tensor) -> Tensor:
        """[..., 2 * width] -> [..., width]."""
        output: Tensor = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        flat, results = both.view(-1, both.shape[-1]), output.view(-1, output.shape[-1])
        by_rows(cpu_kernels.gate, (stored(flat), stored(results)), results.numel() // _GATED_ALONE)
        return output


class GatedProjection(nn.Module):
    """down(silu(gate(x)) * up(x)); the matrices of gate and up are one."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.gate_up_proj: nn.Module = joined(layer.gate_proj, layer.up_proj)
        self.gates = SiluGates()
        self.down_proj: nn.Module = layer.down_proj

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        projected: Tensor = self.down_proj(self.gates(self.gate_up_proj(rows)))
        return projected


def joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer whose output is that of all of them, side by side. All with a bias, or none."""
    first = linears[0]
    width = sum(linear.out_features for linear in linears)
    biased = first.bias is not None
    whole = nn.Linear(first.in_features, width, bias=biased, device="meta", dtype=first.weight.dtype)
    whole.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if biased:
        whole.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return whole


@torch.inference_mode()
def fuse_elementwise(model: nn.Module) -> int:
    """Replace what can be, in place, on the CPU; returns how many modules."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            for candidate in _candidates(child):
                if _agrees(child, candidate):
                    setattr(parent, name, candidate)
                    count += 1
                    break
    return count


def _candidates(module: Any) -> Iterator[nn.Module]:
    """What a module may be replaced by, judged by its parts."""
    if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
        weight = module.weight
        if weight.dim() == 1 and weight.dtype in _DTYPES:
            epsilon = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
            yield Normalisation(weight, epsilon)
            yield Normalisation(weight.float() + 1, epsilon)  # Gemma stores what differs from 1
    if is_gated(module):
        yield GatedProjection(module)


def is_gated(module: Any) -> bool:
    """Whether a module looks like down(silu(gate(x)) * up(x))."""
    linears = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    activation = type(getattr(module, "act_fn", None)).__name__
    alike = (module.gate_proj.bias is None) == (module.up_proj.bias is None)
    return alike and "silu" in activation.lower()


def _agrees(module: Any, candidate: nn.Module) -> bool:
    """Whether both give the same on rows of small, ordinary and large numbers, but for rounding."""
    weights = getattr(module, "weight", None)
    if weights is None:
        weights = module.gate_proj.weight
    width, dtype = weights.shape[-1], weights.dtype
    if dtype not in _DTYPES:
        return False
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.01, 1.0, 1.0, 30.0]).view(4, 1)
    rows = (torch.randn(4, width, generator=generator) * scales).to(dtype).unsqueeze(0)
    try:
        expected, found = module(rows), candidate(rows)
    except (RuntimeError, TypeError, ValueError):
        return False
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    relative = 1e-5 if dtype == torch.float32 else 2**-6
    error = (expected.float() - found.float()).norm(dim=-1)
    return bool((error <= relative * expected.float().norm(dim=-1) + 1e-12).all())
