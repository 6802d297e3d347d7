"""The part of a run that needs the model: rows through the engine, each output to its outcome.

Apart from job.py because it brings torch and transformers: mistakes and runs with nothing left to do
are told without them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from types import TracebackType

from jfbatch.config import RunConfig
from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.memory import spare_memory
from jfbatch.engine.model import LoadedModel, load_model, set_threads
from jfbatch.engine.runner import KV_DTYPES, Runner
from jfbatch.engine.tensor_parallel import TensorParallelGroup, TensorParallelOrder
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


def decode(
    config: RunConfig, rows: Iterator[Row], outcomes: Outcomes, signals: Signals, span: Span = nullcontext
) -> InputError | None:
    """Run the rows through the model; returns what was wrong with the input where it could not be read on."""
    outcomes.progress.say(f"loading {config.model}")
    with Decoder(config, span) as decoder:
        signals.on_stop(decoder.engine.stop)
        return decoder.run(rows, outcomes)


class Decoder:
    """A loaded model with its engine, compiler and grammar cache; a context manager.

    `run` may be called again with other rows. `span` times the parts.
    """

    def __init__(self, config: RunConfig, span: Span = nullcontext) -> None:
        self.config = config
        self.span = span
        with ExitStack() as resources:
            packer = resources.enter_context(ThreadPoolExecutor(1, "jfbatch-packer"))
            self.loaded, runner = self._load(resources, packer)
            loaded = self.loaded
            # Packing the weights leaves Python to what comes next: vocabulary, grammar cache, kernels.
            self.renderer = PromptRenderer(
                loaded.tokenizer, config.system, config.raw, tool_format(config.tool_format)
            )
            template = "" if config.raw else chat_template(loaded.tokenizer)
            self.end = reasoning_end(config.reasoning_end, template)
            with span("vocabulary"):
                markers = [*self.renderer.markers, *(self.end.markers if self.end else ())]
                vocabulary = vocabulary_of(loaded, markers)
            cache = resources.enter_context(GrammarCache(config.cache_directory / "grammars"))
            compiler = Compiler(vocabulary, compiler_options(config), cache, span)
            self.compiler = resources.enter_context(compiler)
            with span("wait for weights"):
                packed = runner.result()
            self.engine = make_engine(config, loaded, packed, vocabulary, span)
            self._resources = resources.pop_all()
        if not gc.isenabled():  # the command line keeps it off while things are loaded
            gc.freeze()
            gc.enable()

    def _load(self, resources: ExitStack, packer: ThreadPoolExecutor) -> tuple[LoadedModel, Future[Runner]]:
        """The model, and its runner as soon as it is ready."""
        config = self.config
        if config.tensor_parallel > 1:
            group = resources.enter_context(TensorParallelGroup(tensor_parallel_order(config)))
            with self.span("load model"):
                loaded, leading = group.load()
            ready: Future[Runner] = Future()
            ready.set_result(leading)
            return loaded, ready
        set_threads(config.threads)
        with self.span("load model"):
            loaded = load_model(
                config.model, config.device, config.dtype, config.cache_directory, config.trust_remote_code
            )
        return loaded, packer.submit(make_runner, config, loaded, self.span)

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, value, traceback)

    def run(self, rows: Iterator[Row], outcomes: Outcomes) -> InputError | None:
        """Run the rows; returns what was wrong with the input where it could not be read on."""
        outcomes.reasoning_end = self.end
        outcomes.watch(self.engine.statistics, self.compiler.statistics)
        options = feed_options(self.config, self.loaded, self.end, self.compiler)
        told = (outcomes.reject, outcomes.each_step, self.span)
        with Feed(rows, self.renderer, self.compiler, options, *told) as feed:
            return run_rows(feed, self.engine, outcomes)


def run_rows(feed: Feed, engine: Engine, outcomes: Outcomes) -> InputError | None:
    """Settle what comes out of the engine, one row after another."""
    for completion in engine.run(feed):
        with engine.span("complete"):
            waiting = feed.finished(completion.key)
            if not outcomes.complete(waiting, completion):
                feed.again(waiting)
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


def tensor_parallel_order(config: RunConfig) -> TensorParallelOrder:
    """What the processes of `--tensor-parallel` load."""
    return TensorParallelOrder(
        count=config.tensor_parallel,
        name=config.model,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        cache_dir=str(config.cache_directory),
        trust_remote_code=config.trust_remote_code,
        threads=config.threads or max(1, len(os.sched_getaffinity(0)) // config.tensor_parallel),
    )


def make_runner(config: RunConfig, loaded: LoadedModel, span: Span = nullcontext) -> Runner:
    """The model ready for packed steps. Raises ModelError where it cannot be run so."""
    with span("pack weights"):
        runner = Runner(loaded.model, kv_dtype=KV_DTYPES[config.kv_dtype])
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
