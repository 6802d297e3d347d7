"""`python -m bench.ahead`: what going ahead gains beside a device whose passes take a given time.

Without a GPU: the passes of a made-up model cost nothing here and are "done" when a device that worked
through them one after another would be, and reading its choices waits for that. The host's work is the real
one, over a small vocabulary. So this shows what the schedule is worth, not what a GPU does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import bench.first  # noqa: E402, F401 - before torch

# isort: split

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from torch import Tensor  # noqa: E402

from jfbatch.engine import device_choice, early  # noqa: E402
from jfbatch.engine.ahead import Ahead  # noqa: E402
from jfbatch.engine.device_choice import DeviceChooser  # noqa: E402
from jfbatch.engine.engine import Engine, EngineConfig  # noqa: E402
from jfbatch.engine.kv_cache import SlotPool  # noqa: E402
from jfbatch.engine.runner import LateTokens, Segment  # noqa: E402
from jfbatch.engine.sequence import Request  # noqa: E402
from jfbatch.engine.transfer import Reading  # noqa: E402
from jfbatch.grammar import Grammar, Vocabulary  # noqa: E402
from tests.engine.matchers import tiny_tokenization  # noqa: E402
from tests.engine.sources import ListSource  # noqa: E402

CPU = torch.device("cpu")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 10, "maxLength": 40},
        "kind": {"enum": ["billing", "delivery", "question", "other"]},
        "note": {"type": "string", "minLength": 20, "maxLength": 60},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "kind", "note", "count"],
}


class Device:
    """When a device would be done that takes `seconds` for each pass."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.done = 0.0

    def work(self) -> None:
        self.done = max(time.perf_counter(), self.done) + self.seconds


class MadeUpRunner:
    """Stands for a Runner: the next token depends on the last one, by a fixed table."""

    device, logits_share, takes_late_tokens, steady, typical = CPU, 0.3, True, False, True

    def __init__(self, vocabulary_size: int, device: Device) -> None:
        self.vocabulary_size = vocabulary_size
        self.pool = SlotPool(CPU, torch.float32)
        self.pool.resize(1, 1)
        self.pool.layer(0, 1, 1, 1)
        self._device = device
        chance = torch.Generator().manual_seed(1)
        self._table = 3 * torch.randn(vocabulary_size, vocabulary_size, generator=chance)

    def forward(self, segments: list[Segment], late: LateTokens | None = None) -> Tensor:
        self._device.work()
        flat: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            wanted += [len(flat) + index for index in segment.logits]
            flat += segment.token_ids
        ids = torch.tensor(flat)
        if late is not None:
            ids[list(late.places)] = late.ids
        return self._table[ids[torch.tensor(wanted, dtype=torch.long)]]


class DeviceEngine(Engine):
    """Chooses as on a device of its own. `wanted`: see Ahead."""

    wanted: bool | None = None

    def _make_ahead(self) -> Ahead:
        chooser = DeviceChooser(CPU, self.runner.vocabulary_size)
        return Ahead(self.wanted, chooser, CPU, self.statistics)


def run(
    grammar: Grammar, device: Device, wanted: bool | None, drafts: bool, rows: int
) -> tuple[float, DeviceEngine, dict[str, list[int]]]:
    """Seconds, the engine, and the outputs."""

    class LateReading(Reading):
        """Comes when the device is done with what it was given before."""

        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            self._ready = device.done

        def wait(self) -> NDArray[np.int64]:
            time.sleep(max(self._ready - time.perf_counter(), 0))
            return super().wait()

    tokens = tiny_tokenization()
    runner: Any = MadeUpRunner(grammar.vocabulary.size, device)
    settings = EngineConfig(batch_size=64, context_length=512, prefill_chunk=4096, drafts=drafts)
    DeviceEngine.wanted = wanted
    engine = DeviceEngine(runner, tokens, settings)
    requests = [
        Request(str(row), tokens.encode(f"Record {row} of Graz: "), grammar.matcher(), 80, group="g")
        for row in range(rows)
    ]
    with patch.object(device_choice, "Reading", LateReading), patch.object(early, "Reading", LateReading):
        started = time.perf_counter()
        done = {each.key: each.token_ids for each in engine.run(ListSource(requests))}
        return time.perf_counter() - started, engine, done


def schema_grammar() -> Grammar:
    """SCHEMA over the tests' tiny vocabulary."""
    tokens = tiny_tokenization()
    texts = [tokens.token_bytes(token) or None for token in range(tokens.size)]
    vocabulary = Vocabulary.from_tokens(texts, tokens.end_ids)
    return Grammar.from_pattern("schema", json.dumps(SCHEMA), vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--milliseconds", type=float, nargs="*", default=[1.0, 2.0, 5.0, 10.0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    grammar = schema_grammar()
    print("| ms per pass | drafts | ahead | s | gain | passes | rows ahead | in vain | early |")
    print("|---|---|---|---|---|---|---|---|---|")
    for milliseconds in arguments.milliseconds:
        for drafts in (True, False):
            first, outputs = 0.0, {}
            for wanted, name in ((False, "never"), (None, "where it pays"), (True, "always")):
                seconds, engine, done = min(
                    (
                        run(grammar, Device(milliseconds / 1e3), wanted, drafts, arguments.rows)
                        for _ in range(3)
                    ),
                    key=lambda result: result[0],
                )
                first, outputs = (seconds, done) if wanted is False else (first, outputs)
                if done != outputs:
                    sys.exit("the outputs differ")
                did = engine.statistics
                counts = did.forward_passes, did.rows_ahead, did.rows_in_vain, did.chosen_early
                cells = f"{milliseconds:g}", "on" if drafts else "off", name, f"{seconds:.2f}"
                print(f"| {' | '.join(cells)} | {first / seconds:.2f} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
