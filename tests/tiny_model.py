"""A tiny random Llama with a tokenizer of its own: the whole program runs on it in a second.

Its tokenizer is a byte-level BPE trained on a few sentences, so every text can be written, and common
words are one token. What it says is noise; that the noise obeys its patterns is what the tests look at.
"""

from __future__ import annotations

from pathlib import Path

import pytest

VOCABULARY_SIZE = 480
CONTEXT_LENGTH = 512

_SENTENCES = (
    "Please write to anna.lopez@example.com about the order from Tuesday.",
    "The invoice of 2024-05-17 says 1,250.00 EUR, tax included; nobody has paid it yet.",
    '{"name": "Anna", "age": 31, "tags": ["new", "urgent"], "active": true, "note": null}',
    '{"category": "question", "priority": "high", "summary": "Where is my order?"}',
    "Größe, naïve, 東京 and 🎉 are texts as well.",
)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model; made once per session."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model(directory)
    return directory


def save_tiny_model(directory: Path, seed: int = 0) -> None:
    """Write config, weights (from `seed`) and tokenizer as transformers reads them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<|turn|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_SENTENCES * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", chat_template=_CHAT_TEMPLATE
    )
    end = tokenizer.eos_token_id
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_LENGTH,
            initializer_range=0.3,  # far enough from uniform that rounding never decides
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
