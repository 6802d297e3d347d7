"""How one more worker changes the time: `python bench/workers.py [ROWS] [WORKERS,...]`.

Runs the same rows through the tests' tiny model with `--devices cpu:N`, each worker with one thread on
processors of its own as far as there are enough, and prints a table in Markdown. What a process needs before
its first rows (imports, model) is told apart: it is the same for any number. The tables must be equal.
"""

from __future__ import annotations

import json
import os
import re
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
    """One run, in seconds: all of it, and from the first committed rows to the finished table."""

    workers: int
    seconds: float
    busy: float


def run(directory: Path, workers: int, rows: int) -> Measured:
    """One run of all rows with so many workers."""
    output = directory / f"table-{workers}.parquet"
    command = [sys.executable, "-m", "jfbatch", "run", "rows.jsonl", "-o", output.name]
    command += ["--schema", "schema.json", "--model", "model", "--cache-dir", "cache", "--max-tokens", "60"]
    command += ["--threads", "1", "--devices", f"cpu:{workers}", "--flush-seconds", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JFBATCH_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True)
    first = None
    while process.poll() is None:
        if first is None and any(directory.glob(f"{output.name}.shards/*/part-*")):
            first = time.monotonic()
        time.sleep(0.01)
    seconds = time.monotonic() - started
    assert process.stderr is not None
    told = process.stderr.read()
    assert process.returncode == 0, told
    assert re.search(rf"^rows +{rows:,}: ", told, re.MULTILINE), told
    return Measured(workers, seconds, seconds - ((first or started) - started))


def main(rows: int = 3000, workers: tuple[int, ...] = (1, 2, 4)) -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_tiny_model(directory / "model")
        (directory / "schema.json").write_text(json.dumps(SCHEMA))
        lines = [json.dumps({"id": f"r{n}", "prompt": f"Tell me about {n}."}) + "\n" for n in range(rows)]
        (directory / "rows.jsonl").write_text("".join(lines[:64]))
        run(directory, 1, 64)  # kernels and grammars are compiled once
        (directory / "table-1.parquet").unlink()
        (directory / "table-1.parquet.journal").unlink()
        (directory / "rows.jsonl").write_text("".join(lines))
        measured = [run(directory, count, rows) for count in workers]
        first = pq.read_table(directory / f"table-{workers[0]}.parquet").select(COMPARED)
        for count in workers[1:]:
            assert pq.read_table(directory / f"table-{count}.parquet").select(COMPARED).equals(first), count
    processors = len(os.sched_getaffinity(0))
    print(f"{rows:,} rows, {processors} processors; the tables are equal\n")
    print("| workers | whole run | from the first commit to the end | rows/s after it | against one |")
    print("|---|---|---|---|---|")
    for one in measured:
        rate, base = rows / one.busy, rows / measured[0].busy
        print(
            f"| {one.workers} | {one.seconds:.1f} s | {one.busy:.1f} s | {rate:.0f} | {rate / base:.2f} x |"
        )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        *([int(given[0])] if given else []),
        *([tuple(int(part) for part in given[1].split(","))] if len(given) > 1 else []),
    )
