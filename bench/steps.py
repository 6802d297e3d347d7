"""The time of a step by its number of tokens: `python -m bench.steps [--dtype bf16]`, on the demo model.

Rows that hold 300 tokens go on by so many tokens each, all of them with logits. Medians of twelve steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median

import bench.first  # noqa: F401 - before torch

# isort: split

import torch

from bench.decoding import Bench
from jfbatch.engine.model import set_threads
from jfbatch.engine.runner import Segment

PROMPT, STEPS = 300, 12
SHAPES = ((1, 1), (1, 4), (2, 4), (4, 4), (16, 2), (64, 1), (64, 2), (64, 4))


def segments(rows: int, tokens: int, start: int, prompt: int) -> list[Segment]:
    """So many rows go on by so many tokens; logits of all but those of prompts."""
    ids = torch.randint(0, 40_000, (rows, tokens)).tolist()
    logits = () if start < prompt else range(tokens)
    return [Segment(slot, start, ids[slot], logits, prompt) for slot in range(rows)]


def times(bench: Bench) -> Iterator[tuple[int, int, float]]:
    """Rows, tokens of each, and seconds of a step."""
    most = max(rows for rows, _ in SHAPES)
    bench.runner.pool.resize(most, PROMPT + STEPS * max(tokens for _, tokens in SHAPES))
    bench.runner.forward(segments(most, PROMPT, 0, PROMPT))
    for rows, tokens in SHAPES:
        taken = []
        for step in range(STEPS):
            work = segments(rows, tokens, PROMPT + step * tokens, PROMPT)
            started = time.perf_counter()
            bench.runner.forward(work)
            taken.append(time.perf_counter() - started)
        yield rows, tokens, median(taken)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="bf16")
    arguments = parser.parse_args()
    set_threads(None)
    print("| rows | tokens of each | step ms |\n|---|---|---|")
    for rows, tokens, seconds in times(Bench.load("demo", arguments.dtype)):
        print(f"| {rows} | {tokens} | {1e3 * seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
