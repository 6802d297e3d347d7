"""The packed engine's greedy tokens equal transformers' generate() in float32, per architecture."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers

from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.runner import TESTED_ARCHITECTURES, Runner
from jfbatch.engine.sequence import Request
from jfbatch.errors import ModelError
from tests.engine.matchers import FreeMatcher, NumberTokenization
from tests.engine.sources import ListSource

VOCABULARY = 150
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
SINGLE = {"num_key_value_heads": 1, "head_dim": 12}

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_single_kv_head": ("Llama", SINGLE),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral_window": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "head_dim": 12, "query_pre_attn_scalar": 12, **MIXED}),
    "gemma3": ("Gemma3Text", {"sliding_window": 8, "head_dim": 12, "query_pre_attn_scalar": 12, **MIXED}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "olmo": ("Olmo", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS}),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": 8, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
    ),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
}


def random_model(name: str, **changes: Any) -> Any:
    family, extra = CONFIGURATIONS[name]
    configuration = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")._from_config(
        configuration, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def prompts() -> list[list[int]]:
    """Prompts of 1 to 40 tokens; three share a long prefix."""
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(1, VOCABULARY, (24,), generator=generator).tolist()
    rows = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 2, 9, 40)]
    return rows + [shared + row[:5] for row in rows[1:]]


def greedy_by_generate(model: Any, prompt: list[int], count: int) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
        )
    return output[0, len(prompt) :].tolist()


def greedy_by_engine(runner: Runner, rows: list[list[int]], count: int, **settings: Any) -> list[list[int]]:
    requests = [
        Request(str(i), prompt, FreeMatcher(VOCABULARY, may_end=False), count)
        for i, prompt in enumerate(rows)
    ]
    engine = Engine(runner, NumberTokenization(VOCABULARY), EngineConfig(**settings))
    outputs = {done.key: done for done in engine.run(ListSource(requests))}
    assert {done.error for done in outputs.values()} == {None}
    return [outputs[str(i)].token_ids for i in range(len(rows))]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_greedy_tokens_equal_generate(name: str) -> None:
    model = random_model(name)
    rows = prompts()
    expected = [greedy_by_generate(model, row, 20) for row in rows]
    assert len({tuple(row) for row in expected}) > 3  # the random model says different things
    runner = Runner(model, kv_dtype=torch.float32)
    assert greedy_by_engine(runner, rows, 20, batch_size=5, prefill_chunk=7) == expected
    assert greedy_by_engine(runner, rows, 20, batch_size=64, prefill_chunk=512) == expected


def test_every_architecture_trusted_without_a_check_is_tested_here() -> None:
    kinds = {random_model(name).config.get_text_config().model_type for name in CONFIGURATIONS}
    assert kinds >= TESTED_ARCHITECTURES


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Mamba", {"state_size": 4}),
        ("Bloom", {"n_layer": 2, "n_head": 4}),
        ("Rwkv", {"attention_hidden_size": 48}),
        ("RecurrentGemma", {"lru_width": 48, "head_dim": 12}),
        ("Llama4Text", {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 12}),
    ],
)
def test_what_cannot_run_packed_is_refused_by_name(family: str, extra: dict[str, Any]) -> None:
    configuration = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")._from_config(configuration)
    with pytest.raises(ModelError, match=configuration.model_type):
        Runner(model)


def test_packed_linears_give_the_same_logits_as_plain_ones() -> None:
    rows = prompts()
    plain = greedy_by_engine(Runner(random_model("llama"), torch.float32, pack=False), rows, 12)
    packed = greedy_by_engine(Runner(random_model("llama"), torch.float32, pack=True), rows, 12)
    assert plain == packed
