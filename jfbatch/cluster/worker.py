"""One of the processes that `--devices` starts: `python -m jfbatch.cluster.worker FD`, settings on stdin.

It runs one shard and tells its parent by lines of JSON on FD how it gets on. When its stdin ends its parent
is gone: then it stops as for SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, TextIO

from jfbatch.config import RunConfig
from jfbatch.engine.model import prepare_environment
from jfbatch.errors import JfbatchError
from jfbatch.report.progress import Progress
from jfbatch.report.statistics import RunStatistics

_INTERVAL = 0.5  # seconds between two reports


class ReportedProgress(Progress):
    """Progress that is shown elsewhere: written as JSON lines."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(quiet=True)
        self._lines = stream
        self._due = 0.0

    def tell(self, **message: Any) -> None:
        """One message. A parent that is gone hears nothing; the end of stdin stops this process then."""
        try:
            self._lines.write(json.dumps(message) + "\n")
            self._lines.flush()
        except OSError:
            return

    def is_due(self) -> bool:
        """Whether the last report is old enough."""
        return time.monotonic() >= self._due

    def update(self, statistics: RunStatistics) -> None:
        """Report the statistics, if it is time to."""
        if self.is_due():
            self._due = time.monotonic() + _INTERVAL
            self.end(statistics)

    def end(self, statistics: RunStatistics) -> None:
        """Report the statistics in any case."""
        told = asdict(statistics)
        self.tell(statistics={**told, "status_counts": dict(statistics.status_counts)})

    def say(self, text: str) -> None:
        """Have the parent print a line."""
        self.tell(say=text)


def main(descriptor: int) -> int:
    """Run what stdin says; the exit code."""
    os.set_inheritable(descriptor, False)
    stream = os.fdopen(descriptor, "w", encoding="utf-8")
    progress = ReportedProgress(stream)
    order = json.loads(sys.stdin.readline())
    config = RunConfig.model_validate(order["config"])
    if order["processors"]:
        os.sched_setaffinity(0, order["processors"])
    threading.Thread(target=_stop_with_the_parent, daemon=True).start()
    prepare_environment()
    from jfbatch import job

    try:
        code = job.run(config, job.Surroundings(progress))
    except JfbatchError as error:
        progress.tell(error=str(error), code=error.exit_code)
        return error.exit_code
    progress.tell(code=code)
    return code


def _stop_with_the_parent() -> None:
    while sys.stdin.readline():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
