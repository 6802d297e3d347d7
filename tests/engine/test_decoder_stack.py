"""All layers in one call per thread: what the layers compute, the same bits however the work is shared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from jfbatch.engine import decoder_stack
from jfbatch.engine.decoder_layer import DecoderLayer
from jfbatch.engine.decoder_stack import MOST_THREADS, DecoderStack
from jfbatch.engine.runner import Runner, Segment
from jfbatch.engine.vector_products import HAS_AMX
from jfbatch.engine.watching import watch_modules
from jfbatch.report.trace import Trace
from tests.engine.test_decoder_layer import MODELS, layers_of, logits
from tests.engine.test_decoder_layer import SHAPE as LAYER_SHAPE
from tests.engine.test_decoder_layer import made as made_of

SHAPE = {**LAYER_SHAPE, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8}
# With AMX, layers of bfloat16 stay with oneDNN.
DTYPES = [torch.float32] if HAS_AMX else [torch.float32, torch.bfloat16]


def made(name: str, dtype: torch.dtype) -> Any:
    return made_of(name, dtype, SHAPE)


def is_stacked(runner: Runner) -> bool:
    return [type(layer) for layer in layers_of(runner)] == [DecoderStack]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_stack_computes_what_the_layers_do(name: str, dtype: torch.dtype) -> None:
    stacked, plain = Runner(made(name, dtype)), Runner(made(name, dtype), pack=False)
    assert is_stacked(stacked)
    expected, found = logits(plain), logits(stacked)
    bound = (
        2e-3 if dtype == torch.float32 else 0.05
    )  # K and V are rounded to bfloat16, at times the other way
    assert (expected - found).norm() <= bound * expected.norm()


def test_in_float32_throughout_the_difference_is_rounding_alone() -> None:
    model = "windows in some layers"
    stacked = Runner(made(model, torch.float32), kv_dtype=torch.float32)
    plain = Runner(made(model, torch.float32), kv_dtype=torch.float32, pack=False)
    assert is_stacked(stacked)
    expected, found = logits(plain), logits(stacked)
    assert (expected - found).norm() <= 1e-5 * expected.norm()


@cache
def runner(dtype: torch.dtype) -> Runner:
    return Runner(made("qwen2", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=6, max_size=6).filter(
            lambda rows: any(count for count, _ in rows)
        ),
        min_size=1,
        max_size=3,
    ),
    threads=st.integers(2, 5),
)
def test_logits_are_the_same_bits_whatever_number_of_threads_computes_them(
    dtype: torch.dtype, steps: list[list[tuple[int, int]]], threads: int
) -> None:
    alone, together = (logits_of(runner(dtype), steps, count) for count in (1, threads))
    assert all(map(torch.equal, alone, together))


@torch.inference_mode()
def logits_of(used: Runner, steps: list[list[tuple[int, int]]], threads: int) -> list[Tensor]:
    """Of steps that have so many tokens of each row, the last of them with logits."""
    torch.set_num_threads(threads)
    used.pool.resize(0, 1)
    used.pool.resize(6, 160)
    past = [0] * 6
    results = []
    for step in steps:
        segments = []
        for slot, (count, wanted) in enumerate(step):
            tokens = [(slot * 7 + past[slot] + index) % 90 for index in range(count)]
            if count:
                segments.append(
                    Segment(slot, past[slot], tokens, range(max(count - wanted, 0), count), prompt=60)
                )
            past[slot] += count
        results.append(used.forward(segments))
    return results


def test_rounding_alone_keeps_no_model_from_being_stacked() -> None:
    for seed in range(4):
        for dtype in DTYPES:
            torch.manual_seed(seed)
            wide = {"hidden_size": 576, "intermediate_size": 1536, "initializer_range": 0.05}
            heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE | wide | heads))
            assert is_stacked(Runner(model.to(dtype)))


def test_more_threads_than_there_can_be_do_not_hang() -> None:
    used = runner(torch.float32)
    steps = [[(20, 1)] * 6, [(1, 1)] * 6]
    expected = logits_of(used, steps, 2)
    assert all(map(torch.equal, logits_of(used, steps, 100), expected))


def test_what_is_not_of_whole_panels_or_has_too_many_threads_keeps_its_layers() -> None:
    odd = Runner(LlamaForCausalLM(LlamaConfig(**{**SHAPE, "intermediate_size": 200})))
    assert [type(layer) for layer in layers_of(odd)] == [DecoderLayer] * 3
    torch.set_num_threads(MOST_THREADS + 1)
    assert [type(layer) for layer in layers_of(Runner(made("llama", torch.float32)))] == [DecoderLayer] * 3


def test_a_stack_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DecoderStack.forward

    def lessened(self: DecoderStack, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return hidden_states + 0.9 * (whole(self, hidden_states, *arguments, **keywords) - hidden_states)

    monkeypatch.setattr(DecoderStack, "forward", lessened)
    for dtype in DTYPES:
        assert [type(layer) for layer in layers_of(Runner(made("llama", dtype)))] == [DecoderLayer] * 3


@torch.inference_mode()
@pytest.mark.parametrize("failing", [0, 1])
def test_what_goes_wrong_in_one_thread_ends_the_others_and_is_raised(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = runner(torch.float32)
    used.pool.resize(0, 1)
    used.pool.resize(2, 64)
    segments = [Segment(slot, 0, list(range(20)), [19]) for slot in range(2)]
    expected = used.forward(segments)
    run_layers = decoder_stack.cpu_layers.run_layers
    ended = []

    def broken(layers: Any, step: Any, worker: Any, first: int, end: int) -> bool:
        if worker.member == failing:
            raise MemoryError("no memory")
        ended.append(run_layers(layers, step, worker, first, end))
        return True

    monkeypatch.setattr(decoder_stack.cpu_layers, "run_layers", broken)
    with pytest.raises(MemoryError, match="no memory"):
        used.forward(segments)
    assert ended == [False]
    monkeypatch.undo()
    assert torch.equal(used.forward(segments), expected)


@torch.inference_mode()
def test_a_thread_that_cannot_be_started_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    used = runner(torch.float32)
    used.pool.resize(0, 1)
    used.pool.resize(1, 64)
    torch.set_num_threads(3)
    started, calls = ThreadPoolExecutor.submit, []

    def refused(self: ThreadPoolExecutor, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("can't start new thread")
        return started(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        used.forward([Segment(0, 0, list(range(20)), [19])])
    monkeypatch.undo()
    assert used.forward([Segment(0, 0, list(range(20)), [19])]).isfinite().all()


@torch.inference_mode()
def test_a_profile_tells_what_a_stack_spent_its_time_on() -> None:
    used = Runner(made("llama", torch.float32))
    trace = Trace()
    watch_modules(used.model, trace.span)
    used.pool.resize(2, 64)
    used.forward([Segment(slot, 0, list(range(20)), [19]) for slot in range(2)])
    (thread,) = trace.lanes
    assert thread.kinds["layers"].calls == 1
    parts = [thread.kinds[name] for name in ("linear", "attention", "gated linear", "waiting")]
    assert all(part.own > 0 for part in parts)
    inside = sum(part.whole for part in parts) + used.model.model.layers[0].spent["norm"]
    assert inside == pytest.approx(thread.kinds["layers"].whole - thread.kinds["layers"].own)
