"""A model's tokenizer and context length without its weights: enough to say what fits.

Where the model is a directory with a tokenizer.json, as most are, not even torch is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jfbatch.engine.hub import hub_answers
from jfbatch.engine.model import (
    DEMO,
    LOAD_FAULTS,
    check_model_name,
    context_length,
    converted_path,
    demo_file,
    first_line,
    prepare_environment,
)
from jfbatch.errors import ModelError


@dataclass(frozen=True)
class ModelTokenizer:
    """A transformers tokenizer, and the most tokens that one row (prompt and output) may have."""

    tokenizer: Any
    context_length: int


class _Configuration:
    """A config.json as `context_length` reads a configuration of transformers."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
        self.rope_parameters = {**scaling, "rope_type": scaling.get("rope_type", scaling.get("type"))}

    def get_text_config(self) -> _Configuration:
        inner = self.__dict__.get("text_config")
        return _Configuration(inner) if isinstance(inner, dict) else self


def load_tokenizer(name: str, cache_dir: Path, trust_remote_code: bool = False) -> ModelTokenizer:
    """The tokenizer that `load_model` would give; nothing is converted. Raises ModelError."""
    check_model_name(name)
    prepare_environment()
    gguf = (
        demo_file() if name == DEMO else Path(name).expanduser() if name.lower().endswith(".gguf") else None
    )
    directory = Path(name).expanduser() if gguf is None else converted_path(gguf, cache_dir)
    try:
        if (directory / "tokenizer.json").is_file() and (found := _from_directory(directory)):
            return found
        is_here = gguf is not None or directory.is_dir() or not hub_answers(name)
        return _from_transformers(name, gguf, trust_remote_code, is_here)
    except LOAD_FAULTS as error:
        raise ModelError(f"{name}: its tokenizer cannot be loaded: {first_line(error)}") from error


def _from_directory(directory: Path) -> ModelTokenizer | None:
    """None where the files do not say the context length, or leave the tokenizer to Python code of theirs."""
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    settings_file = directory / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    text = values.get("text_config") or values
    lengths = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    if "auto_map" in settings or not any(name in text for name in lengths):
        return None
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return ModelTokenizer(tokenizer, context_length(_Configuration(values)))


def _from_transformers(
    name: str, gguf: Path | None, trust_remote_code: bool, is_here: bool
) -> ModelTokenizer:
    """By transformers' own rules, which import torch: GGUF metadata, hub names, other tokenizer files."""
    from transformers import AutoConfig, AutoTokenizer

    source, file = (name, {}) if gguf is None else (str(gguf.parent), {"gguf_file": gguf.name})
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": is_here, **file}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    config = AutoConfig.from_pretrained(source, **options)
    return ModelTokenizer(tokenizer, context_length(config))
