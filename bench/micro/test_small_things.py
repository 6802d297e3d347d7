"""The small things that happen for every row or token: `make bench-micro` (pytest-benchmark).

On the demo model's tokenizer and the schema of bench/workload.py; no weights are loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.first  # noqa: F401 - before torch

# isort: split

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench import workload
from jfbatch.config import default_cache_directory
from jfbatch.engine.retokenize import Retokenizer
from jfbatch.engine.sampler import Draw, choose
from jfbatch.engine.tokenizer import load_tokenizer
from jfbatch.grammar import Grammar, Vocabulary
from jfbatch.rows.columns import Columns
from jfbatch.rows.prompt import PromptRenderer
from jfbatch.rows.reader import ReaderOptions, read_rows
from jfbatch.rows.result import RowResult
from jfbatch.rows.row import Pattern, Row
from jfbatch.rows.store import Store
from jfbatch.rows.validate import validator

PATTERN = Pattern.of_schema(workload.SCHEMA)
VALUE = {
    "name": "Anna Okafor",
    "email": "anna.okafor@bluerivertltd.org",
    "company": "Blue River Ltd",
    "category": "billing",
    "priority": "medium",
    "order_id": "KX-204183",
    "amount_usd": 1834.5,
    "needs_reply": True,
    "summary": "The invoice total does not match the quote that was sent last month.",
}
TEXT = json.dumps(VALUE, separators=(",", ":"))
ROWS = 64
RESULTS = 1000


class Known:
    """The tokenizer as the engine sees it, and a grammar that has been through the text once."""

    end_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer("demo", default_cache_directory()).tokenizer
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
        self.grammar = Grammar.from_json_schema(workload.SCHEMA, self.vocabulary, "compact")
        self.ids = self.encode(TEXT)
        matcher = self.grammar.matcher()
        for token in self.ids:
            matcher.token_mask()
            matcher.accept_token(token)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes[token_id] or b""


@pytest.fixture(scope="module")
def known() -> Known:
    return Known()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    workload.write_rows(file, RESULTS)
    return list(read_rows([str(file)], ReaderOptions(pattern=PATTERN)))


def test_masks_of_states_met_before(benchmark: BenchmarkFixture, known: Known) -> None:
    """One mask and one acceptance for each token of an output."""

    def walk() -> None:
        matcher = known.grammar.matcher()
        for token in known.ids:
            matcher.token_mask()
            matcher.accept_token(token)

    benchmark.extra_info["tokens"] = len(known.ids)
    benchmark(walk)


def test_accepting(benchmark: BenchmarkFixture, known: Known) -> None:
    """One acceptance for each token of an output, and the look for forced bytes after it."""

    def walk() -> None:
        matcher = known.grammar.matcher()
        for token in known.ids:
            matcher.accept_token(token)
            matcher.forced_bytes()

    benchmark.extra_info["tokens"] = len(known.ids)
    benchmark(walk)


def test_a_fresh_grammar_up_to_its_first_mask(benchmark: BenchmarkFixture, known: Known) -> None:
    benchmark(
        lambda: Grammar.from_json_schema(workload.SCHEMA, known.vocabulary, "compact").matcher().token_mask()
    )


def test_retokenising_a_jump(benchmark: BenchmarkFixture, known: Known) -> None:
    """The tokens after the value of one field, once the next key is forced."""
    retokenizer = Retokenizer(known, len(known.vocabulary.token_bytes))
    text = TEXT[: TEXT.index(',"company')]
    ends = np.cumsum([len(known.token_bytes(token)) for token in known.encode(text)]).tolist()
    assert benchmark(retokenizer.jump, text.encode(), ends, b',"company":"') is not None


@pytest.fixture(scope="module")
def logits(known: Known) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, len(known.vocabulary.token_bytes), generator=generator)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_choosing_for_64_rows(
    benchmark: BenchmarkFixture, known: Known, logits: torch.Tensor, temperature: float
) -> None:
    masks = np.stack([known.grammar.matcher().token_mask()] * ROWS)
    draws = [Draw(str(row), 0, 3, temperature) for row in range(ROWS)]
    benchmark.pedantic(
        choose, setup=lambda: ((logits.clone(), masks, draws), {}), rounds=20, warmup_rounds=2, iterations=1
    )


def test_rendering_64_prompts(benchmark: BenchmarkFixture, known: Known, rows: list[Row]) -> None:
    benchmark(PromptRenderer(known.tokenizer).render, rows[:ROWS])


def test_validating_an_output(benchmark: BenchmarkFixture) -> None:
    assert benchmark(validator(PATTERN).check, TEXT) is None


def test_writing_1000_rows(benchmark: BenchmarkFixture, rows: list[Row], tmp_path: Path) -> None:
    """Adding, committing in parts of 256 and finishing the table, fsync included."""
    results = [RowResult.of(row, "ok", text=TEXT, completion_tokens=90) for row in rows]

    def write(number: int) -> None:
        with Store(tmp_path / f"{number}.parquet", Columns(PATTERN), {"model": "none"}) as store:
            for row, result in zip(rows, results, strict=True):
                assert not store.contains(row)
                store.add(result)
                store.commit_if_due()
            store.finish()

    numbers: Any = iter(range(1000))
    benchmark.pedantic(write, setup=lambda: ((next(numbers),), {}), rounds=5, warmup_rounds=1)
