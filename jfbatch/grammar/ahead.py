"""Work done before the decoder asks: the kernels that every pattern needs, the masks that rows will need."""

from __future__ import annotations

import random
import threading
import time
from functools import cache

import numpy as np

from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.vocabulary import Vocabulary


@cache
def warm_up() -> None:
    """Have numba compile, or load from its cache, the kernels that every pattern needs.

    Once per installation this takes tens of seconds; no pattern's time limit shall pay for it.
    """
    strings = {  # a length alone, with a small pattern, with one that is worth counting, and two patterns
        "a": {"type": "string", "maxLength": 5},
        "b": {"type": "string", "maxLength": 5, "pattern": "^a"},
        "c": {"type": "string", "maxLength": 5000, "pattern": "^([a-z]+ )*b$"},
        "d": {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]},
    }
    schema = {"type": "object", "properties": strings, "required": list(strings)}
    tokens = [*(bytes([byte]) for byte in range(128)), b"longer than a", None]
    grammar = Grammar.from_json_schema(schema, Vocabulary.from_tokens(tokens, end_ids=[129]))
    matcher = grammar.matcher()
    for byte in b'{"a": "ab", "b": "ab", "c": "b", "d": "ab"}':
        matcher.token_mask()
        matcher.forced_bytes()
        matcher.accept_token(byte)
        matcher.shortest_ending()
        matcher.is_finished()
    grammar.automaton.advance_afresh(grammar.automaton.start, b"{")
    grammar.automaton.explore(100)


def explore_ahead(grammar: Grammar, seconds: float, stop: threading.Event | None = None) -> None:
    """Make the masks that decoding will ask for: random texts of the grammar, token by token.

    Forced bytes are taken at once as the engine would; ends when time is up, when five texts in a
    row met no new mask, or when `stop` is set. Raises GrammarTooLarge if the grammar outgrows memory.
    """
    chance = random.Random(0)
    end = time.monotonic() + seconds
    automaton, masks, vocabulary = grammar.automaton, grammar.masks, grammar.vocabulary
    idle = 0
    while idle < 5:
        state, walks = automaton.start, masks.walks
        for length in range(256):
            if time.monotonic() > end or (stop is not None and stop.is_set()):
                return
            mask = masks.mask(state)
            forced = grammar.forced(state)
            ending = automaton.shortest_ending(state) if length > 24 and chance.random() < 0.5 else b""
            if forced:
                state = automaton.advance(state, forced)
            elif ending:
                state = automaton.advance(state, ending[:1])
            else:
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                data = vocabulary.token_bytes[int(chance.choice(allowed))] if len(allowed) else None
                if data is None:  # an end token, or nothing
                    break
                state = automaton.advance(state, data)
        idle = idle + 1 if masks.walks == walks else 0
