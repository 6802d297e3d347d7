"""What a process learns from Slurm's environment: which shard it is.

Nothing here depends on job ids: an element that is requeued or submitted again is the same shard.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jfbatch.errors import UsageError
from jfbatch.rows.shard import Shard

_EXPLICIT = "or name the shard yourself, as in --shard $SLURM_ARRAY_TASK_ID/8"


def array_shard(environment: Mapping[str, str] | None = None) -> Shard:
    """The shard that this element of a Slurm array is (`--shard auto`). Raises UsageError."""
    environment = os.environ if environment is None else environment
    task, first, last, count, step = _array(environment)
    if count != (last - first) // step + 1 or (task - first) % step or not first <= task <= last:
        raise UsageError(
            f"--shard auto: the Slurm array has {count} elements from {first} to {last} in steps of {step}: "
            f"where some are left out, their rows would be too. Submit --array=1-N, {_EXPLICIT}"
        )
    return Shard((task - first) // step + 1, count)


def _array(environment: Mapping[str, str]) -> tuple[int, int, int, int, int]:
    """Task id, first, last, count and step of the array."""
    names = ("ID", "MIN", "MAX", "COUNT", "STEP")
    told = {f"SLURM_ARRAY_TASK_{name}": environment.get(f"SLURM_ARRAY_TASK_{name}") for name in names}
    if told["SLURM_ARRAY_TASK_STEP"] is None:
        told["SLURM_ARRAY_TASK_STEP"] = "1"
    for variable, value in told.items():
        if value is None:
            raise UsageError(
                f"--shard auto: {variable} is not set, so this is no element of a Slurm array: "
                "give --shard i/n, such as --shard 1/8"
            )
        if not value.isdecimal() or (variable.endswith(("COUNT", "STEP")) and int(value) < 1):
            raise UsageError(f"--shard auto: {variable} is {value!r}, not a number")
    task, first, last, count, step = (int(str(value)) for value in told.values())
    return task, first, last, count, step
