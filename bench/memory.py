"""Resident memory of a run of many rows: `python bench/memory.py ROWS [SCHEMAS] [noise]`.

The whole program runs, from the input file to the finished table, but for the model: an engine that gives
every row its grammar's shortest text at once, or, with `noise`, the real engine on a runner whose logits
are noise. SCHEMAS gives the rows that many different schemas in turn. Prints memory as the rows pass, the
peak, and rows per second.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from jfbatch import decoding, job  # noqa: E402
from jfbatch.config import load_config  # noqa: E402
from jfbatch.engine.engine import EngineStatistics, RequestSource  # noqa: E402
from jfbatch.engine.kv_cache import SlotPool  # noqa: E402
from jfbatch.engine.runner import Segment  # noqa: E402
from jfbatch.engine.sequence import Completion  # noqa: E402
from jfbatch.outcomes import Outcomes  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402

NOISE_ROWS = 4096
SECONDS_BETWEEN = 10.0


class NoiseRunner:
    """A runner as the engine sees it; its logits are the same random numbers in turn."""

    steady = takes_late_tokens = False
    typical = True

    def __init__(self, model: Any, kv_dtype: torch.dtype | None = None) -> None:
        self.vocabulary_size: int = model.config.vocab_size
        self.device = torch.device("cpu")
        self.logits_share = 0.3  # of a step's work, as for a small model
        self.pool = SlotPool(self.device, kv_dtype or torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(NOISE_ROWS, self.vocabulary_size, generator=generator)
        self._next = 0

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        count = sum(len(segment.logits) for segment in segments)
        self._next = (self._next + 1) % 1024
        return self._noise[self._next : self._next + count]


class ShortestEngine:
    """An engine as the job sees it: each row's output is the shortest that its grammar allows."""

    span = nullcontext

    def __init__(self, *_model: Any) -> None:
        self.statistics = EngineStatistics()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def run(self, source: RequestSource) -> Iterator[Completion]:
        while not self._stopped and not source.exhausted():
            requests = source.take(256)
            for request in requests:
                text = request.matcher.shortest_ending()
                prompt = len(request.prompt_ids)
                yield Completion(request.key, [], text, "finished", None, prompt, len(text), 0, len(text), 0)
            if not requests:
                source.wait(0.05)


def write_input(path: Path, rows: int, schemas: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            row: dict[str, Any] = {"id": f"row-{number}", "prompt": f"{number}: say something"}
            if schemas > 1:
                row["schema"] = schema(number % schemas)
            file.write(json.dumps(row) + "\n")


def schema(number: int) -> dict[str, Any]:
    properties = {
        "label": {"enum": ["red", "green", "blue", f"colour {number}"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 99},
    }
    return {"type": "object", "properties": properties, "required": ["label", "score"]}


def resident() -> float:
    """MB now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def watch(outcomes: Outcomes, stop: threading.Event) -> None:
    started = time.monotonic()
    while not stop.wait(SECONDS_BETWEEN):
        seconds = time.monotonic() - started
        print(f"{seconds:5.0f} s {outcomes.rows_done:9,} rows {resident():7.0f} MB", flush=True)


def measure(rows: int, schemas: int, noise: bool, directory: Path) -> None:
    save_tiny_model(directory / "model")
    write_input(directory / "rows.jsonl", rows, schemas)
    (directory / "schema.json").write_text(json.dumps(schema(0)))
    flags: dict[str, Any] = {
        "inputs": [str(directory / "rows.jsonl")],
        "output": str(directory / "table.parquet"),
        "model": str(directory / "model"),
        "cache_dir": str(directory / "cache"),
        "schema": str(directory / "schema.json"),
        "raw": True,
        "quiet": True,
        "batch_size": 64,
        "flush_rows": 2048,
    }
    stop = threading.Event()

    class Watched(Outcomes):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            threading.Thread(target=watch, args=(self, stop), daemon=True).start()

    if noise:
        setattr(decoding, "Runner", NoiseRunner)  # noqa: B010 - a stand-in, not a subtype
    else:
        setattr(decoding, "make_engine", ShortestEngine)  # noqa: B010
    setattr(job, "Outcomes", Watched)  # noqa: B010
    started = time.monotonic()
    code = job.run(load_config(flags))
    seconds = time.monotonic() - started
    stop.set()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(
        f"exit code {code}; {rows:,} rows, {schemas} schemas: peak {peak:.0f} MB, at the end "
        f"{resident():.0f} MB, {seconds:.0f} s, {rows / seconds:,.0f} rows/s"
    )


def main() -> None:
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    rows, schemas = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as directory:
        measure(rows, schemas, sys.argv[3:] == ["noise"], Path(directory))


if __name__ == "__main__":
    main()
