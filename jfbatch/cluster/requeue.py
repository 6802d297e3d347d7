"""A job that Slurm stopped before its end asks to be run again, once what it has done is committed.

The script execs the program, so no shell is left to do it. `scontrol requeue` keeps the job's id, so what
depends on an array still waits for it; an exit code that Slurm requeues by (RequeueExit) would not.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from jfbatch.errors import UsageError

MOST_IDLE_RESTARTS = 3
"""A job that has been restarted so often and is stopped without one new row is not run again."""
_SECONDS = 60
_STATE = re.compile(r"\bJobState=(\w+)")


def job_id(environment: Mapping[str, str] | None = None) -> str:
    """What scontrol knows this job by. Raises UsageError outside of Slurm.

    An element of an array is ARRAY_TASK: the last element has the id of the whole array as its own.
    """
    environment = os.environ if environment is None else environment
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    own = environment.get("SLURM_JOB_ID")
    if own is None:
        raise UsageError("--requeue: SLURM_JOB_ID is not set, so this is no Slurm job that could run again")
    return f"{array}_{task}" if array and task else own


def requeue(made_progress: bool, environment: Mapping[str, str] | None = None) -> bool:
    """Have Slurm run this job again; whether it will. Says on stderr why not.

    A job that is no longer running, as one that was cancelled, is left alone; so is one that gets nowhere.
    """
    environment = os.environ if environment is None else environment
    name = job_id(environment)
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if not made_progress and restarts.isdecimal() and int(restarts) >= MOST_IDLE_RESTARTS:
        print(
            f"jfbatch: job {name} is not requeued: it was stopped {int(restarts) + 1} times, the last time "
            "before it had a single row; give it more --time",
            file=sys.stderr,
        )
        return False
    if threading.current_thread() is threading.main_thread():
        # Requeueing kills this job; what is committed stays, and nothing more is to be done. On the way to
        # an end by force, in another thread, the run's own handler is still there and ignores it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told, state = _scontrol("show", "job", name)
    found = _STATE.search(state)
    if not told or found is None:
        return _failed(name, state)
    if found[1] != "RUNNING":
        print(f"jfbatch: job {name} is not requeued: it is {found[1]}", file=sys.stderr)
        return False
    print(f"jfbatch: requeueing job {name}", file=sys.stderr, flush=True)
    done, answer = _scontrol("requeue", name)
    return done or _failed(name, answer)


def _scontrol(*arguments: str) -> tuple[bool, str]:
    """Whether it went well, and what it said."""
    try:
        done = subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr


def _failed(name: str, reason: str) -> bool:
    shown = " ".join(reason.split())[:200]
    print(
        f"jfbatch: job {name} could not be requeued: {shown}; `scontrol requeue {name}` continues it",
        file=sys.stderr,
    )
    return False
