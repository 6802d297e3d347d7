"""How one more worker changes the time: `python bench/workers.py [ROWS] [WORKERS,...]`.

Runs the same rows through the tests' tiny model with `--devices cpu:N`, each worker with one thread on
processors of its own as far as there are enough, and prints a table in Markdown. Few rows are mostly the
start (imports, model), which every process pays; the difference to many is the work. Tables must be equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pyarrow.parquet as pq  # noqa: E402

from tests.soak.kill_loop import COMPARED, SCHEMA  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402


@dataclass(frozen=True)
class Measured:
    """Seconds of the whole command with so many workers, for few rows and for many."""

    workers: int
    few: float
    many: float

    def rate(self, rows: int, fewer: int) -> float:
        """Rows per second of what the many rows have more: starting and merging little are left out."""
        return (rows - fewer) / (self.many - self.few)


def seconds_of(directory: Path, source: str, output: str, workers: int) -> float:
    """One run, in seconds."""
    command = [sys.executable, "-m", "jfbatch", "run", source, "-o", output]
    command += ["--schema", "schema.json", "--model", "model", "--cache-dir", "cache", "--max-tokens", "60"]
    command += ["--threads", "1", "--devices", f"cpu:{workers}", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JFBATCH_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    subprocess.run(command, cwd=directory, env=environment, check=True)
    return time.monotonic() - started


def main(rows: int = 3000, workers: tuple[int, ...] = (1, 2, 4)) -> None:
    """Measure and print the table."""
    fewer = max(rows // 10, 1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_tiny_model(directory / "model")
        (directory / "schema.json").write_text(json.dumps(SCHEMA))
        lines = [json.dumps({"id": f"r{n}", "prompt": f"Tell me about {n}."}) + "\n" for n in range(rows)]
        (directory / "few.jsonl").write_text("".join(lines[:fewer]))
        (directory / "many.jsonl").write_text("".join(lines))
        seconds_of(directory, "few.jsonl", "warm.parquet", 1)  # kernels and grammars are compiled once
        measured = [
            Measured(
                count,
                seconds_of(directory, "few.jsonl", f"few-{count}.parquet", count),
                seconds_of(directory, "many.jsonl", f"many-{count}.parquet", count),
            )
            for count in workers
        ]
        first = pq.read_table(directory / f"many-{workers[0]}.parquet").select(COMPARED)
        for count in workers[1:]:
            assert pq.read_table(directory / f"many-{count}.parquet").select(COMPARED).equals(first), count
    print(f"{len(os.sched_getaffinity(0))} processors; the tables are equal\n")
    print(f"| workers | {fewer:,} rows | {rows:,} rows | rows/s of the difference | against one |")
    print("|---|---|---|---|---|")
    for one in measured:
        rate = one.rate(rows, fewer)
        against = rate / measured[0].rate(rows, fewer)
        print(f"| {one.workers} | {one.few:.1f} s | {one.many:.1f} s | {rate:.0f} | {against:.2f} x |")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        *([int(given[0])] if given else []),
        *([tuple(int(part) for part in given[1].split(","))] if len(given) > 1 else []),
    )
