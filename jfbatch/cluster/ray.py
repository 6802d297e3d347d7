"""Ray: `StructuredGenerator` for Dataset.map_batches, and `jfbatch ray`, whose actors run shards.

Ray does the distributing and knows nothing of rows; jfbatch knows nothing of Ray's objects. A generator
keeps its model between batches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from jfbatch import job
from jfbatch.cluster.merge import merge_shards
from jfbatch.config import RunConfig, load_config
from jfbatch.engine.model import prepare_environment
from jfbatch.errors import JfbatchError, UsageError
from jfbatch.outcomes import Outcomes
from jfbatch.report.progress import Progress
from jfbatch.rows.columns import Columns
from jfbatch.rows.constraint import FIELDS
from jfbatch.rows.reader import ReaderOptions, rows_of_records
from jfbatch.rows.result import RowResult
from jfbatch.rows.row import Pattern, Row
from jfbatch.rows.shard import Shard
from jfbatch.rows.shard_directories import begun_shards

logger = logging.getLogger("jfbatch")


_NOT_OF_A_GENERATOR = frozenset(
    {
        *("inputs", "output", "shard", "shard_by", "devices", "requeue"),
        *("keep_parts", "overwrite", "retry", "flush_rows", "flush_seconds"),
        *("max_failures", "summary_json", "profile"),
    }
)
"""Settings of a run that has an input, an output and an end of its own."""


class StructuredGenerator:
    """A callable class for `Dataset.map_batches`: a batch of prompts in, their results out.

        dataset.map_batches(StructuredGenerator, fn_constructor_kwargs={"model": "demo", "schema": schema},
            batch_format="pyarrow", batch_size=256, compute=ray.data.ActorPoolStrategy(size=4))

    `settings` are those of `jfbatch run` by name (docs/configuration.md); `schema` may be the schema itself.
    The columns are those of its tables. `row` is the batch's own column of that name, where it has one, and
    null elsewhere: no actor knows how many rows others have. `value` has the schema's type unless a batch
    has a column that can name a row's own constraint. Ids may repeat. Raises JfbatchError.
    """

    def __init__(self, schema: Any = None, **settings: Any) -> None:
        prepare_environment()
        from jfbatch.decoding import Decoder  # here, because it brings torch

        if isinstance(schema, str):
            settings, schema = {**settings, "schema": schema}, None
        refused = sorted(_NOT_OF_A_GENERATOR & set(settings))
        if refused:
            raise UsageError(
                f"StructuredGenerator: {', '.join(refused)}: mean nothing here: Ray says what is read and "
                "where it goes, and keeps it"
            )
        others = sorted({"regex", "choice", "grammar"} & {n for n, value in settings.items() if value})
        if schema is not None and others:
            raise UsageError(f"StructuredGenerator: give one of schema and {' and '.join(others)}, not both")
        self.config = load_config(settings)
        job.check_settings(self.config)
        pattern = Pattern.of_schema(schema) if schema is not None else job.default_pattern(self.config)
        if pattern is not None:
            job.check_pattern(self.config, pattern)
        self.pattern = pattern
        self.options = ReaderOptions(
            keep=self.config.keep,
            pattern=pattern,
            prompt_column=self.config.prompt_column,
            schema_column=self.config.schema_column,
            id_column=self.config.id_column,
            duplicate_ids="keep",
        )
        self._decoder = Decoder(self.config)
        _warn_of_starvation()

    def __call__(self, batch: Any) -> pa.Table:
        """The results of one batch, in its order. `batch`: a table, or columns by name. Raises ValueError."""
        table = batch if isinstance(batch, pa.Table) else pa.table(_as_columns(batch))
        results = _Collected()
        outcomes = Outcomes(results, Progress(quiet=True), self.config.retries, None)
        rows = rows_of_records(table.to_pylist(), self.options)
        damage = self._decoder.run(outcomes.still_to_run(rows), outcomes)
        if damage is not None:
            raise damage
        finished = self._columns(table.column_names).table(results.in_order(table.num_rows))
        place = finished.schema.get_field_index("row")
        numbers = table.column("row").cast(pa.int64()) if "row" in table.column_names else None
        if numbers is None:
            numbers = pa.nulls(table.num_rows, pa.int64())
        return finished.set_column(place, finished.schema.field(place), numbers)

    def _columns(self, names: Sequence[str]) -> Columns:
        own = {*FIELDS, self.config.schema_column}
        shared = None if own & set(names) else self.pattern
        calls_tools = "tools" in names
        return job.make_columns(self.config, shared, self._decoder.end is not None, calls_tools)


def _warn_of_starvation() -> None:
    """Where the actors hold every CPU, Ray Data has none to read with, and waits for ever."""
    import ray

    if ray.is_initialized() and ray.available_resources().get("CPU", 0.0) <= 0:
        logger.warning(
            "the actors hold all %g CPUs of this Ray cluster: if what is before them has yet to be read, "
            "nothing will; give map_batches a smaller num_cpus (such as 0.5) or fewer actors",
            ray.cluster_resources().get("CPU", 0.0),
        )


def _as_columns(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(column, "tolist", lambda column=column: column)() for name, column in batch.items()}


class _Collected:
    """Results in memory."""

    def __init__(self) -> None:
        self._results: dict[int, RowResult] = {}

    def contains(self, _row: Row) -> bool:
        return False

    def add(self, result: RowResult) -> None:
        self._results[result.index] = result

    def commit_if_due(self) -> bool:
        return False

    def in_order(self, count: int) -> list[RowResult]:
        return [self._results[index] for index in range(count)]


def run_shards(config: RunConfig, actors: int, cpus: float = 1, gpus: float = 0) -> int:
    """`jfbatch ray`: one shard per actor, then one table; the exit code. Raises JfbatchError.

    All nodes must see input and output under the same names. An actor that is lost is started again and
    continues from its shard's parts, as does the same command.
    """
    _refuse_settings(config)
    import ray

    plan = job.check(config)
    if "-" in config.inputs:
        raise UsageError("ray: standard input cannot be read by several actors: name a file")
    begun = begun_shards(plan.output)
    count = begun[0].shard.count if begun else actors
    started = not ray.is_initialized()
    if started:
        ray.init(address=None, include_dashboard=False, log_to_driver=not config.quiet)
    try:
        check_resources(ray.cluster_resources(), actors, cpus, gpus)
        runner = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=1, max_task_retries=1)(ShardActor)
        pool = [runner.remote() for _ in range(min(actors, count))]
        shards = Shard(1, 1, config.shard_by).parts(count)
        pending = {
            pool[place % len(pool)].run.remote(_for_shard(config, shard), os.getcwd()): shard
            for place, shard in enumerate(shards)
        }
        _wait_for(ray, pending)
    finally:
        if started:
            ray.shutdown()
    merged = merge_shards(plan.output)
    if merged.table is None and merged.damage is None:
        raise JfbatchError("; ".join(map(str, merged.missing)) + ": the same command continues")
    if merged.damage is not None:
        raise merged.damage
    assert merged.table is not None
    good = {"ok", "shortened"}
    return 0 if all(status in good for status, count in merged.table.statuses.items() if count) else 1


def _refuse_settings(config: RunConfig) -> None:
    """Raise UsageError on settings that are of one process."""
    if config.shard is not None or config.devices is not None or config.requeue:
        raise UsageError("ray: leave out --shard, --devices and --requeue: Ray places the shards")
    for flag, file in (("--summary-json", config.summary_json), ("--profile", config.profile)):
        if file is not None:
            raise UsageError(f"ray: leave out {flag}: it is of one process, and the actors are several")


class ShardActor:
    """Runs shards, one after another, in an actor's process."""

    def run(self, settings: Mapping[str, Any], directory: str) -> tuple[int, str]:
        """The exit code of one shard, and what was wrong where it could not run."""
        prepare_environment()
        try:
            os.chdir(directory)  # an actor's own is another; names are relative to the command's
        except OSError as error:
            return (
                UsageError.exit_code,
                f"{directory}: {error.strerror} on a node: all need the same files",
            )
        try:
            return job.run(RunConfig.model_validate(dict(settings))), ""
        except JfbatchError as error:
            return error.exit_code, str(error)


