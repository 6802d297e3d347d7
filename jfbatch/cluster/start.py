"""How a run starts: alone, as one shard, or as several processes over shards of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from jfbatch import job
from jfbatch.cluster.devices import run_on_devices
from jfbatch.cluster.requeue import job_id, requeue
from jfbatch.cluster.slurm_environment import array_shard
from jfbatch.config import RunConfig
from jfbatch.rows.output_path import followed
from jfbatch.rows.shard import Shard
from jfbatch.rows.shard_directories import begun_shards

_STOPPED = 128 + signal.SIGTERM


def start(config: RunConfig) -> int:
    """Run a job as its settings say; the process's exit code. Raises JfbatchError."""
    if config.shard == "auto":
        config = config.model_copy(update={"shard": str(array_shard())})
    config = with_files_of_the_shard(config)
    if not config.requeue:
        return _run(config)
    job_id()  # outside of Slurm it raises, before anything starts
    before = _parts(config)

    def run_again(code: int) -> None:
        if code == _STOPPED:
            requeue(made_progress=_parts(config) != before)

    code = _run(config, run_again)
    run_again(code)
    return code


def with_files_of_the_shard(config: RunConfig) -> RunConfig:
    """The settings with files that are this shard's own: summary.json becomes summary.1-of-2.json.

    All elements of an array have the same command line. What is no file, such as /dev/stdout, stays.
    """
    if config.shard is None:
        return config
    shard = Shard.parse(config.shard)
    renamed = {}
    for name in ("summary_json", "profile"):
        path: Path | None = getattr(config, name)
        if path is None or not path.name or path.is_relative_to("/dev"):
            continue
        if path.is_file() or not path.exists():
            renamed[name] = path.with_name(f"{path.stem}.{shard.number}-of-{shard.count}{path.suffix}")
    return config.model_copy(update=renamed)


def _run(config: RunConfig, forced_end: Callable[[int], None] | None = None) -> int:
    if config.devices is not None:
        return run_on_devices(config, forced_end)
    return job.run(config, job.Surroundings(forced_end=forced_end))


def _parts(config: RunConfig) -> frozenset[Path]:
    """The parts that are committed to the directories of this process and its workers."""
    if config.output is None:
        return frozenset()
    output = followed(config.output)
    directories = [output.with_name(output.name + ".parts")]
    whole = Shard.parse(config.shard or "1/1")
    for begun in begun_shards(output):
        if begun.shard.number % whole.count == whole.number % whole.count:
            directories.append(begun.directory.path)
    return frozenset(part for directory in directories for part in directory.glob("part-*.parquet"))
