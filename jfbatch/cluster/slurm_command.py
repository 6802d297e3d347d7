"""The command `jfbatch slurm`: everything is checked here, before it waits in a queue; then the scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jfbatch import job
from jfbatch.cluster.run_arguments import as_arguments
from jfbatch.cluster.slurm import SlurmRequest, submit, write_scripts
from jfbatch.config import RunConfig
from jfbatch.errors import UsageError


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
    plan = job.check(config)
    arguments = as_arguments(config, flags)
    if asked.gpus > 1 and config.devices is None and config.tensor_parallel == 1:
        arguments += ["--devices", "all"]
    if config_file is not None:
        arguments += ["--config", str(config_file)]
    scripts = write_scripts(plan.output, arguments, asked)
    for path in (scripts.array, scripts.merge, scripts.submit):
        print(path)
    return submit(scripts) if submits else 0
