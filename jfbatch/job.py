"""One run from end to end: THE place to start reading.

Everything is checked before anything starts; rows flow from the reader through the feed to the
engine; what finishes is checked, settled and committed; at the end one table appears.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from jfbatch.config import RunConfig
from jfbatch.engine.identity import model_identity
from jfbatch.engine.model import check_model_name
from jfbatch.errors import InputError, InvalidGrammar, NothingMatches, Unsatisfiable, UsageError
from jfbatch.grammar.backends import BackendName, check_supported, open_backend, why_missing
from jfbatch.grammar.backends.oracle import byte_vocabulary
from jfbatch.grammar.compiler import candidates_of
from jfbatch.grammar.deadline import deadline
from jfbatch.grammar.ebnf import grammar_to_rules
from jfbatch.grammar.grammar import Grammar, compile_schema
from jfbatch.outcomes import Outcomes
from jfbatch.report import summary
from jfbatch.report.kernels import telling_of_compilation
from jfbatch.report.progress import Progress
from jfbatch.report.statistics import RunStatistics
from jfbatch.report.summary import print_summary
from jfbatch.report.trace import Profile
from jfbatch.rows.columns import Columns
from jfbatch.rows.job_description import JobDescription
from jfbatch.rows.json_text import is_utf8, unique_keys
from jfbatch.rows.output_path import check_output, followed
from jfbatch.rows.reader import ReaderOptions, check_inputs, read_rows
from jfbatch.rows.reasoning import reasoning_end
from jfbatch.rows.row import Pattern, Row
from jfbatch.rows.shard import Shard, rows_of
from jfbatch.rows.store import Store
from jfbatch.rows.tables import format_by_name
from jfbatch.rows.tools import tool_format
from jfbatch.rows.validate import validator
from jfbatch.signals import Signals

_SIGNALS_SEEN_EVERY = 0.5  # seconds; their handlers run at once, and end nothing that waits
_READER_SECONDS = 2.0  # in which a thread that reads comes to its next row

logger = logging.getLogger(__name__)

Span = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Surroundings:
    """What a run has around it: who shows its progress and says how to go on (None: the run itself, on
    stderr), and what is done, with the exit code, before an end by force (see Signals)."""

    progress: Progress | None = None
    forced_end: Callable[[int], None] | None = None


def run(config: RunConfig, surroundings: Surroundings | None = None) -> int:
    """Run a job and return the process's exit code (see docs/running.md). Raises JfbatchError."""
    surroundings = surroundings or Surroundings()
    with telling_of_compilation(config.quiet):
        plan = check(config)
        if config.profile is None:
            return run_plan(config, plan, surroundings, nullcontext)
        with Profile(config.profile) as trace:
            return run_plan(config, plan, surroundings, trace.span)


def run_plan(config: RunConfig, plan: Plan, surroundings: Surroundings, span: Span) -> int:
    """Run what was checked; `span` times the parts of it."""
    with ExitStack() as stack:
        store = stack.enter_context(open_store(config, plan))
        progress = stack.enter_context(surroundings.progress or Progress(quiet=config.quiet))
        outcomes = Outcomes(store, progress, config.retries, config.max_failures, span)
        signals = stack.enter_context(Signals(config.grace, outcomes.status_line, surroundings.forced_end))
        rows = outcomes.still_to_run(wanted_rows(config, plan, progress))
        damage = decode(config, rows, outcomes, signals, span)
        # A table takes time to write, so a signal is obeyed before; a shard has only to say that it is done.
        ends = outcomes.is_complete and (plan.shard is not None or not signals.received)
        if (signals.received or outcomes.too_many_failures) and not ends:
            store.commit()
            code = signals.exit_code or 1
            progress.end(outcomes.statistics())
            write_summary(config, outcomes.statistics(outcomes.counts), outcomes.counts, code, finished=False)
            if surroundings.progress is None:
                progress.say(how_to_continue(config, outcomes))
            return code
        pattern = outcomes.shared_pattern_or(plan.pattern)
        columns = make_columns(config, pattern, store.has_reasoning, outcomes.calls_tools)
        with span("finish table"):
            finished = store.finish(columns) if plan.shard is None else store.finish_shard()
    statistics = outcomes.statistics(finished.statuses)
    failed_now = outcomes.statistics().rows_failed
    statistics = replace(statistics, rows_failed_before=statistics.rows_failed - failed_now)
    progress.end(statistics)
    print_summary(statistics, None if plan.shard else plan.output, quiet=config.quiet)
    if plan.shard is not None and surroundings.progress is None:
        progress.say(f"shard {plan.shard} has all its rows; after the last: jfbatch merge {plan.output}")
    code = 0 if outcomes.all_good(finished.statuses) else 1
    write_summary(config, statistics, finished.statuses, code if damage is None else damage.exit_code)
    if damage is not None:
        raise damage
    return code


