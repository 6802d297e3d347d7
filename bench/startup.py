"""How soon the first row comes: `python -m bench.startup [--rounds 5]`, in turn with a plain script.

The plain script imports torch and transformers and loads the same model and tokenizer. jfbatch is started
warm (model copy and grammar cache on disk) on one row; the first row counts when it is complete. Also: the
commands that need no model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from jfbatch.config import default_cache_directory
from jfbatch.engine.model import converted_path, demo_file

ROOT = Path(__file__).parents[1]
LIMIT = 1.5  # seconds that the first row may come after the plain script is done
LIMIT_WITHOUT_MODEL = 0.5

_PLAIN = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
"""
# The program as its command runs it, ended where the first row is complete.
_FIRST_ROW = """
import os, sys
from jfbatch import cli, outcomes
complete = outcomes.Outcomes.complete
def first(self, waiting, completion):
    complete(self, waiting, completion)
    os._exit(0)
outcomes.Outcomes.complete = first
cli.main(sys.argv[1:])
"""
_ROW = {"id": "first", "prompt": "Is water wet? Answer yes or no."}


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    wall = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int, directory: Path) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds by what was started."""
    (directory / "row.jsonl").write_text(json.dumps(_ROW) + "\n")
    job = ["run", str(directory / "row.jsonl"), "--choice", "yes,no", "-q"]
    model = converted_path(demo_file(), default_cache_directory())
    times: dict[str, list[tuple[float, float]]] = {}
    for number in range(-1, rounds):  # the first round warms the caches
        output = ["-o", str(directory / f"{number}.parquet")]
        commands = {
            "plain script": [sys.executable, "-c", _PLAIN, str(model)],
            "jfbatch, first row": [sys.executable, "-c", _FIRST_ROW, *job, *output],
            "jfbatch --help": [sys.executable, "-m", "jfbatch", "--help"],
            "jfbatch run --help": [sys.executable, "-m", "jfbatch", "run", "--help"],
        }
        for name, command in commands.items():
            if number < 0 and name == "jfbatch, first row":
                command = [sys.executable, "-m", "jfbatch", *job, *output]  # to its end: it fills the caches
            took = seconds_of(command)
            if number >= 0:
                times.setdefault(name, []).append(took)
    return {
        name: (median(wall for wall, _ in taken), median(cpu for _, cpu in taken))
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(arguments.rounds, Path(directory))
    print("| | wall s | CPU s |\n|---|---|---|")
    for name, (wall, cpu) in found.items():
        print(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    later = found["jfbatch, first row"][0] - found["plain script"][0]
    print(f"the first row comes {later:.2f} s after the plain script is done (limit {LIMIT} s)")
    slowest = max(found["jfbatch --help"][0], found["jfbatch run --help"][0])
    print(f"commands without a model: {slowest:.2f} s (limit {LIMIT_WITHOUT_MODEL} s)")


if __name__ == "__main__":
    main()
