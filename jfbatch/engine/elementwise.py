"""What lies between the linear layers on a CPU, each in one pass: normalisation and gated activation.

transformers writes these as chains of small operations, which together take a fifth of a decode step. A
module is replaced only where a trial shows that the replacement computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jfbatch.engine import cpu_kernels
from jfbatch.engine.cpu_attention import in_parallel, stored

_DTYPES = (torch.float32, torch.bfloat16)
# Numbers that one thread handles sooner than two that must be told to.
_WORTH_SHARING = 1 << 15


class Normalisation(nn.Module):
    """Root mean square normalisation of the last axis. `weight` [width], `epsilon` as configured."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = weight.detach()
        self._factors = self.weight.float().contiguous().numpy()
        self._epsilon = np.float32(epsilon)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()
        output = torch.empty_like(flat)
        _by_rows(
            lambda part: cpu_kernels.normalise(
                stored(flat[part]), self._factors, self._epsilon, stored(output[part])
            ),
            flat.shape,
        )
        return output.view(rows.shape)


class GatedProjection(nn.Module):
    """down(silu(gate(x)) * up(x)), with the modules of the layer it replaces."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.gate_proj: nn.Module = layer.gate_proj
        self.up_proj: nn.Module = layer.up_proj
        self.down_proj: nn.Module = layer.down_proj

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        gates, output = self.gate_proj(rows).contiguous(), self.up_proj(rows).contiguous()
        flat_gates, flat = (tensor.view(-1, tensor.shape[-1]) for tensor in (gates, output))
        _by_rows(lambda part: cpu_kernels.gate(stored(flat_gates[part]), stored(flat[part])), flat.shape)
        projected: Tensor = self.down_proj(output)
        return projected


def _by_rows(kernel: Callable[[slice], None], shape: torch.Size) -> None:
    """Call a kernel on all rows of a matrix, in as many parts as torch has threads if it is large."""
    rows = shape[0]
    parts = max(1, min(torch.get_num_threads(), rows * shape[1] // _WORTH_SHARING))
    bounds = [rows * index // parts for index in range(parts + 1)]
    in_parallel([partial(kernel, slice(*bounds_of_part)) for bounds_of_part in pairwise(bounds)])


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
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if all(hasattr(module, part) for part in parts) and "silu" in type(module.act_fn).__name__.lower():
        yield GatedProjection(module)


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