def write_summary(
    config: RunConfig,
    statistics: RunStatistics,
    rows: Mapping[str, int],
    exit_code: int,
    finished: bool = True,
) -> None:
    """The file of --summary-json, if one is asked for (see report.summary)."""
    if config.summary_json is not None:
        settings = json.loads(config.model_dump_json())
        summary.write_summary(config.summary_json, statistics, settings, rows, exit_code, finished)


@dataclass(frozen=True)
class Plan:
    """What was checked before anything started. `output` is where a link that was named leads to."""

    output: Path
    reader: ReaderOptions
    pattern: Pattern | None
    shard: Shard | None


def check(config: RunConfig) -> Plan:
    """Look at everything that can be wrong without loading a model. Raises UsageError or ModelError."""
    if config.output is None:
        raise UsageError("no output: say where the table goes with -o TABLE.parquet")
    check_output(config.output)
    output = followed(config.output)
    check_settings(config)
    besides = files_besides(config)
    pattern = default_pattern(config)
    if pattern is not None:
        check_pattern(config, pattern)
    reader = ReaderOptions(
        keep=config.keep,
        pattern=pattern,
        prompt_column=config.prompt_column,
        schema_column=config.schema_column,
        id_column=config.id_column,
        duplicate_ids=config.duplicate_ids,
        open_objects=config.objects == "open",
        exclude=(
            *(f"{output}{suffix}" for suffix in ("", ".parts", ".journal", ".shards")),
            *map(str, besides.values()),
        ),
    )
    shard = Shard.parse(config.shard, config.shard_by) if config.shard else None
    if shard is not None and "-" in config.inputs:
        raise UsageError("--shard: standard input cannot be read by several shards: name a file")
    check_distinct((*config.inputs, *check_inputs(config.inputs, reader)), {"-o": output, **besides})
    check_model_name(config.model)
    return Plan(output, reader, pattern, shard)


def files_besides(config: RunConfig) -> dict[str, Path]:
    """What a run writes besides its table, by flag. Raises UsageError where that cannot be."""
    named = {"--summary-json": config.summary_json, "--profile": config.profile}
    files = {flag: file for flag, file in named.items() if file is not None}
    for flag, file in files.items():
        if not file.parent.is_dir():
            raise UsageError(f"{flag}: there is no directory {file.parent}")
        if file.is_dir():
            raise UsageError(f"{flag}: {file} is a directory: name a file")
    return files


def check_distinct(inputs: Iterable[str], written: Mapping[str, Path]) -> None:
    """Raise UsageError where a file is written for two flags, or read as well."""
    taken: dict[Path, str] = {}
    for flag, file in written.items():
        if (other := taken.setdefault(file.resolve(), flag)) != flag:
            raise UsageError(f"{flag}: {file} is what {other} writes: name another file")
    for name in inputs:
        if name != "-" and (flag := taken.get(Path(name).resolve(), "")):
            what = "output" if flag == "-o" else flag
            raise UsageError(f"{name} is both input and {what}: name another file with {flag}")


