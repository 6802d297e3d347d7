"""Random texts of a grammar: any allowed token with equal chance, then the shortest ending."""

from __future__ import annotations

import random

import numpy as np

from jfbatch.grammar import Grammar


def random_text(grammar: Grammar, chance: random.Random, tokens: int = 60) -> str:
    """One text that the grammar's masks lead to. Fails the test on an empty mask before acceptance."""
    vocabulary = grammar.vocabulary
    matcher = grammar.matcher()
    text = bytearray()
    for _ in range(chance.randrange(1, tokens)):
        if matcher.is_finished():
            break
        mask = matcher.token_mask()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), f"no token may follow {bytes(text)!r}"
        token = int(chance.choice(allowed))
        if token in vocabulary.end_ids:
            assert matcher.is_accepting()
            return text.decode()
        matcher.accept_token(token)
        text += vocabulary.token_bytes[token] or b""
    return (bytes(text) + matcher.shortest_ending()).decode()
