"""Kills runs at random moments and continues them: `python -m tests.soak.kill_loop N [MODEL] [SEED]`.

One uninterrupted greedy run is the reference. Then runs of the same command die by SIGKILL, N times in all,
one to three times on the way to each table; every table that results must equal the reference. MODEL is
"demo" by default, or "tiny" for the tests' own model, or any other that `jfbatch run --model` takes.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from jfbatch.config import default_cache_directory
from tests.run_command import Job, write_lines
from tests.tiny_model import save_tiny_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 20, "maxLength": 30}, "n": {"type": "integer"}},
    "required": ["text", "n"],
}
COMPARED = ["id", "row", "status", "text", "value", "error", "prompt_tokens", "completion_tokens"]
ROWS = 12
MOST_KILLS = 3  # on the way to one table


def prepare(job: Job, rows: int) -> list[str]:
    """Write input and schema; returns the flags that every start gets."""
    write_lines(job.input, [{"id": f"r{n}", "prompt": f"Tell me about {n}."} for n in range(rows)])
    schema = job.directory / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    return ["--schema", str(schema), "--batch-size", "3", "--flush-rows", "3", "--max-tokens", "60"]


def run_to_the_end(job: Job, flags: Sequence[str]) -> float:
    """Run the command until it ends; returns its seconds."""
    started = time.monotonic()
    process = job.process(*flags)
    _, stderr = process.communicate(timeout=1800)
    assert process.returncode == 0, stderr
    return time.monotonic() - started


def kill_after(job: Job, flags: Sequence[str], seconds: float, after_commit: bool = False) -> bool:
    """Start the command and kill it, `seconds` after its start or its first commit; False if it was done."""
    before = committed(job)
    process = job.process(*flags)
    while after_commit and process.poll() is None and committed(job) <= before:
        time.sleep(0.01)
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return process.returncode == -signal.SIGKILL
    assert process.returncode == 0, stderr
    return False


def compare(table: pa.Table, reference: pa.Table) -> None:
    """Raise AssertionError where a table lost, doubled or changed rows."""
    ids = table.column("id").to_pylist()
    assert len(set(ids)) == len(ids), "an id appears twice"
    assert ids == reference.column("id").to_pylist(), "ids are missing or out of order"
    for name in COMPARED:
        left, right = table.column(name).to_pylist(), reference.column(name).to_pylist()
        different = [(i, a, b) for i, a, b in zip(ids, left, right, strict=True) if a != b]
        assert not different, f"{name} differs: {different[:3]}"


def committed(job: Job) -> int:
    return len(list(job.parts.glob("part-*.parquet"))) if job.parts.is_dir() else 0


def loop(kills: int, model: str, seed: int, directory: Path) -> None:
    chance = random.Random(seed)
    cache = default_cache_directory()  # which holds the demo model ready to load
    if model == "tiny":
        cache = directory / "cache"
        save_tiny_model(directory / "model")
        model = str(directory / "model")
    jobs = []
    for name in ("reference", "killed"):
        (directory / name).mkdir()
        jobs.append(Job(directory / name, model, cache))
    reference, job = jobs
    flags = prepare(reference, ROWS)
    run_to_the_end(reference, flags)
    reference.output.unlink()
    (directory / "reference" / "table.parquet.journal").unlink()
    length = run_to_the_end(reference, flags)  # with a warm cache, as the killed ones will have
    print(f"uninterrupted: {length:.1f} s", flush=True)
    done = tables = 0
    while done < kills:
        flags = prepare(job, ROWS)
        for _ in range(chance.randint(1, min(MOST_KILLS, kills - done))):
            after_commit = chance.random() < 0.6  # most of a short run is its start
            moment = chance.uniform(0, length * (0.2 if after_commit else 1.0))
            if not kill_after(job, flags, moment, after_commit):
                break
            done += 1
            print(f"kill {done} of {kills} after {moment:.2f} s, {committed(job)} parts", flush=True)
        run_to_the_end(job, flags)
        compare(job.table(), reference.table())
        tables += 1
        shutil.rmtree(job.directory)
        job.directory.mkdir()
    print(f"{done} kills, {tables} tables, all equal to the uninterrupted one")


def main() -> None:
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    model = sys.argv[2] if len(sys.argv) > 2 else "demo"
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    with tempfile.TemporaryDirectory() as directory:
        loop(int(sys.argv[1]), model, seed, Path(directory))


if __name__ == "__main__":
    main()