def check_settings(config: RunConfig) -> None:
    """Raise UsageError on settings that exclude each other."""
    if config.raw and config.system is not None:
        raise UsageError("a system text needs the chat template: give either --system or --raw")
    if config.keep_parts and (config.shard is not None or config.devices is not None):
        raise UsageError("--keep-parts is for one process: the parts of shards go once they are merged")
    if config.tensor_parallel > 1 and config.devices is not None:
        raise UsageError("give either --devices, for many rows at once, or --tensor-parallel")
    names = (config.prompt_column, config.schema_column, config.id_column)
    told = {"--regex": (config.regex,), "--choice": config.choice, "--system": (config.system,)}
    for flag, texts in {**told, "--keep": config.keep, "a column's name": names}.items():
        if not all(is_utf8(text) for text in texts if text is not None):
            raise UsageError(f"{flag}: not UTF-8 text")
    tool_format(config.tool_format)
    reasoning_end(config.reasoning_end, "")
    if config.backend != "auto" and (reason := why_missing(config.backend)):
        raise UsageError(f"--backend: {reason}")


def default_pattern(config: RunConfig) -> Pattern | None:
    """The pattern for rows without their own. Raises UsageError where it cannot be read."""
    if config.schema_file is not None:
        return Pattern.of_schema(read_schema(config.schema_file))
    if config.regex is not None:
        return Pattern("regex", config.regex)
    if config.choice:
        return Pattern.of_choices(list(config.choice))
    if config.grammar_file is not None:
        return Pattern("grammar", read_grammar(config.grammar_file))
    return None


def check_pattern(config: RunConfig, pattern: Pattern) -> None:
    """Raise UsageError where it shows without a tokenizer, and soon, that the pattern cannot be enforced."""
    latest = time.monotonic() + config.compile_timeout
    refused: list[str] = []
    for backend in candidates_of(config.backend, pattern.kind, pattern.text, config.strict):
        try:
            with deadline(config.compile_timeout):
                check_with(backend, config, pattern)
            return
        except InvalidGrammar as error:
            refused.append(str(error))
            if isinstance(error, Unsatisfiable | NothingMatches):
                break  # no other engine can change that
        except RecursionError:  # the compiler's threads have the stack for it
            logger.debug("the pattern nests deep: it is checked when it is compiled")
            return
    # What takes long is left to the compiler, which does not count the time that its kernels need.
    if time.monotonic() < latest:
        source = config.schema_file or config.grammar_file or ("--regex" if config.regex else "--choice")
        raise UsageError(f"{source}: {'; '.join(refused)}")


def check_with(backend: BackendName, config: RunConfig, pattern: Pattern) -> None:
    """Raise InvalidGrammar where a backend refuses the pattern, whatever the vocabulary."""
    style, objects = config.json_style, config.objects
    if backend != "fsm":
        if config.max_string is not None and pattern.kind == "schema":
            raise InvalidGrammar(f"{backend}: --max-string needs the backend fsm")
        check_supported(backend, pattern.kind, style, objects, config.strict)
        open_backend(backend, byte_vocabulary()).compile(pattern.kind, pattern.text, style, objects)
    elif pattern.kind == "schema":
        compile_schema(
            pattern.schema,
            style,
            objects,
            config.strict,
            max_string=config.max_string,
            integers=config.integers,
        )
    elif pattern.kind == "regex":
        Grammar.from_regex(pattern.text, byte_vocabulary())
    elif pattern.kind == "grammar":
        grammar_to_rules(pattern.text)
    if pattern.kind == "schema":
        validator(pattern)


def read_schema(path: Path) -> object:
    """The JSON Schema in a file. Raises UsageError naming the file and the place."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give --schema a JSON file that exists") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deep to be read") from None
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{path}: a JSON Schema is an object, true or false, not {json.dumps(schema)[:40]}")
    return schema


def read_grammar(path: Path) -> str:
    """The text of a grammar file. Raises UsageError naming the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give --grammar a file that exists") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None


