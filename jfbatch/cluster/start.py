"""How a run starts: alone, as one shard, or as several processes over shards of it."""

from __future__ import annotations

import signal
from pathlib import Path

from jfbatch import job
from jfbatch.cluster.requeue import job_id, requeue
from jfbatch.cluster.slurm_environment import array_shard
from jfbatch.config import RunConfig
from jfbatch.rows.shard import Shard
from jfbatch.rows.shard_directories import shard_path

_STOPPED = 128 + signal.SIGTERM


def start(config: RunConfig) -> int:
    """Run a job as its settings say; the process's exit code. Raises JfbatchError."""
    if config.shard == "auto":
        config = config.model_copy(update={"shard": str(array_shard())})
    if not config.requeue:
        return job.run(config)
    job_id()  # outside of Slurm it raises, before anything starts
    before = _parts(config)

    def run_again(code: int) -> None:
        if code == _STOPPED:
            requeue(made_progress=_parts(config) != before)

    code = job.run(config, forced_end=run_again)
    run_again(code)
    return code


def _parts(config: RunConfig) -> frozenset[Path]:
    """The parts that are committed to this process's own directory."""
    if config.output is None:
        return frozenset()
    directory = config.output.with_name(config.output.name + ".parts")
    if config.shard is not None:
        directory = shard_path(config.output, Shard.parse(config.shard))
    return frozenset(directory.glob("part-*.parquet"))
