"""transformers' `generate` on the rows, in one batch, held by XGrammar, llguidance or Outlines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import workload
from bench.peers.meter import Meter
from bench.peers.worker import arguments_of, versions_of

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

# Compiles the schema and gives a function from rows in the batch to logits processors.
Compile = Callable[[], Callable[[int], list[Any]]]


def xgrammar_masks(tokenizer: Any, vocabulary_size: int) -> Compile:
    """XGrammar's own logits processor; its compiler without a cache."""
    import xgrammar
    import xgrammar.contrib.hf

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary_size)

    def compile_schema() -> Callable[[int], list[Any]]:
        compiler = xgrammar.GrammarCompiler(info, max_threads=torch.get_num_threads(), cache_enabled=False)
        grammar = compiler.compile_json_schema(
            json.dumps(workload.SCHEMA), any_whitespace=False, separators=(",", ":"), strict_mode=True
        )
        return lambda _rows: [xgrammar.contrib.hf.LogitsProcessor(grammar)]

    return compile_schema


def llguidance_masks(tokenizer: Any, vocabulary_size: int) -> Compile:
    """llguidance, the masks of a batch filled in parallel."""
    import llguidance
    import llguidance.hf
    import llguidance.torch

    known = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary_size)
    layout = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

    class Masks:
        def __init__(self, matcher: Any, rows: int) -> None:
            self.matchers = [matcher.deep_copy() for _ in range(rows)]
            self.mask = llguidance.torch.allocate_token_bitmask(rows, vocabulary_size)
            self.executor = llguidance.LLExecutor(num_threads=torch.get_num_threads())
            self.started = False

        def __call__(self, ids: Any, scores: Any) -> Any:
            if self.started:
                for matcher, token in zip(self.matchers, ids[:, -1].tolist(), strict=True):
                    if not matcher.is_stopped():
                        matcher.consume_token(token)
            self.started = True
            pairs = list(zip(self.matchers, range(len(self.matchers)), strict=True))
            llguidance.torch.fill_next_token_bitmask_par(self.executor, pairs, self.mask)
            end = tokenizer.eos_token_id
            for row, matcher in enumerate(self.matchers):
                if matcher.is_stopped():
                    self.mask[row].zero_()
                    self.mask[row, end // 32] = 1 << (end % 32)
            llguidance.torch.apply_token_bitmask_inplace(scores, self.mask)
            return scores

    def compile_schema() -> Callable[[int], list[Any]]:
        schema = json.dumps(workload.SCHEMA)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=layout)
        matcher = llguidance.LLMatcher(known, grammar)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
        return lambda rows: [Masks(matcher, rows)]

    return compile_schema


def generate(model: Any, tokenizer: Any, prompts: list[str], processors: list[Any]) -> tuple[list[str], int]:
    """Texts, and how many tokens were generated, end tokens included."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=workload.MAX_TOKENS, do_sample=False, logits_processor=processors
        )
    texts, tokens, end = [], 0, tokenizer.eos_token_id
    for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
        length = ids.index(end) + 1 if end in ids else len(ids)
        tokens += length
        texts.append(tokenizer.decode(ids[:length], skip_special_tokens=True))
    return texts, tokens


def outlines_run(model: Any, tokenizer: Any, prompts: list[str]) -> tuple[list[str], int]:
    """Outlines' own batch call; it does not say how many tokens, so the texts are tokenised again."""
    import outlines
    from outlines.types import JsonSchema

    schema = JsonSchema(json.dumps(workload.SCHEMA), whitespace_pattern="")
    generator = outlines.Generator(outlines.from_transformers(model, tokenizer), schema)
    found = generator.batch(prompts, max_new_tokens=workload.MAX_TOKENS, do_sample=False)
    texts = [text if isinstance(text, str) else text[0] for text in found]
    tokens = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts)
    return texts, tokens


def run(arguments: argparse.Namespace) -> None:
    """One measured run over all rows in one batch, after a short one that warms up."""
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=_DTYPES[arguments.dtype])
    model = model.eval()
    prompts = workload.prompts(arguments.rows)
    warm = tokenizer(prompts[:2], return_tensors="pt", padding=True, add_special_tokens=False)
    model.generate(**warm, max_new_tokens=4, do_sample=False)
    versions = versions_of("torch", "transformers", arguments.engine)
    if arguments.engine == "outlines":
        meter = Meter()
        texts, tokens = outlines_run(model, tokenizer, prompts)
    else:
        masks = {"xgrammar": xgrammar_masks, "llguidance": llguidance_masks}[arguments.engine]
        compile_schema = masks(tokenizer, model.config.vocab_size)
        meter = Meter()
        texts, tokens = generate(model, tokenizer, prompts, compile_schema()(len(prompts)))
    meter.stop(texts, tokens, versions).write(arguments.result)


if __name__ == "__main__":
    run(arguments_of(__doc__))
