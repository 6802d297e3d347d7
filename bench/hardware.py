"""What this machine can do at best: the floor that decode steps are held against.

A step of T tokens with L positions' logits cannot take less than its multiplications at torch's best
rate (or one reading of the weights, where that is longer) and one reading of the K and V it attends to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import bench.first  # noqa: F401 - before torch

# isort: split

import torch
from torch import Tensor, nn

from jfbatch.engine.linear import pack_linears
from jfbatch.engine.runner import Segment

_SIDE = {"cpu": 3072, "cuda": 8192}  # of the square matrices multiplied for the peak
_READ_BYTES = 1 << 29
_TOKEN_COUNTS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384)


@dataclass(frozen=True)
class Hardware:
    """Measured rates: FLOP/s of a large matmul in the weights' dtype, bytes/s of reading."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """What one step asks for at least: floating point operations, bytes of weights, bytes of K and V."""

    flops: float
    weight_bytes: float
    kv_bytes: float

    def seconds(self, hardware: Hardware) -> float:
        """The floor of the step's time."""
        linears = max(self.flops / hardware.flops, self.weight_bytes / hardware.bandwidth)
        return linears + self.kv_bytes / hardware.bandwidth


@dataclass(frozen=True)
class Shape:
    """A model as the floor sees it: weights of layers and LM head, bytes of a weight and of a token's KV."""

    layer_weights: int
    head_weights: int
    weight_bytes: int
    kv_bytes_per_token: int

    @staticmethod
    def of(model: Any, dtype: torch.dtype, kv_bytes_per_token: int) -> Shape:
        """Of a transformers model, packed or not."""
        layers, head = linear_shapes(model)
        return Shape(
            sum(rows * columns for rows, columns in layers),
            *(head[0] * head[1], dtype.itemsize, kv_bytes_per_token),
        )

    def work(self, segments: Sequence[Segment]) -> Work:
        """What a step over these segments asks for."""
        tokens = sum(len(segment.token_ids) for segment in segments)
        logits = sum(len(segment.logits) for segment in segments)
        read = sum(segment.start + len(segment.token_ids) for segment in segments)
        flops = 2.0 * (tokens * self.layer_weights + logits * self.head_weights)
        weights = self.layer_weights + (self.head_weights if logits else 0)
        return Work(flops, weights * self.weight_bytes, read * self.kv_bytes_per_token)


def linear_shapes(model: Any) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """[out, in] of a model's linear layers, and of its LM head; packed, stacked or neither."""
    head = model.get_output_embeddings()
    shapes: list[tuple[int, int]] = []
    for module in model.modules():
        if hasattr(module, "linear_shapes"):
            shapes += module.linear_shapes
        elif hasattr(module, "in_features") and hasattr(module, "out_features") and module is not head:
            shapes.append((module.out_features, module.in_features))
    return shapes, (head.out_features, head.in_features)


def measure_hardware(device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Hardware:
    """Best of several rounds; `scale` below 1 makes the test smaller."""
    side = max(int(_SIDE[device.type] * scale) // 64 * 64, 64)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    rate = 2.0 * side**3 / min(_times(lambda: left @ right, device, 5))
    words = torch.ones(max(int(_READ_BYTES * scale) // 4, 1024), device=device)
    if device.type == "cuda":
        other = torch.empty_like(words)
        return Hardware(rate, 2 * words.nbytes / min(_times(lambda: other.copy_(words), device, 5)))
    return Hardware(rate, words.nbytes / min(_times(lambda: words.sum(), device, 5)))


def _times(action: Callable[[], Tensor], device: torch.device, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds + 1):  # the first one warms up
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times[1:]


class BareLinears:
    """What the model's linear layers would take alone by oneDNN, at any number of tokens and logits."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        layers, head = linear_shapes(model)
        self._layers = self._times(layers, dtype)
        self._head = self._times([head], dtype)

    @staticmethod
    def _times(shapes: list[tuple[int, int]], dtype: torch.dtype) -> dict[int, float]:
        linears = nn.ModuleList(nn.Linear(*shape[::-1], bias=False, dtype=dtype) for shape in shapes)
        pack_linears(linears)

        def once(inputs: dict[int, Tensor]) -> Tensor:
            for linear in linears:
                output: Tensor = linear(inputs[linear.in_features])
            return output

        times = {}
        with torch.inference_mode():
            for count in _TOKEN_COUNTS:
                inputs = {width: torch.randn(1, count, width).to(dtype) for _, width in shapes}
                times[count] = median(_times(lambda given=inputs: once(given), torch.device("cpu"), 3))
        return times

    def seconds(self, tokens: int, logits: int) -> float:
        """Of one step, interpolated between the token counts that were measured."""
        return _interpolated(self._layers, tokens) + (_interpolated(self._head, logits) if logits else 0.0)


def _interpolated(known: dict[int, float], place: int) -> float:
    counts = sorted(known)
    after = next((count for count in counts if count >= place), counts[-1])
    before = max((count for count in counts if count < after), default=after)
    if place > after or before == after:
        return known[after] * place / after if place > after else known[after]
    return known[before] + (known[after] - known[before]) * (place - before) / (after - before)
