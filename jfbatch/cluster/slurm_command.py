"""The command `jfbatch slurm`: everything is checked here, before it waits in a queue; then the scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jfbatch import job
from jfbatch.cluster.devices import check_for_devices
from jfbatch.cluster.run_arguments import as_arguments
from jfbatch.cluster.slurm import SlurmRequest, submit, write_scripts
from jfbatch.config import RunConfig
from jfbatch.errors import UsageError
from jfbatch.rows.shard import ShardBy
from jfbatch.rows.shard_directories import begun_shards, shards_path


def run(
    config: RunConfig,
    config_file: Path | None,
    flags: Mapping[str, Any],
    request: Mapping[str, Any],
    extra: Sequence[str],
    submits: bool,
) -> int:
    """Write the scripts and print where they are; submit them where asked. Raises UsageError, OutputError.

    `flags` are those of the run that were given; `request` has array, gpus, time and partition.
    """
    asked = SlurmRequest.parse(**request, extra=extra)
    if "-" in config.inputs:
        raise UsageError("slurm: standard input cannot be read by several shards: name a file")
    if config.shard is not None:
        raise UsageError(f"slurm: leave out shard ({config.shard}): the script says which an element runs")
    adds_devices = asked.gpus > 1 and config.devices is None and config.tensor_parallel == 1
    devices = "all" if adds_devices else config.devices
    # Each element is checked as it will run.
    element = config.model_copy(update={"shard": f"1/{asked.shards}", "devices": devices})
    plan = job.check(element)
    if devices is not None:
        check_for_devices(element)
    _check_cut(plan.output, asked.shards, config.shard_by, devices is not None)
    arguments = as_arguments(config, flags)
    if adds_devices:
        arguments += ["--devices", "all"]
    if config_file is not None:
        arguments += ["--config", str(config_file)]
    scripts = write_scripts(config.output or plan.output, arguments, asked)  # beside a link, not its target
    for path in (scripts.array, scripts.merge, scripts.submit):
        print(path)
    return submit(scripts) if submits else 0


def _check_cut(output: Path, shards: int, by: ShardBy, several_devices: bool) -> None:
    """Raise UsageError where the output is cut in another way already: every element would refuse it."""
    for begun in begun_shards(output):
        count, begun_by = begun.shard.count, begun.shard.by
        fits = count % shards == 0 if several_devices else count == shards
        if not fits or begun_by != by:
            raise UsageError(
                f"{output} was begun in {count} shards by {begun_by}, which --array {shards} by {by} does "
                f"not continue: give --array {count}, or remove {shards_path(output)} (after "
                "`jfbatch merge --partial`, what is done already is kept in the table)"
            )
