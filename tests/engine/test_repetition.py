"""Rows that go round in circles are ended early; rows that merely repeat a little are not."""

from __future__ import annotations

import random
from itertools import cycle, islice
from typing import Any, cast

import pytest
import torch

from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.repetition import PERIOD, SPAN, is_repeating
from jfbatch.engine.runner import Runner
from jfbatch.engine.sequence import Request
from tests.engine.matchers import TEXT, Field, TemplateMatcher, tiny_tokenization
from tests.engine.test_engine import FaultyRunner, completions, prompt


@pytest.mark.parametrize("period", [1, 2, 7, 19, PERIOD])
def test_a_circle_of_any_period_is_found_once_it_is_long_enough(period: int) -> None:
    before = [1000 + number for number in range(30)]
    circle = list(islice(cycle(range(period)), SPAN))
    ids = before + circle
    assert is_repeating(ids, 0, len(ids))
    assert is_repeating(ids, 30, len(ids))
    assert not is_repeating(ids, 31, len(ids))  # the prompt does not count
    assert not is_repeating(ids, 0, len(ids) - 1)


def test_what_does_not_repeat_for_long_is_no_circle() -> None:
    chance = random.Random(0)
    assert not is_repeating([chance.randrange(50) for _ in range(5000)], 0, 5000)
    longer = list(islice(cycle(range(PERIOD + 1)), 1000))
    assert not is_repeating(longer, 0, 1000)
    broken = [7] * SPAN
    broken[SPAN // 2] = 8
    assert not is_repeating(broken, 0, SPAN)
    assert not is_repeating([0] * 100, 0, 100)  # a number of a hundred zeros


def circling(**settings: Any) -> Any:
    """A row whose model says "ab" for ever inside a string."""
    tokenization = tiny_tokenization()
    loop = [tokenization.encode(letter)[0] for letter in "ab"]

    def fault(faulty: FaultyRunner, segments: Any, run: Any) -> torch.Tensor:
        logits = run()
        logits[:, :] = 0.0
        logits[:, loop[faulty.calls % 2]] = 9.0
        return cast(torch.Tensor, logits)

    parts: list[bytes | Field] = [b'{"text": "', Field(TEXT, 0, 1000), b'", "ok": true}']
    runner = cast(Runner, FaultyRunner(fault))
    used = Engine(runner, tokenization, EngineConfig(context_length=2048, drafts=False, **settings))
    return completions(used, [Request("a", prompt(0), TemplateMatcher(parts, tokenization), 600)])["a"]


def test_a_circling_row_takes_its_shortest_ending_and_says_why() -> None:
    done = circling()
    assert done.reason == "shortened"
    assert str(done.error).startswith("repetition")
    assert done.text.endswith(b'", "ok": true}') and b"abab" * 10 in done.text
    assert SPAN <= done.completion_tokens < SPAN + 40


def test_the_stop_can_be_switched_off() -> None:
    done = circling(repetition_stop=False)
    assert done.reason in ("finished", "shortened") and done.error is None
    assert done.completion_tokens > SPAN + 100


def test_memory_that_runs_out_once_on_a_row_alone_costs_nothing() -> None:
    def fault(faulty: FaultyRunner, segments: Any, run: Any) -> torch.Tensor:
        if faulty.calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cast(torch.Tensor, run())

    tokenization = tiny_tokenization()

    def request() -> Request:
        return Request("a", prompt(0), TemplateMatcher([b"[", Field(TEXT, 3, 9), b"]"], tokenization), 60)

    settings = EngineConfig(context_length=256)
    used = Engine(FaultyRunner(fault), tokenization, settings)  # type: ignore[arg-type]
    done = completions(used, [request()])["a"]
    undisturbed = Engine(FaultyRunner(lambda faulty, segments, run: run()), tokenization, settings)  # type: ignore[arg-type]
    assert used.statistics.out_of_memory == 1
    assert done.token_ids == completions(undisturbed, [request()])["a"].token_ids
    assert done.reason == "finished" and done.error is None
