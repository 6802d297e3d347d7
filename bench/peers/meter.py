"""What a run takes: wall time, CPU time of the process and those it names, and what others used meanwhile.

Needs nothing but Python: every peer imports it in its own environment.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Outcome:
    """One measured run over all rows, the model being loaded before.

    `texts` are in row order; `others` is how many cores other processes kept busy on average.
    """

    seconds: float
    cpu_seconds: float
    others: float
    output_tokens: int
    texts: list[str]
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Outcome:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Outcome(**document)


class Meter:
    """Measures from its making to `stop`. `processes`: ids of further processes that work for the run."""

    def __init__(self, processes: Sequence[int] = ()) -> None:
        self._processes = processes
        self._machine = _busy_seconds()
        self._cpu = self._own_seconds()
        self._started = time.perf_counter()

    def stop(self, texts: list[str], output_tokens: int, versions: dict[str, str]) -> Outcome:
        """The outcome of a run that has written `texts`."""
        seconds = time.perf_counter() - self._started
        cpu = self._own_seconds() - self._cpu
        others = max(_busy_seconds() - self._machine - cpu, 0.0) / seconds
        return Outcome(seconds, cpu, others, output_tokens, texts, versions)

    def _own_seconds(self) -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = time.process_time() + children.ru_utime + children.ru_stime
        for process in self._processes:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / _TICK
        return total


def _busy_seconds() -> float:
    """CPU seconds that the whole machine has been busy for since it started."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / _TICK
