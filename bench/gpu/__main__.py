"""`bench/gpu/run.sh TOKENIZER`: packed decoding on the device is checked against the CPU, then timed.

Random weights give random texts within the schema, so rows/s are of little meaning; the time of a step
against its floor (weights and KV read at the measured copy bandwidth, or the multiplications where those
take longer) is what counts. Cases that do not fit the time are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import bench.first  # noqa: E402, F401 - before torch

# isort: split

import torch  # noqa: E402

from bench.decoding import Bench  # noqa: E402
from bench.gpu.cases import (  # noqa: E402
    Case,
    Figures,
    cases,
    run,
    run_case,
    transformers_with_xgrammar,
    waiting_share,
)
from bench.gpu.models import SIZES, TINY, Size, make_model, read_tokenizer  # noqa: E402
from bench.hardware import measure_hardware  # noqa: E402
from bench.scaling import write_input  # noqa: E402
from jfbatch.engine.engine import EngineConfig  # noqa: E402
from jfbatch.engine.model import load_model  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402

_CHECKED_ROWS = 48
_COLUMNS = "| model | case | rows | rows/s | tokens/s | steps | passes per token | decode step ms | floor "
_COLUMNS += "| padding | replayed | graphs | recording s | valid |"


class Clock:
    """How much of the time is left."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def has_time_for(self, what: str, seconds: float) -> bool:
        """Whether that many seconds are left; what does not fit is noted."""
        if time.monotonic() + seconds < self._end:
            return True
        self.left_out.append(what)
        return False


def equal_to_the_cpu(device: torch.device, directory: Path) -> tuple[int, int]:
    """(rows whose text is the CPU engine's, rows) on the tiny model in float32, jumps and drafts included.

    On the device, short steps are in fixed shapes, whatever it is.
    """
    save_tiny_model(directory / "model")
    write_input(directory / "checked.jsonl", _CHECKED_ROWS, 3)
    texts = []
    for name, static in (("cpu", False), (str(device), True)):
        bench = Bench(load_model(str(directory / "model"), name, "f32"), torch.float32, static)
        settings = EngineConfig(batch_size=16, context_length=bench.loaded.context_length)
        texts.append(bench.run_file(directory / "checked.jsonl", settings, _CHECKED_ROWS, 60).texts)
    return sum(ours == theirs for ours, theirs in zip(*texts, strict=True)), _CHECKED_ROWS


def time_model(
    size: Size, arguments: argparse.Namespace, clock: Clock, directory: Path
) -> Iterator[Figures | dict[str, Any]]:
    """All that is timed on one model; the last item says how long the device waits."""
    device = torch.device(arguments.device)
    loaded = make_model(size, read_tokenizer(arguments.tokenizer), device, torch.bfloat16)
    file = directory / "rows.jsonl"
    if clock.has_time_for(f"{size.name}: transformers + XGrammar", 20):
        peer = transformers_with_xgrammar(loaded, arguments.rows[0], arguments.max_tokens)
        if peer is not None:
            yield peer
    bench = Bench(loaded, static=True)
    hardware = measure_hardware(device, torch.bfloat16, 0.1 if arguments.tiny else 1.0)
    for rows in arguments.rows:
        for case in cases(rows):
            if clock.has_time_for(f"{size.name}: {rows} rows, {case.title}", 15):
                yield run_case(bench, case, hardware, arguments.max_tokens, file)
        case = Case(rows)
        if clock.has_time_for(f"{size.name}: {rows} rows, waiting", 20):
            once = partial(run, bench, case, arguments.max_tokens, file)
            share = waiting_share(once, device)
            yield {"model": size.name, "rows": rows, "device waits": share}
    yield {"model": size.name, "flops": hardware.flops, "bandwidth": hardware.bandwidth}


def line(figures: Figures) -> str:
    """A row of the table."""

    def shown(value: float | int | None, form: str) -> str:
        return "" if value is None else format(value, form)

    cells = (
        *(figures.model, figures.case, str(figures.rows), f"{figures.rows_per_second:.1f}"),
        *(f"{figures.tokens_per_second:,.0f}", str(figures.steps), shown(figures.passes_per_token, ".2f")),
        *(f"{figures.step_ms:.1f}", shown(figures.floor, ".0%"), shown(figures.padding, ".0%")),
        *(
            shown(figures.replayed, ".0%"),
            shown(figures.graphs, "d"),
            shown(figures.recording_seconds, ".1f"),
        ),
        shown(figures.valid, "d"),
    )
    return f"| {' | '.join(cells)} |"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="tokenizer.json, its .gz, or a directory"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few rows: to see that it runs")
    parser.add_argument("--rows", nargs="*", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--minutes", type=float, default=4.7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or ([4, 8] if arguments.tiny else [64, 256])
    arguments.max_tokens = arguments.max_tokens or (64 if arguments.tiny else 128)
    return arguments


def main() -> None:
    arguments = parsed()
    clock = Clock(arguments.minutes)
    device = torch.device(arguments.device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found: list[Figures] = []
    notes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        equal, of = equal_to_the_cpu(device, directory)
        print(f"{card}, torch {torch.__version__}: {equal} of {of} rows of the tiny model as on the CPU\n")
        print(f"{_COLUMNS}\n{'|---' * _COLUMNS.count(' | ')}|---|", flush=True)
        for size in TINY if arguments.tiny else SIZES:
            for item in time_model(size, arguments, clock, directory):
                if isinstance(item, Figures):
                    found.append(item)
                    print(line(item), flush=True)
                else:
                    notes.append(item)
            gc.collect()  # the model goes before the next one comes
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for note in notes:
        print(
            ", ".join(
                f"{key}: {value:.3g}" if isinstance(value, float) else f"{value}"
                for key, value in note.items()
            )
        )
    for what in clock.left_out:
        print(f"left out for want of time: {what}")
    document = {
        "card": card,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "tiny": arguments.tiny,
        "rows as on the CPU": [equal, of],
        "runs": [asdict(figures) for figures in found],
        "notes": notes,
        "left out": clock.left_out,
    }
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    file = arguments.json or ROOT / "bench" / "results" / f"gpu-{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if equal != of:
        sys.exit("the device's texts are not the CPU's")


if __name__ == "__main__":
    main()
