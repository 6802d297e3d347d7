"""The attention function against plain softmax attention, for every way tokens can group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from jfbatch.engine import attention
from jfbatch.engine.attention import Span, StepLayout, packed_attention
from jfbatch.engine.cpu_attention import shared_out
from jfbatch.engine.kv_cache import SlotPool
from jfbatch.errors import ModelError
from tests.run_command import ROOT

HEADS, KV_HEADS = 6, 2


class Layer(nn.Module):
    layer_idx = 0


def plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query [heads, dim] at `position` over keys [kv heads, length, dim] -> [heads, value dim]."""
    low = 0 if window is None else max(position - window + 1, 0)
    rows = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = keys[kv, low : position + 1] @ query[head] * 0.3
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1]])
        weights = torch.softmax(scores, 0)[: position + 1 - low]
        rows.append(weights @ values[kv, low : position + 1])
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 5, 64]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from(
        [
            (False, torch.float32, torch.float32),
            (True, torch.float32, torch.float32),
            (True, torch.bfloat16, torch.float32),
            (True, torch.bfloat16, torch.bfloat16),
        ]
    ),
    st.sampled_from([(8, 6), (5, 33), (64, 48)]),
    st.sampled_from([0, 25, 60, 100]),
)
def test_every_row_attends_to_its_own_past_alone(
    rows: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    gap: int,
    storage: tuple[bool, torch.dtype, torch.dtype],
    dims: tuple[int, int],
    prompt: int,
) -> None:
    for_kernel, dtype, computed = storage
    generator = torch.Generator().manual_seed(len(rows))
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    pool = SlotPool(torch.device("cpu"), dtype, for_kernel)
    pool.resize(len(rows) + gap, 144)
    for part in pool.layer(0, KV_HEADS, *dims):
        part.normal_(generator=generator)  # stale content of other rows must not matter
    spans, first = [], 0
    for index, (start, count) in enumerate(rows):
        spans.append(Span(index + gap, start, first, count, prompt))
        first += count
    shapes = (HEADS, dims[0]), (KV_HEADS, dims[0]), (KV_HEADS, dims[1])
    query, key, value = (
        torch.randn(1, heads, first, dim, generator=generator).to(computed) for heads, dim in shapes
    )
    with patch.multiple(attention, KERNEL_REACH=20, BLOCK=16):
        layout = StepLayout(pool, spans)
        output, _ = packed_attention(
            Layer(),
            query,
            key,
            value,
            None,
            step=layout,
            scaling=0.3,
            sliding_window=window,
            softcap=softcap,
            s_aux=sinks,
        )
    for span in spans:
        keys, values = (part.float() for part in pool.past(0, span.slot, span.start + span.count))
        for offset in range(span.count):
            token = span.first + offset
            expected = plain(
                query[0, :, token].float(),
                keys,
                values,
                span.start + offset,
                window,
                softcap,
                sinks,
            )
            tolerance = 1e-5 if computed == torch.float32 else 3e-2
            is_far = for_kernel and 20 <= span.start + offset < prompt
            if computed == torch.bfloat16 and is_far and (has_sinks or softcap is not None):
                tolerance = 8e-2  # torch's scores are bfloat16 there
            assert output.dtype == computed
            assert torch.allclose(output[0, token].float(), expected, atol=tolerance)


LESS_THAN_THE_HOST = """
from jfbatch.engine.vector_products import HAS_DOTS
assert not HAS_DOTS
import torch
from tests.engine.test_decoder_stack import is_stacked, made
from jfbatch.engine.runner import Runner, Segment
torch.set_num_threads(2)
runner = Runner(made("llama", torch.bfloat16))
assert is_stacked(runner)
with torch.inference_mode():
    runner.pool.resize(1, 64)
    print(bool(runner.forward([Segment(0, 0, list(range(20)), [19])]).isfinite().all()))
"""


def test_numba_may_be_told_to_use_less_than_the_machine_has(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": "generic"}
    done = subprocess.run(
        [sys.executable, "-c", LESS_THAN_THE_HOST],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.stdout == "True\n", done.stderr


def test_what_a_packed_step_cannot_give_is_refused() -> None:
    pool = SlotPool(torch.device("cpu"), torch.float32)
    pool.resize(1, 10)
    layout = StepLayout(pool, [Span(0, 0, 0, 3)])
    tensor = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="does not pass on"):
        packed_attention(Layer(), tensor, tensor, tensor, None)
    with pytest.raises(ModelError, match="position_bias"):
        packed_attention(Layer(), tensor, tensor, tensor, None, step=layout, position_bias=tensor)
    with pytest.raises(ModelError, match="both directions"):
        packed_attention(Layer(), tensor, tensor, tensor, None, step=layout, is_causal=False)
    with pytest.raises(ModelError, match="mask"):
        packed_attention(Layer(), tensor, tensor, tensor, tensor, step=layout)
    packed_attention(Layer(), tensor, tensor, tensor, None, step=layout, dropout=0.0, output_attentions=False)


@given(
    rows=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 200)), min_size=1, max_size=40),
    threads=st.integers(1, 8),
    heads=st.sampled_from([1, 2, 3, 8]),
)
def test_every_head_of_every_span_is_in_one_part_and_none_has_much_more_than_another(
    rows: list[tuple[int, int]], threads: int, heads: int
) -> None:
    firsts = [sum(count for _, count in rows[:index]) for index in range(len(rows))]
    spans = [(slot, start, firsts[slot], count, True) for slot, (start, count) in enumerate(rows)]
    parts = shared_out(spans, threads, heads, least_work=1)
    found = [
        [(*span[:5], head) for span in part.tolist() for head in heads_of(span, heads)] for part in parts
    ]
    assert sorted(piece for part in found for piece in part) == [
        (*span, head) for span in spans for head in range(heads)
    ]
    work = [sum(count * (start + count) for _, start, _, count, *_ in part) for part in found]
    largest = max(count * (start + count) for start, count in rows)
    assert max(work) - min(work) <= largest * (heads if len(rows) >= 4 * threads else 1)


def heads_of(span: list[int], heads: int) -> range:
    return range(heads * span[5] // span[6], heads * (span[5] + 1) // span[6])
