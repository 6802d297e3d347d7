"""On a CPU, a row's logits are the same bits whatever shares its steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jfbatch.engine.decoder_stack import DecoderStack
from jfbatch.engine.linear import PackedLinear, can_pack
from jfbatch.engine.runner import Runner, Segment

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_pack(dtype), reason=f"oneDNN packs no {dtype} here"))
    for dtype in (torch.float32, torch.bfloat16)
]
LENGTH, PROMPT = 620, 600  # past the reach of the kernel, so that both ways of attending take part


@cache
def runner(dtype: torch.dtype, width: int) -> Runner:
    """Its layers are one module where the width is a multiple of 64."""
    configuration = LlamaConfig(
        vocab_size=320,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    torch.manual_seed(1)
    return Runner(LlamaForCausalLM(configuration).to(dtype))


def tokens(row: int) -> list[int]:
    return torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(row)).tolist()


@torch.inference_mode()
def logits_of(used: Runner, row: int, cuts: list[int], others: int, slot: int) -> torch.Tensor:
    """The logits of the row's last token, its tokens computed in parts, beside other rows with theirs."""
    used.pool.resize(0, 1)
    used.pool.resize(others + 1, LENGTH)
    beside = [other for other in range(others + 1) if other != slot]
    generator = torch.Generator().manual_seed(others + slot)
    past = dict.fromkeys(beside, 0)
    found = torch.empty(0)
    for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        segments = {slot: Segment(slot, start, tokens(row)[start:stop], [stop - start - 1], PROMPT)}
        for other in beside:
            count = int(torch.randint(1, 40, (1,), generator=generator))
            part = tokens(100 + other)[past[other] : past[other] + count]
            segments[other] = Segment(other, past[other], part, [len(part) - 1], 200)
            past[other] += len(part)
        order = sorted(segments)
        found = used.forward([segments[place] for place in order])[order.index(slot)]
    return found


@pytest.mark.parametrize("width", [96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_neighbours_nor_chunks_change_a_bit_of_the_logits(dtype: torch.dtype, width: int) -> None:
    used = runner(dtype, width)
    assert isinstance(used.model.model.layers[0], DecoderStack) == (width == 128)
    expected = logits_of(used, 7, [], others=0, slot=0)
    for cuts, others, slot in (
        ([1], 0, 0),
        ([618, 619], 0, 0),
        ([200, 456, 600, 601, 604], 5, 3),
        ([100, 530, 619], 11, 11),
        ([*range(50, 620, 50)], 2, 0),
        ([64, 300, 610], 1, 1),
    ):
        assert torch.equal(logits_of(used, 7, cuts, others, slot), expected), (cuts, others, slot)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 160), (160, 96), (576, 192), (1536, 576)])
def test_packed_layers_treat_a_row_alike_whatever_its_company(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    packed = PackedLinear(torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype))
    rows = torch.randn(300, inputs).to(dtype)
    with torch.inference_mode():
        expected = packed(rows)
        for count in (1, 2, 3, 5, 8, 16, 17, 48, 64, 65, 129):
            assert torch.equal(packed(rows[:count]), expected[:count])
            assert torch.equal(packed(rows[-count:]), expected[-count:])
