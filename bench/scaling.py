"""Does time per row stay flat? `python -m bench.scaling`: 64 to 4096 rows, then 1 to 1000 distinct schemas.

On the tiny model of the tests, so that everything but the model weighs as much as it ever can. "Waiting" is
the time in which the engine had no row to run because every row's schema was still being compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.decoding import Bench, Measured  # noqa: E402
from jfbatch.engine.engine import EngineConfig  # noqa: E402
from jfbatch.report.trace import Trace  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402

MAX_TOKENS = 60


def write_input(path: Path, rows: int, schemas: int) -> None:
    """Rows of one or, in turn, several schemas of the same size."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            kind = number % schemas
            properties = {
                "label": {"enum": ["red", "green", "blue", f"colour {kind}"]},
                f"score_{kind}": {"type": "integer", "minimum": 0, "maximum": 99},
                "note": {"type": "string", "maxLength": 12},
            }
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            prompt = f"{number}: say something about order {number * 7919 % 100_000}"
            file.write(json.dumps({"id": str(number), "prompt": prompt, "schema": schema}) + "\n")


def measure(bench: Bench, rows: int, schemas: int, batch: int, directory: Path) -> tuple[Measured, Trace]:
    """One run, and where its time went."""
    file = directory / "rows.jsonl"
    write_input(file, rows, schemas)
    settings = EngineConfig(batch_size=batch, context_length=bench.loaded.context_length)
    trace = Trace()
    return bench.run_file(file, settings, rows, MAX_TOKENS, span=trace.span), trace


def line(rows: int, schemas: int, measured: Measured, trace: Trace) -> str:
    """A row of the table: milliseconds per row, of all and of what would grow if anything does."""
    kinds = {name: kind for lane in trace.lanes for name, kind in lane.kinds.items()}

    def per_row(name: str) -> str:
        return f"{1e3 * kinds[name].own / rows:.2f}" if name in kinds else "0.00"

    waiting = kinds["wait"].own if "wait" in kinds else 0.0
    cells = (
        *(str(rows), str(schemas), f"{measured.seconds:.2f}", f"{1e3 * measured.seconds / rows:.2f}"),
        f"{1e3 * measured.cpu_seconds / rows:.2f}",
        *(per_row(name) for name in ("fetch", "plan", "draft", "accept", "retire", "compile", "look ahead")),
        f"{waiting:.2f}",
        f"{measured.valid}/{rows}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--schemas", nargs="*", type=int, default=[1, 10, 100, 1000])
    parser.add_argument("--rows-of-schemas", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args()
    heads = (
        "| rows | schemas | wall s | ms per row | CPU ms per row | fetch | plan | draft | accept | retire "
    )
    heads += "| compile | look ahead | waiting s | valid |"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        save_tiny_model(directory / "model")
        bench = Bench.load(str(directory / "model"), "f32")
        print(f"{heads}\n{'|---' * 14}|")
        cases = [(rows, 1) for rows in arguments.rows]
        cases += [(arguments.rows_of_schemas, schemas) for schemas in arguments.schemas]
        started = time.monotonic()
        for rows, schemas in cases:
            measured, trace = measure(bench, rows, schemas, arguments.batch, directory)
            print(line(rows, schemas, measured, trace), flush=True)
        print(f"in all {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
