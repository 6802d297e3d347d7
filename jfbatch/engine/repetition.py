"""Outputs that go round in circles: the same few tokens again and again until the limit.

Such a row is ended early by its shortest ending. A circle is a stretch long enough that no number, ruler or
small matrix of zeros is taken for one, whatever its period.
"""

from __future__ import annotations

PERIOD = 20  # tokens: the longest circle that is looked for
TIMES = 8  # rounds of the longest circle; shorter ones must fill as many tokens
SPAN = PERIOD * TIMES

REPETITION = f"repetition: the last {SPAN} tokens repeat the same {PERIOD} or fewer"
"""Why a row was shortened."""


def is_repeating(token_ids: list[int], start: int, stop: int) -> bool:
    """Whether token_ids[start:stop] ends with SPAN tokens that repeat with a period of at most PERIOD.

    Costs about a microsecond where it is false.
    """
    if stop - start < SPAN:
        return False
    last = token_ids[stop - 1]
    for period in range(1, PERIOD + 1):
        if token_ids[stop - 1 - period] == last:
            first = stop - SPAN
            if token_ids[first + period : stop] == token_ids[first : stop - period]:
                return True
    return False
