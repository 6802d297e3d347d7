"""One run from end to end: THE place to start reading.

Everything is checked before anything starts; rows flow from the reader through the feed to the
engine; what finishes is checked, settled and committed; at the end one table appears.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from jfbatch.config import RunConfig
from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.identity import model_identity
from jfbatch.engine.model import LoadedModel, check_model_name, load_model, set_threads
from jfbatch.engine.runner import Runner
from jfbatch.errors import InputError, InvalidGrammar, UsageError
from jfbatch.feed import Feed, FeedOptions
from jfbatch.grammar import Vocabulary
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.compiler import Compiler, CompilerOptions
from jfbatch.grammar.json_schema import schema_to_rules
from jfbatch.grammar.regex import RAW_UTF8, regex_to_expression
from jfbatch.outcomes import Outcomes
from jfbatch.report.progress import Progress
from jfbatch.report.summary import print_summary
from jfbatch.rows.columns import Columns
from jfbatch.rows.prompt import PromptRenderer
from jfbatch.rows.reader import ReaderOptions, check_inputs, read_rows
from jfbatch.rows.row import Pattern, Row
from jfbatch.rows.store import Store
from jfbatch.rows.validate import validator
from jfbatch.signals import Signals

logger = logging.getLogger(__name__)


def run(config: RunConfig) -> int:
    """Run a job and return the process's exit code (see docs/running.md). Raises JfbatchError."""
    plan = check(config)
    with ExitStack() as stack:
        store = stack.enter_context(open_store(config, plan))
        progress = stack.enter_context(Progress(quiet=config.quiet))
        outcomes = Outcomes(store, progress, config.retries, config.max_failures)
        signals = stack.enter_context(Signals(config.grace, outcomes.status_line))
        rows = outcomes.still_to_run(read_rows(config.inputs, plan.reader))
        damage = decode(config, plan, rows, outcomes, signals)
        if signals.received or outcomes.too_many_failures:
            store.commit()
            progress.say(how_to_continue(config, outcomes))
            return signals.exit_code or 1
        columns = Columns(outcomes.shared_pattern, config.flatten, config.keep)
        finished = store.finish(columns)
    print_summary(outcomes.statistics(finished.statuses), plan.output, quiet=config.quiet)
    if config.summary_json:
        outcomes.write_summary(config.summary_json, config, finished.statuses)
    if damage is not None:
        raise damage
    return 0 if outcomes.all_good(finished.statuses) else 1


@dataclass(frozen=True)
class Plan:
    """What was checked before anything started."""

    output: Path
    reader: ReaderOptions
    pattern: Pattern | None


def check(config: RunConfig) -> Plan:
    """Look at everything that can be wrong without loading a model. Raises UsageError or ModelError."""
    if config.output is None:
        raise UsageError("no output: say where the table goes with -o TABLE.parquet")
    pattern = default_pattern(config)
    reader = ReaderOptions(
        keep=config.keep,
        pattern=pattern,
        duplicate_ids=config.duplicate_ids,
        exclude=(str(config.output), f"{config.output}.parts", f"{config.output}.journal"),
    )
    check_inputs(config.inputs, reader)
    check_model_name(config.model)
    return Plan(config.output, reader, pattern)


def default_pattern(config: RunConfig) -> Pattern | None:
    """The pattern for rows without their own, checked as far as it can be without a tokenizer."""
    try:
        if config.schema_file is not None:
            pattern = Pattern.of_schema(read_schema(config.schema_file))
            validator(pattern)
            schema_to_rules(
                pattern.schema, style=config.json_style, objects=config.objects, strict=config.strict
            )
            return pattern
        if config.regex is not None:
            regex_to_expression(config.regex, dialect="python", alphabet=RAW_UTF8)
            return Pattern("regex", config.regex)
    except InvalidGrammar as error:
        raise UsageError(f"{config.schema_file or '--regex'}: {error}") from None
    if config.choice:
        return Pattern.of_choices(list(config.choice))
    if config.grammar_file is not None:
        raise UsageError("--grammar: grammar files are not supported yet; use --schema, --regex or --choice")
    return None


def read_schema(path: Path) -> object:
    """The JSON Schema in a file. Raises UsageError naming the file and the place."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give --schema a JSON file that exists") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{path}: a JSON Schema is an object, not {type(schema).__name__}")
    return schema


def open_store(config: RunConfig, plan: Plan) -> Store:
    """The results of this output, those of an earlier start included."""
    fingerprint = {
        "model": model_identity(config.model),
        "dtype": config.dtype,
        "pattern": plan.pattern.fingerprint if plan.pattern else "",
        "json-style": config.json_style,
        "objects": config.objects,
        "system": config.system or "",
        "raw": str(config.raw),
        "max-tokens": str(config.max_tokens),
        "temperature": str(config.temperature),
        "seed": str(config.seed),
    }
    return Store(
        plan.output,
        Columns(plan.pattern, config.flatten, config.keep),
        fingerprint,
        flush_rows=config.flush_rows,
        flush_seconds=config.flush_seconds,
        overwrite=config.overwrite,
        retry=None if config.retry == "none" else config.retry,
        keep_parts=config.keep_parts,
    )


def decode(
    config: RunConfig, plan: Plan, rows: Iterator[Row], outcomes: Outcomes, signals: Signals
) -> InputError | None:
    """Run the rows through the model; returns what was wrong with the input where it could not be read on."""
    try:
        first = next(rows, None)
    except InputError as error:
        return error
    if first is None:  # every row has its result already: no model needed
        return None
    outcomes.progress.say(f"loading {config.model}")
    set_threads(config.threads)
    loaded = load_model(
        config.model, config.device, config.dtype, config.cache_directory, config.trust_remote_code
    )
    vocabulary = vocabulary_of(loaded)
    engine = make_engine(config, loaded, vocabulary)
    signals.on_stop(engine.stop)
    compiler_options = CompilerOptions(
        style=config.json_style,
        objects=config.objects,
        strict=config.strict,
        timeout=config.compile_timeout,
        threads=config.compile_threads,
    )
    feed_options = FeedOptions(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        context_length=loaded.context_length,
        window=config.window,
    )
    with (
        GrammarCache(config.cache_directory / "grammars") as cache,
        Compiler(vocabulary, compiler_options, cache) as compiler,
        Feed(
            chain([first], rows),
            PromptRenderer(loaded.tokenizer, config.system, config.raw),
            compiler,
            feed_options,
            outcomes.reject,
            outcomes.each_step,
        ) as feed,
    ):
        outcomes.watch(engine.statistics, compiler.statistics)
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
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes[token_id] or b""


def make_engine(config: RunConfig, loaded: LoadedModel, vocabulary: Vocabulary) -> Engine:
    """The engine for this model and these settings."""
    settings = EngineConfig(
        batch_size=config.batch_size,
        context_length=loaded.context_length,
        jump=config.jump,
        drafts=config.drafts,
    )
    if config.kv_memory is not None:
        settings = EngineConfig(**{**settings.__dict__, "kv_memory": config.kv_memory})
    return Engine(Runner(loaded.model), ModelTokenization(loaded, vocabulary), settings)


def how_to_continue(config: RunConfig, outcomes: Outcomes) -> str:
    """What a stopped run says last."""
    why = f"{config.max_failures} rows failed" if outcomes.too_many_failures else "stopped"
    return (
        f"{why}: {outcomes.rows_done:,} rows are committed beside {config.output}; "
        "the same command continues with the others"
    )