def wanted_rows(config: RunConfig, plan: Plan, progress: Progress) -> Iterator[Row]:
    """The rows of the input that this process is to run."""
    rows = read_rows(config.inputs, plan.reader)
    return rows if plan.shard is None else rows_of(plan.shard, rows, progress.say)


def make_columns(
    config: RunConfig, pattern: Pattern | None, reasoning: bool = False, tool_calls: bool = False
) -> Columns:
    """The table's columns, `pattern` being what all rows share; some stand only in tables that need them."""
    return Columns(
        pattern,
        config.flatten,
        config.keep,
        config.arrow_dates,
        open_objects=config.objects == "open",
        any_integers=config.integers == "any",
        reasoning=reasoning,
        tool_calls=tool_calls,
    )


def open_store(config: RunConfig, plan: Plan) -> Store:
    """The results of this output, those of an earlier start included."""
    fingerprint = {
        "model": model_identity(config.model),
        "dtype": config.dtype,
        "kv-dtype": config.kv_dtype,
        "pattern": plan.pattern.fingerprint if plan.pattern else "",
        "json-style": config.json_style,
        "objects": config.objects,
        "max-string": str(config.max_string or ""),
        "integers": config.integers,
        "backend": config.backend,
        "strict": str(config.strict),
        "system": config.system or "",
        "raw": str(config.raw),
        "max-tokens": str(config.max_tokens),
        "temperature": str(config.temperature),
        "seed": str(config.seed),
        "repetition-stop": str(config.repetition_stop),
        "tool-format": config.tool_format,
        "reasoning-end": config.reasoning_end,
        "max-reasoning-tokens": str(config.max_reasoning_tokens),
    }
    output_format = format_by_name(config.output or plan.output, config.output_format)
    description = JobDescription(
        config.inputs,
        plan.reader,
        output_format,
        config.flatten,
        config.arrow_dates,
        open_objects=config.objects == "open",
        any_integers=config.integers == "any",
    )
    return Store(
        plan.output,
        make_columns(config, plan.pattern),
        fingerprint,
        flush_rows=config.flush_rows,
        flush_seconds=config.flush_seconds,
        overwrite=config.overwrite,
        retry=None if config.retry == "none" else config.retry,
        keep_parts=config.keep_parts,
        output_format=output_format,
        shard=plan.shard,
        job=description.as_json(),
    )


def decode(
    config: RunConfig, rows: Iterator[Row], outcomes: Outcomes, signals: Signals, span: Span = nullcontext
) -> InputError | None:
    """Run what has no result yet; returns what was wrong with the input where it could not be read on."""
    try:
        first = first_row(rows, outcomes, signals)
    except InputError as error:
        return error
    if first is None or signals.received:  # nothing to do: no model needed
        return None
    with span("import"):
        from jfbatch import decoding  # here, because it brings torch and transformers

    return decoding.decode(config, chain([first], rows), outcomes, signals, span)


def first_row(rows: Iterator[Row], outcomes: Outcomes, signals: Signals) -> Row | None:
    """The first row to run; None where there is none, or a signal comes before it, as from a pipe, does."""
    if signals.exit_code is not None:
        return None
    found: Future[Row | None] = Future()

    def read() -> None:
        try:
            found.set_result(next(rows, None))
        except BaseException as error:  # handed to the main thread, which alone hears of signals
            found.set_exception(error)

    reader = threading.Thread(target=read, name="jfbatch-first-row", daemon=True)
    reader.start()
    while not signals.received:
        if wait([found], _SIGNALS_SEEN_EVERY).done:
            return found.result()
    outcomes.stopping = True
    reader.join(_READER_SECONDS)  # one that waits for its input touches nothing of the run
    return None


def how_to_continue(config: RunConfig, outcomes: Outcomes) -> str:
    """What a stopped run says last."""
    why = f"{config.max_failures} rows failed" if outcomes.too_many_failures else "stopped"
    return (
        f"{why}: {outcomes.rows_done:,} rows are committed beside {config.output}; "
        "the same command continues with the others"
    )
