"""`make bench`: the 64 rows with jfbatch, by dtype, jumping, drafts and batch size (8 to 128).

Prints rows/s, tokens/s, CPU seconds, steps, forward passes per output token, padding, and how near decode
steps come to the floor: the least time that this machine, measured in the same run, needs for their
multiplications and their reading (bench/hardware.py). "Linears" is the share of a decode step that the
model's linear layers would take alone by oneDNN.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import bench.first  # noqa: F401 - before torch

# isort: split

import torch

from bench import workload
from bench.decoding import Bench, Measured
from bench.hardware import BareLinears, Hardware, Shape, measure_hardware
from jfbatch.engine.engine import EngineConfig
from jfbatch.engine.model import set_threads

RESULTS = Path(__file__).parent / "results"
BATCHES = (8, 16, 32, 64, 128)
_COLUMNS = (
    "| dtype | batch | jump | drafts | rows/s | tokens/s | wall s | CPU s | steps | passes per token "
    "| padding | decode step ms | floor | linears | not forward | valid |"
)


@dataclass(frozen=True)
class Case:
    """Settings of one run. More rows than 64 only where the batch is larger."""

    dtype: str
    batch: int
    jump: bool = True
    drafts: bool = True

    @property
    def rows(self) -> int:
        return max(workload.ROWS, self.batch)


@dataclass(frozen=True)
class Figures:
    """What is printed of a run. Shares are 0 to 1; `floor` and `linears` are of the decode steps' time."""

    rows_per_second: float
    tokens_per_second: float
    seconds: float
    cpu_seconds: float
    output_tokens: int
    steps: int
    passes_per_token: float
    padding: float
    decode_step_ms: float
    floor: float
    linears: float
    outside_forward: float
    valid: int
    rows: int


def figures_of(measured: Measured, shape: Shape, hardware: Hardware, bare: BareLinears) -> Figures:
    """The figures of a run."""
    decode = measured.decode_steps
    spent = sum(step.seconds for step in decode)
    floor = sum(shape.work(step.segments).seconds(hardware) for step in decode)
    linears = sum(bare.seconds(step.tokens, step.logits) for step in decode)
    every = sum(step.seconds for step in measured.steps)
    return Figures(
        rows_per_second=measured.rows_per_second,
        tokens_per_second=measured.tokens_per_second,
        seconds=measured.seconds,
        cpu_seconds=measured.cpu_seconds,
        output_tokens=measured.output_tokens,
        steps=len(measured.steps),
        passes_per_token=measured.passes_per_token,
        padding=measured.padding,
        decode_step_ms=1e3 * spent / len(decode),
        floor=floor / spent,
        linears=linears / spent,
        outside_forward=1 - sum(step.forward_seconds for step in measured.steps) / every,
        valid=measured.valid,
        rows=len(measured.texts),
    )


def line(case: Case, figures: Figures) -> str:
    """A row of the table."""
    cells = (
        *(case.dtype, str(case.batch), "on" if case.jump else "off", "on" if case.drafts else "off"),
        *(f"{figures.rows_per_second:.2f}", f"{figures.tokens_per_second:.0f}"),
        *(f"{figures.seconds:.1f}", f"{figures.cpu_seconds:.1f}", str(figures.steps)),
        *(f"{figures.passes_per_token:.2f}", f"{figures.padding:.0%}", f"{figures.decode_step_ms:.0f}"),
        *(f"{figures.floor:.0%}", f"{figures.linears:.0%}", f"{figures.outside_forward:.1%}"),
        f"{figures.valid}/{figures.rows}",
    )
    return f"| {' | '.join(cells)} |"


def cases(dtype: str, batches: list[int]) -> Iterator[Case]:
    """Every batch size, and without jumping and drafts at the size nearest to 64."""
    nearest = min(batches, key=lambda batch: abs(batch - 64))
    for batch in batches:
        yield Case(dtype, batch)
        if batch == nearest:
            yield Case(dtype, batch, drafts=False)
            yield Case(dtype, batch, jump=False)
            yield Case(dtype, batch, jump=False, drafts=False)


def run_dtype(dtype: str, arguments: argparse.Namespace) -> Iterator[tuple[Case, Figures]]:
    """All cases of one dtype on one loaded model; prints as it goes."""
    bench = Bench.load(arguments.model, dtype)
    hardware = measure_hardware(torch.device("cpu"), bench.dtype)
    shape = Shape.of(bench.loaded.model, bench.dtype, bench.runner.pool.bytes_per_token)
    bare = BareLinears(bench.loaded.model, bench.dtype)
    print(
        f"\n{dtype}: {hardware.flops / 1e9:.0f} GFLOP/s in large matmuls, {hardware.bandwidth / 1e9:.0f} GB/s"
        f" read, linears alone at 64 tokens {1e3 * bare.seconds(64, 64):.0f} ms\n\n{_COLUMNS}\n"
        + "|---" * _COLUMNS.count(" | ")
        + "|---|"
    )
    greedy: dict[tuple[int, bool], list[str]] = {}
    for case in cases(dtype, arguments.batch):
        settings = EngineConfig(
            batch_size=case.batch,
            context_length=bench.loaded.context_length,
            jump=case.jump,
            drafts=case.drafts,
        )
        measured = bench.run(settings, case.rows)
        figures = figures_of(measured, shape, hardware, bare)
        print(line(case, figures), flush=True)
        other = greedy.setdefault((case.batch, case.jump), measured.texts)
        if other != measured.texts:
            different = sum(left != right for left, right in zip(other, measured.texts, strict=True))
            sys.exit(f"drafts changed {different} rows: they must change none")
        yield case, figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", nargs="*", default=["f32", "bf16"], choices=["f32", "bf16"])
    parser.add_argument("--batch", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--threads", type=int, help="by default one per physical core")
    parser.add_argument("--json", type=Path, default=RESULTS / "speed.json")
    arguments = parser.parse_args()
    threads = set_threads(arguments.threads)
    print(f"{platform.processor() or platform.machine()}, {threads} threads, torch {torch.__version__}")
    results = [
        {**asdict(case), **asdict(figures)}
        for dtype in arguments.dtype
        for case, figures in run_dtype(dtype, arguments)
    ]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"date": time.strftime("%Y-%m-%d"), "threads": threads, "model": arguments.model}
    arguments.json.write_text(json.dumps({**document, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
