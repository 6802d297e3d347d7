"""The part of a run that needs the model: rows through the engine, each output to its outcome.

Apart from job.py because it brings torch and transformers: mistakes and runs with nothing left to do
are told without them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from jfbatch.config import RunConfig
from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.model import LoadedModel, load_model, set_threads
from jfbatch.engine.runner import Runner
from jfbatch.engine.tensor_parallel import TensorParallelGroup, TensorParallelOrder
from jfbatch.errors import InputError
from jfbatch.feed import Feed, FeedOptions
from jfbatch.grammar import Vocabulary
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.compiler import Compiler, CompilerOptions
from jfbatch.outcomes import Outcomes
from jfbatch.rows.prompt import PromptRenderer
from jfbatch.rows.row import Row
from jfbatch.signals import Signals


def decode(config: RunConfig, rows: Iterator[Row], outcomes: Outcomes, signals: Signals) -> InputError | None:
    """Run the rows through the model; returns what was wrong with the input where it could not be read on."""
    outcomes.progress.say(f"loading {config.model}")
    with Decoder(config) as decoder:
        signals.on_stop(decoder.engine.stop)
        return decoder.run(rows, outcomes)


class Decoder:
    """A loaded model with its engine, compiler and grammar cache; a context manager.

    `run` may be called again with other rows.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        with ExitStack() as resources:
            self.loaded, runner = self._load(resources)
            vocabulary = vocabulary_of(self.loaded)
            self.engine = make_engine(config, self.loaded, vocabulary, runner)
            cache = resources.enter_context(GrammarCache(config.cache_directory / "grammars"))
            self.compiler = resources.enter_context(Compiler(vocabulary, compiler_options(config), cache))
            self._resources = resources.pop_all()

    def _load(self, resources: ExitStack) -> tuple[LoadedModel, Runner]:
        config = self.config
        if config.tensor_parallel > 1:
            group = TensorParallelGroup(tensor_parallel_order(config))
            return resources.enter_context(group).load()
        set_threads(config.threads)
        loaded = load_model(
            config.model, config.device, config.dtype, config.cache_directory, config.trust_remote_code
        )
        return loaded, Runner(loaded.model)

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, value, traceback)

    def run(self, rows: Iterator[Row], outcomes: Outcomes) -> InputError | None:
        """Run the rows; returns what was wrong with the input where it could not be read on."""
        config, engine = self.config, self.engine
        with Feed(
            rows,
            PromptRenderer(self.loaded.tokenizer, config.system, config.raw),
            self.compiler,
            feed_options(config, self.loaded),
            outcomes.reject,
            outcomes.each_step,
        ) as feed:
            outcomes.watch(engine.statistics, self.compiler.statistics)
            for completion in engine.run(feed):
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


def vocabulary_of(loaded: LoadedModel) -> Vocabulary:
    """The model's tokenizer as bytes, as wide as its logits."""
    size = loaded.model.config.get_text_config().vocab_size
    return Vocabulary.from_tokenizer(loaded.tokenizer, size=size, end_ids=loaded.end_ids)


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


def tensor_parallel_order(config: RunConfig) -> TensorParallelOrder:
    """What the processes of `--tensor-parallel` load."""
    return TensorParallelOrder(
        count=config.tensor_parallel,
        name=config.model,
        device=config.device,
        dtype=config.dtype,
        cache_dir=str(config.cache_directory),
        trust_remote_code=config.trust_remote_code,
        threads=config.threads or max(1, len(os.sched_getaffinity(0)) // config.tensor_parallel),
    )


def make_engine(
    config: RunConfig, loaded: LoadedModel, vocabulary: Vocabulary, runner: Runner | None = None
) -> Engine:
    """The engine for this model and these settings, over `runner` or one of its own."""
    settings = EngineConfig(
        batch_size=config.batch_size,
        context_length=loaded.context_length,
        jump=config.jump,
        drafts=config.drafts,
        repetition_stop=config.repetition_stop,
    )
    if config.kv_memory is not None:
        settings = replace(settings, kv_memory=config.kv_memory)
    return Engine(runner or Runner(loaded.model), ModelTokenization(loaded, vocabulary), settings)


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
    )


def feed_options(config: RunConfig, loaded: LoadedModel) -> FeedOptions:
    """What rows get that do not say otherwise."""
    return FeedOptions(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        context_length=loaded.context_length,
        window=config.window,
    )
