"""The part of a run that needs the model: rows through the engine, each output to its outcome.

Apart from job.py because it brings torch and transformers: mistakes and runs with nothing left to do
are told without them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from jfbatch.config import RunConfig
from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.memory import spare_memory
from jfbatch.engine.model import LoadedModel, load_model, set_threads
from jfbatch.engine.runner import Runner
from jfbatch.engine.watching import Span, watch_modules
from jfbatch.errors import InputError, InvalidGrammar, UsageError
from jfbatch.feed import Feed, FeedOptions
from jfbatch.grammar import Vocabulary
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.compiler import Compiler, CompilerOptions
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.reasoning import Reasoning
from jfbatch.outcomes import Outcomes
from jfbatch.rows.prompt import PromptRenderer, chat_template
from jfbatch.rows.reasoning import ReasoningEnd, reasoning_end
from jfbatch.rows.row import Row
from jfbatch.rows.tools import tool_format
from jfbatch.signals import Signals

_KV_DTYPES = {"auto": None, "f32": torch.float32, "bf16": torch.bfloat16}


def decode(
    config: RunConfig, rows: Iterator[Row], outcomes: Outcomes, signals: Signals, span: Span = nullcontext
) -> InputError | None:
    """Run the rows through the model; returns what was wrong with the input where it could not be read on."""
    outcomes.progress.say(f"loading {config.model}")
    set_threads(config.threads)
    with span("load model"):
        loaded = load_model(
            config.model, config.device, config.dtype, config.cache_directory, config.trust_remote_code
        )
    with ThreadPoolExecutor(1, "jfbatch-packer") as packer:
        # Packing the weights leaves Python to what comes next: vocabulary, grammar cache, compiled kernels.
        runner = packer.submit(make_runner, config, loaded, span)
        renderer = PromptRenderer(
            loaded.tokenizer, config.system, config.raw, tool_format(config.tool_format)
        )
        end = reasoning_end(config.reasoning_end, "" if config.raw else chat_template(loaded.tokenizer))
        outcomes.reasoning_end = end
        with span("vocabulary"):
            vocabulary = vocabulary_of(loaded, [*renderer.markers, *(end.markers if end else ())])
        with (
            GrammarCache(config.cache_directory / "grammars") as cache,
            Compiler(vocabulary, compiler_options(config), cache, span) as compiler,
        ):
            with span("wait for weights"):
                packed = runner.result()
            engine = make_engine(config, loaded, packed, vocabulary, span)
            if not gc.isenabled():  # the command line keeps it off while things are loaded
                gc.freeze()
                gc.enable()
            signals.on_stop(engine.stop)
            outcomes.watch(engine.statistics, compiler.statistics)
            options = feed_options(config, loaded, end, compiler)
            with Feed(rows, renderer, compiler, options, outcomes.reject, outcomes.each_step, span) as feed:
                return run_rows(feed, engine, outcomes)


def run_rows(feed: Feed, engine: Engine, outcomes: Outcomes) -> InputError | None:
    """Settle what comes out of the engine, one row after another."""
    for completion in engine.run(feed):
        with engine.span("complete"):
            waiting = feed.finished(completion.key)
            if outcomes.needs_another_try(waiting, completion):
                feed.again(waiting)
            else:
                outcomes.complete(waiting, completion)
        if outcomes.too_many_failures:
            engine.stop()
    if feed.error is not None and not isinstance(feed.error, InputError):
        raise feed.error
    return feed.error


def vocabulary_of(loaded: LoadedModel, markers: Sequence[str] = ()) -> Vocabulary:
    """The model's tokenizer as bytes, as wide as its logits; `markers` are text, special tokens or not."""
    size = loaded.model.config.get_text_config().vocab_size
    return Vocabulary.from_tokenizer(loaded.tokenizer, size=size, end_ids=loaded.end_ids, markers=markers)


class ModelTokenization:
    """A tokenizer as the engine needs it (`engine.retokenize.Tokenization`)."""

    def __init__(self, loaded: LoadedModel, vocabulary: Vocabulary) -> None:
        self.tokenizer = loaded.tokenizer
        self.vocabulary = vocabulary
        self.end_ids = loaded.end_ids

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the tokens that a tokenizer adds around one."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the id adds to the text; b"" where it is never content."""
        return self.vocabulary.token_bytes[token_id] or b""


def make_runner(config: RunConfig, loaded: LoadedModel, span: Span = nullcontext) -> Runner:
    """The model ready for packed steps. Raises ModelError where it cannot be run so."""
    with span("pack weights"):
        runner = Runner(loaded.model, kv_dtype=_KV_DTYPES[config.kv_dtype])
    if config.profile is not None:
        watch_modules(loaded.model, span)
    return runner


def make_engine(
    config: RunConfig,
    loaded: LoadedModel,
    runner: Runner,
    vocabulary: Vocabulary,
    span: Span = nullcontext,
) -> Engine:
    """The engine for this model and these settings."""
    settings = EngineConfig(
        batch_size=config.batch_size,
        kv_memory=config.kv_memory or spare_memory(runner.device),
        context_length=loaded.context_length,
        jump=config.jump,
        drafts=config.drafts,
        repetition_stop=config.repetition_stop,
    )
    return Engine(runner, ModelTokenization(loaded, vocabulary), settings, span)


def compiler_options(config: RunConfig) -> CompilerOptions:
    """How this run's patterns become grammars."""
    return CompilerOptions(
        style=config.json_style,
        objects=config.objects,
        strict=config.strict,
        timeout=config.compile_timeout,
        threads=config.compile_threads,
        backend=config.backend,
        max_string=config.max_string,
        integers=config.integers,
    )


def feed_options(
    config: RunConfig, loaded: LoadedModel, end: ReasoningEnd | None, compiler: Compiler
) -> FeedOptions:
    """What rows get that do not say otherwise. Raises UsageError (make_reasoning)."""
    return FeedOptions(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        context_length=loaded.context_length,
        window=config.window,
        reasoning_end=end,
        reasoning=make_reasoning(end, config.max_reasoning_tokens, compiler) if end else None,
    )


def make_reasoning(end: ReasoningEnd, limit: int, compiler: Compiler) -> Reasoning:
    """The grammar of thinking. Raises UsageError."""
    try:
        grammar = compiler.submit("reasoning", end.pattern, "fsm").result()
    except InvalidGrammar as error:
        raise UsageError(f"--reasoning-end {end.end!r}: {error}") from None
    assert isinstance(grammar, Grammar)  # what the backend fsm makes
    return Reasoning(grammar, limit)
