"""The digest table against a dict."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from jfbatch.rows.digests import DigestTable
from jfbatch.rows.row import digest

# Few low halves, so that slots collide; zero halves, which are special.
DIGESTS = st.builds(
    lambda low, high: low.to_bytes(8, "little") + high.to_bytes(8, "little"),
    st.sampled_from([0, 1, 2, 1024, 2**64 - 1]),
    st.integers(0, 5),
)


@given(st.lists(st.tuples(DIGESTS, st.integers(-(2**63), 2**63 - 1))))
def test_insert_keeps_the_first_value(pairs: list[tuple[bytes, int]]) -> None:
    table, oracle = DigestTable(), dict[bytes, int]()
    for key, value in pairs:
        # A zero low half counts as 1: with 2^-64 of all digests this does not matter, here it would.
        key = (int.from_bytes(key[:8], "little") or 1).to_bytes(8, "little") + key[8:]
        assert table.insert(key, value) == oracle.get(key)
        oracle.setdefault(key, value)
    assert len(table) == len(oracle)


def test_growing_loses_nothing() -> None:
    table = DigestTable()
    keys = [digest(str(number)) for number in range(20_000)]
    assert all(table.insert(key, number) is None for number, key in enumerate(keys))
    random.Random(0).shuffle(keys)
    assert all(table.insert(key, -1) not in (None, -1) for key in keys)


def test_increment_counts_from_zero() -> None:
    table = DigestTable()
    assert [table.increment(digest("a")) for _ in range(3)] == [0, 1, 2]
    assert table.increment(digest("b")) == 0
