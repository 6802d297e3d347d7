"""Random expressions over the bytes a and b, and the exact set of their short texts as an oracle."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from jfbatch.grammar.expression import (
    ByteSet,
    Choice,
    Difference,
    Expression,
    Intersection,
    Literal,
    Repeat,
    Sequence,
)

LONGEST = 5
ALL_TEXTS = [bytes(text) for length in range(LONGEST + 1) for text in product(b"ab", repeat=length)]


def _bounds(limits: tuple[int, int | None]) -> tuple[int, int | None]:
    low, extra = limits
    return low, None if extra is None else low + extra


_leaves = st.one_of(
    st.binary(max_size=2).map(lambda data: Literal(bytes(97 + byte % 2 for byte in data))),
    st.sampled_from([ByteSet.of(b"a"), ByteSet.of(b"ab"), ByteSet(0)]),
)
_repeat_bounds = st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(0, 3))).map(_bounds)


def _larger(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    several = st.lists(inner, max_size=3).map(tuple)
    return st.one_of(
        several.map(Sequence),
        several.map(Choice),
        st.tuples(inner, _repeat_bounds).map(lambda pair: Repeat(pair[0], *pair[1])),
        st.tuples(inner, inner).map(Intersection),
        st.tuples(inner, inner).map(lambda pair: Difference(*pair)),
    )


expressions = st.recursive(_leaves, _larger, max_leaves=10)


def texts_of(expression: Expression) -> frozenset[bytes]:
    """Every text of at most LONGEST bytes that the expression matches."""
    match expression:
        case Literal(data):
            return frozenset({data})
        case ByteSet():
            return frozenset(bytes([byte]) for byte in b"ab" if byte in expression)
        case Sequence(parts):
            found = frozenset({b""})
            for part in parts:
                found = _joined(found, texts_of(part))
            return found
        case Choice(parts):
            return frozenset().union(*(texts_of(part) for part in parts))
        case Repeat(inner, low, high):
            return _repeated(texts_of(inner), low, high)
        case Intersection(parts):
            return frozenset.intersection(*(texts_of(part) for part in parts))
        case Difference(include, exclude):
            return texts_of(include) - texts_of(exclude)
    raise TypeError(expression)


def _joined(one: frozenset[bytes], other: frozenset[bytes]) -> frozenset[bytes]:
    return frozenset(a + b for a in one for b in other if len(a + b) <= LONGEST)


def _repeated(inner: frozenset[bytes], low: int, high: int | None) -> frozenset[bytes]:
    found: set[bytes] = set()
    current = frozenset({b""})
    for count in range((high if high is not None else low + LONGEST + 1) + 1):
        if count >= low:
            found |= current
        current = _joined(current, inner)
    return frozenset(found)
