"""What a wider step costs, and when drafts pause."""

from __future__ import annotations

import math
import random

import pytest
import torch

from jfbatch.engine.pace import Pace

CPU = torch.device("cpu")


def paced(fixed: float, noise: float = 0.0, steps: int = 60) -> Pace:
    """A pace that has seen steps of `fixed` milliseconds and 2 more per token."""
    used, dice = Pace(CPU, 0.25), random.Random(3)
    for _ in range(steps):
        tokens, logits = dice.randint(1, 300), dice.randint(1, 64)
        seconds = (fixed + 2 * (tokens + 0.25 * logits)) / 1000
        used.observe(tokens, logits, seconds * (1 + noise * dice.uniform(-1, 1)))
    return used


@pytest.mark.parametrize("fixed", [20, 100, 1000])
def test_the_fixed_part_of_a_step_is_learnt_from_its_times(fixed: float) -> None:
    assert paced(fixed).fixed == pytest.approx(fixed / 2, rel=0.4)
    assert paced(fixed, noise=0.1).fixed == pytest.approx(fixed / 2, rel=0.6, abs=8)


def test_steps_of_one_size_teach_nothing() -> None:
    used = Pace(CPU, 0.25)
    before = used.fixed
    for _ in range(50):
        used.observe(64, 64, 0.2)
    assert used.fixed == before


def test_a_step_that_was_interrupted_is_left_out() -> None:
    used = paced(60)
    before = used.fixed
    used.observe(10, 10, 60.0)
    assert used.fixed == before


def test_a_draft_in_vain_costs_more_the_more_rows_share_the_fixed_part() -> None:
    used = paced(60)
    assert used.price(1) < used.price(8) < used.price(64) < math.inf


def test_drafts_that_are_always_wrong_pause_before_they_cost_two_percent() -> None:
    used = Pace(CPU, 0.25)
    lost = 0
    for _ in range(2000):
        drafts = 0 if math.isinf(used.price(32)) else 16
        used.observe(32 + drafts, 32 + drafts, 0.1)
        used.settle(32, 0, drafts)
        lost += drafts
    assert 0 < lost * 1.25 < 0.02 * used.work


def test_what_drafts_earned_long_ago_does_not_pay_for_losses_now() -> None:
    used = Pace(CPU, 0.25)
    for _ in range(1000):
        used.observe(40, 40, 0.1)
        used.settle(32, 32, 0)
    steps = 0
    while not math.isinf(used.price(32)):
        used.settle(32, 0, 40)
        steps += 1
    assert steps < 100


def test_nothing_is_learnt_from_a_step_that_is_not_like_those_to_come() -> None:
    used = paced(60)
    before, work = used.fixed, used.work
    for tokens in range(10, 300):
        used.observe(tokens, 8, 0.2, typical=False)
    assert used.fixed == before and used.work > work


def test_where_text_jumps_a_draft_needs_less_to_be_worth_its_place() -> None:
    with_jumps, without = Pace(CPU, 0.25), Pace(CPU, 0.25, jumps=False)
    assert 0 < with_jumps.price(64) < without.price(64)
