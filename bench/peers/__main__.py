"""Other programs on the same rows, in turn with jfbatch: `python -m bench.peers --peers vllm,xgrammar,llama`.

Each peer is installed into an environment of its own at first use. Every run is a new process that loads
the model, warms up, and measures the 64 rows; rounds go through all contestants in turn, in another order
each time. Prints medians and ratios, and writes every run to bench/results/. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench import workload
from bench.peers.environments import ENVIRONMENTS, install
from bench.peers.meter import Outcome
from jfbatch.engine.model import converted_path, demo_file
from jfbatch.rows.row import Pattern
from jfbatch.rows.validate import validator

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_SCRIPTS = {
    "jfbatch": "jfbatch_rows",
    "vllm": "vllm_rows",
    "xgrammar": "transformers_rows",
    "llguidance": "transformers_rows",
    "outlines": "transformers_rows",
    "llama": "llama_rows",
}
_TITLES = {
    "vllm": "vLLM (CPU build)",
    "xgrammar": "transformers + XGrammar",
    "llguidance": "transformers + llguidance",
    "outlines": "Outlines",
    "llama": "llama.cpp server",
}


@dataclass(frozen=True)
class Contestant:
    """A program and the weights' type it runs with."""

    name: str
    dtype: str

    @property
    def title(self) -> str:
        return f"{_TITLES.get(self.name, self.name)}, {self.dtype}"


@dataclass(frozen=True)
class Medians:
    """Over a contestant's rounds; `valid` is the least of them."""

    seconds: float
    cpu_seconds: float
    output_tokens: int
    valid: int
    others: float


def contestants(peers: Sequence[str], dtypes: Sequence[str]) -> list[Contestant]:
    """jfbatch and each peer at each dtype; llama.cpp runs the GGUF file as it is."""
    found = [Contestant("jfbatch", dtype) for dtype in dtypes]
    for peer in peers:
        found += [Contestant(peer, dtype) for dtype in (("q4_1",) if peer == "llama" else dtypes)]
    return found


def run_once(
    contestant: Contestant, python: Path, models: dict[str, str], settings: argparse.Namespace
) -> Outcome:
    """One measured run in a process of its own. Raises subprocess.CalledProcessError or TimeoutExpired."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "outcome.json"
        command = [
            *(str(python), "-m", f"bench.peers.{_SCRIPTS[contestant.name]}", "--engine", contestant.name),
            *("--model", models.get(contestant.name, models["safetensors"]), "--dtype", contestant.dtype),
            *("--rows", str(settings.rows), "--threads", str(settings.threads), "--result", str(result)),
        ]
        threads = {"OMP_NUM_THREADS": str(settings.threads), "TOKENIZERS_PARALLELISM": "false"}
        environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        log = Path(directory) / "log"
        with log.open("wb") as stream:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, timeout=settings.timeout
            )
        if done.returncode:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            done.check_returncode()
        return Outcome.read(result)


def valid_texts(texts: Sequence[str]) -> int:
    """How many outputs obey the schema."""
    check = validator(Pattern.of_schema(workload.SCHEMA)).check
    return sum(check(text.strip()) is None for text in texts)


def medians_of(outcomes: Sequence[Outcome]) -> Medians:
    """The medians of a contestant's rounds."""
    return Medians(
        median(outcome.seconds for outcome in outcomes),
        median(outcome.cpu_seconds for outcome in outcomes),
        int(median(outcome.output_tokens for outcome in outcomes)),
        min(valid_texts(outcome.texts) for outcome in outcomes),
        max(outcome.others for outcome in outcomes),
    )


def table(found: dict[Contestant, Medians], rows: int) -> list[str]:
    """The lines of the table; ratios say how many times a contestant's time jfbatch's is contained in it."""
    ours = [contestant for contestant in found if contestant.name == "jfbatch"]
    heads = ["", "wall s", "rows/s", "CPU s", "tokens", "valid"]
    for contestant in ours:
        heads += [f"wall over {contestant.title}", "CPU"]
    heads.append("busy cores of others")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for contestant, figures in found.items():
        cells = [
            *(contestant.title, f"{figures.seconds:.1f}", f"{rows / figures.seconds:.2f}"),
            *(f"{figures.cpu_seconds:.1f}", f"{figures.output_tokens:,}", f"{figures.valid}/{rows}"),
        ]
        for other in ours:
            cells += [
                f"{figures.seconds / found[other].seconds:.2f}",
                f"{figures.cpu_seconds / found[other].cpu_seconds:.2f}",
            ]
        lines.append(f"| {' | '.join([*cells, f'{figures.others:.2f}'])} |")
    return lines


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="vllm,xgrammar,llama", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--rows", type=int, default=workload.ROWS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    parser.add_argument("--environments", type=Path, default=CACHE / "jfbatch-bench" / "peers")
    parser.add_argument("--only-install", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json")
    arguments = parser.parse_args()
    arguments.peers = [peer for peer in arguments.peers.split(",") if peer]
    if unknown := set(arguments.peers) - set(ENVIRONMENTS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    return arguments


def main() -> None:
    arguments = parsed()
    pythons = {peer: install(peer, arguments.environments) for peer in arguments.peers}
    if arguments.only_install:
        return
    pythons["jfbatch"] = Path(sys.executable)
    demo = demo_file()
    copy = converted_path(demo, CACHE / "jfbatch")
    if not copy.is_dir():
        sys.exit("the demo model's copy is not there yet: run `make demo` once")
    models = {"safetensors": str(copy), "llama": str(demo), "jfbatch": "demo"}
    all_of_them = contestants(arguments.peers, arguments.dtypes.split(","))
    outcomes: dict[Contestant, list[Outcome]] = {contestant: [] for contestant in all_of_them}
    for number in range(arguments.rounds):
        shift = number % len(all_of_them)
        for contestant in all_of_them[shift:] + all_of_them[:shift]:
            outcome = run_once(contestant, pythons[contestant.name], models, arguments)
            outcomes[contestant].append(outcome)
            print(
                f"round {number + 1}: {contestant.title}: {outcome.seconds:.1f} s, "
                f"{outcome.cpu_seconds:.1f} CPU s, {valid_texts(outcome.texts)} valid, "
                f"others used {outcome.others:.2f} cores",
                flush=True,
            )
    found = {contestant: medians_of(runs) for contestant, runs in outcomes.items()}
    print("\n" + "\n".join(table(found, arguments.rows)))
    write_json(arguments, outcomes, found)


def write_json(
    arguments: argparse.Namespace, outcomes: dict[Contestant, list[Outcome]], found: dict[Contestant, Medians]
) -> None:
    """Every run and the medians, in one file."""
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {arguments.threads} threads",
        "rows": arguments.rows,
        "contestants": [
            {
                **asdict(contestant),
                "medians": asdict(found[contestant]),
                "versions": runs[0].versions,
                "runs": [
                    {key: value for key, value in asdict(run).items() if key != "versions"} for run in runs
                ],
            }
            for contestant, runs in outcomes.items()
        ],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
