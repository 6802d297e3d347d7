"""A follower of a tensor-parallel group: `python -m jfbatch.engine.follower`, its order as JSON on stdin.

When its stdin ends the leader is gone, and so is this process. Signals are the leader's to answer: Slurm and
terminals send them to all processes, and the leader needs the followers to finish its step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from jfbatch.engine.model import prepare_environment
from jfbatch.errors import JfbatchError


def main() -> None:
    """Follow until the leader ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_leader, daemon=True).start()
    prepare_environment()
    from jfbatch.engine.tensor_parallel import TensorParallelOrder, follow

    try:
        follow(TensorParallelOrder(**order))
    except (JfbatchError, RuntimeError) as error:  # the leader's end breaks the connection as well
        reason = " ".join(str(error).split())[:200]
        print(f"jfbatch: process {os.environ['RANK']} of --tensor-parallel: {reason}", file=sys.stderr)
        sys.exit(1)


def _end_with_the_leader() -> None:
    while sys.stdin.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
