"""Token bookkeeping of one row: certain tokens, drafts, what is cached."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jfbatch.engine.sequence import Request, Sequence
from tests.engine.matchers import FreeMatcher


def sequence(limit: int = 9) -> Sequence:
    made = Sequence(Request("a", [1, 2, 3], FreeMatcher(100), limit), limit)
    made.cached = 3
    return made


def test_an_accepted_draft_stays_cached_and_a_refused_one_takes_the_rest_with_it() -> None:
    row = sequence()
    row.set_drafts([4, 5, 6])
    row.cached = 6
    row.append(4, b"d")
    assert (row.certain, row.cached, row.token_ids) == (4, 6, [1, 2, 3, 4, 5, 6])
    row.append(9, b"x")
    assert (row.certain, row.cached, row.token_ids) == (5, 4, [1, 2, 3, 4, 9])
    assert bytes(row.text) == b"dx"


def test_truncated_tokens_become_drafts_whose_cache_is_kept_where_they_come_again() -> None:
    row = sequence()
    for token in (4, 5, 6):
        row.append(token, bytes([96 + token]))
    row.cached = 6
    row.truncate(1)
    assert (row.output_ids, bytes(row.text), row.ends) == ([4], b"d", [1])
    row.append(5, b"e")
    row.append(7, b"g")
    assert (row.token_ids, row.cached) == ([1, 2, 3, 4, 5, 7], 5)


@given(st.lists(st.tuples(st.sampled_from(["append", "drafts", "truncate", "run"]), st.integers(0, 3))))
def test_what_is_cached_is_always_a_prefix_that_was_computed(actions: list[tuple[str, int]]) -> None:
    row = sequence(limit=1000)
    computed = [1, 2, 3]
    for action, number in actions:
        if action == "append":
            row.append(number, bytes([number]))
        elif action == "drafts":
            row.set_drafts([number, 1, 2][: number + 1])
        elif action == "truncate":
            row.truncate(max(row.output_tokens - number, 0))
        else:
            computed = list(row.token_ids)
            row.cached = len(computed)
        assert row.token_ids[: row.cached] == computed[: row.cached]
        assert len(row.ends) == row.output_tokens
        assert bytes(row.text) == bytes(row.output_ids)
        assert row.pending == len(row.token_ids) - row.cached >= 0
