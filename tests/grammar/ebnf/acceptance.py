"""Asking a grammar file about whole texts, and walking through its token masks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from jfbatch.grammar import Grammar, Matcher, Vocabulary

BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])


def accepts(grammar: Grammar, text: str | bytes) -> bool:
    """Whether the whole text belongs to the grammar."""
    data = text.encode() if isinstance(text, str) else text
    state = grammar.automaton.advance(grammar.automaton.start, data)
    return state >= 0 and grammar.automaton.is_accepting(state)


def accepted_by(grammar_text: str, *texts: str) -> list[bool]:
    """For each text, whether the grammar file allows it."""
    grammar = Grammar.from_grammar(grammar_text, BYTES)
    return [accepts(grammar, text) for text in texts]


def allowed_tokens(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """The content tokens that may come next."""
    bits = np.unpackbits(matcher.token_mask().view(np.uint8), bitorder="little")
    return [token for token in np.flatnonzero(bits).tolist() if token not in vocabulary.end_ids]


def random_texts(grammar: Grammar, count: int, longest: int, seed: int = 0) -> Iterator[str]:
    """Texts made of up to `longest` tokens chosen at random from the masks, then the shortest ending."""
    chance = random.Random(seed)
    vocabulary = grammar.vocabulary
    for _ in range(count):
        matcher = grammar.matcher()
        text = b""
        for _ in range(chance.randrange(longest + 1)):
            tokens = allowed_tokens(matcher, vocabulary)
            if not tokens:
                break
            token = chance.choice(tokens)
            matcher.accept_token(token)
            text += vocabulary.token_bytes[token] or b""
        yield (text + matcher.shortest_ending()).decode()
