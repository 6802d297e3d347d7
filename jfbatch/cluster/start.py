"""How a run starts: alone, as one shard, or as several processes over shards of it."""

from __future__ import annotations

from jfbatch import job
from jfbatch.cluster.slurm_environment import array_shard
from jfbatch.config import RunConfig


def start(config: RunConfig) -> int:
    """Run a job as its settings say; the process's exit code. Raises JfbatchError."""
    if config.shard == "auto":
        config = config.model_copy(update={"shard": str(array_shard())})
    return job.run(config)