def _for_shard(config: RunConfig, shard: Shard) -> dict[str, Any]:
    changed: dict[str, Any] = {"shard": str(shard), "summary_json": None, "quiet": True}
    told: dict[str, Any] = config.model_copy(update=changed).model_dump(mode="json", exclude_defaults=True)
    return told


def _wait_for(ray: Any, pending: dict[Any, Shard]) -> None:
    """Until every shard has ended. Raises JfbatchError for the first that could not run."""
    while pending:
        (done, *_), _ = ray.wait(list(pending))
        shard = pending.pop(done)
        try:
            code, reason = ray.get(done)
        except ray.exceptions.RayError as error:
            told = str(error).strip().splitlines()
            raise JfbatchError(
                f"the actor of shard {shard} was lost: {told[-1] if told else type(error).__name__}; "
                "what is finished is kept, and the same command continues"
            ) from error
        if reason and code != 65:
            raise _ShardFailed(reason, code)


class _ShardFailed(JfbatchError):
    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def check_resources(there: Mapping[str, float], actors: int, cpus: float, gpus: float) -> None:
    """Raises UsageError where the cluster can never hold all actors: Ray would wait for ever."""
    for name, each in (("CPU", cpus), ("GPU", gpus)):
        if actors * each > there.get(name, 0):
            raise UsageError(
                f"--actors: {actors} actors with {each:g} {name} each need {actors * each:g}; Ray has "
                f"{there.get(name, 0):g}: give fewer actors, or less with --{name.lower()}s-per-actor"
            )
