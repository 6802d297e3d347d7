"""Models made on the spot: the shapes of a 1.5B Qwen 2 and an 8B Llama with random weights on the device."""

from __future__ import annotations

import gzip
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench.first  # noqa: F401 - before torch

# isort: split

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from jfbatch.engine.model import LoadedModel

CONTEXT_LENGTH = 2048


@dataclass(frozen=True)
class Size:
    """A model's shape."""

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool


SIZES = (
    Size("Qwen2 1.5B", "qwen2", 1536, 8960, 28, 12, 2, True),
    Size("Llama 8B", "llama", 4096, 14336, 32, 32, 8, False),
)
TINY = (
    Size("Qwen2 tiny", "qwen2", 64, 128, 2, 4, 2, True),
    Size("Llama tiny", "llama", 64, 128, 2, 4, 2, False),
)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """From a tokenizer.json, its .gz, or a directory with one. Raises OSError or ValueError."""
    if path.is_dir():
        path = next(iter(sorted(path.glob("tokenizer.json*"))), path / "tokenizer.json")
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(data)
        file.flush()
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=file.name)
    ends = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>")
    known = tokenizer.get_vocab()
    end = next((text for text in ends if text in known), None)
    if end is None:
        raise ValueError(f"{path}: no end token is known; expected one of {', '.join(ends)}")
    tokenizer.eos_token = tokenizer.pad_token = end
    tokenizer.padding_side = "left"
    return tokenizer


def make_model(size: Size, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model with random weights, made on the device itself."""
    configurations = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    configuration, model_class = configurations[size.family]
    end = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    settings = configuration(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=size.tied,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        dtype=dtype,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(settings)
    finally:
        torch.set_default_dtype(before)
    return LoadedModel(size.name, model.eval(), tokenizer, frozenset([end]), CONTEXT_LENGTH)
