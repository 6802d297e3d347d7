"""Grammars written to bytes and read back; damaged and planted bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zstandard

from jfbatch.grammar.expression import (
    ByteSet,
    Difference,
    Reference,
    Repeat,
    RuleSet,
    choice,
    literal,
    sequence,
)
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.language import dfa_of
from jfbatch.grammar.program import compile_program
from jfbatch.grammar.stored import dump_grammar, load_grammar
from jfbatch.grammar.vocabulary import Vocabulary

TOKENS = [bytes([byte]) for byte in range(256)] + [b"ab", b"[[", b"]]", b"aab"]


def sample() -> Grammar:
    vocabulary = Vocabulary.from_tokens(TOKENS, end_ids=[len(TOKENS)], size=len(TOKENS) + 1)
    word = Difference(Repeat(ByteSet.of(b"ab"), 1, 4), literal("abba"))
    value = choice(word, sequence(literal("["), Repeat(Reference("value"), 0, 300), literal("]")))
    program = compile_program(RuleSet(Reference("value"), {"value": value}), dfa_of)
    grammar = Grammar(program, vocabulary, unenforced=["#: uniqueItems"], warnings=["odd"])
    matcher = grammar.matcher()
    for token in b"[[ab]":
        matcher.token_mask()
        matcher.accept_token(token)
    return grammar


def test_a_stored_grammar_is_the_same_grammar() -> None:
    grammar = sample()
    loaded = load_grammar(dump_grammar(grammar), grammar.vocabulary)
    assert (loaded.unenforced, loaded.warnings) == (grammar.unenforced, grammar.warnings)
    assert loaded.automaton.state_count == grammar.automaton.state_count
    assert set(loaded.masks.masks) == set(grammar.masks.masks)
    one, other = grammar.matcher(), loaded.matcher()
    for token in b"[[ab][abb[]]a]":
        assert np.array_equal(one.token_mask(), other.token_mask())
        assert one.forced_bytes() == other.forced_bytes()
        assert one.shortest_ending() == other.shortest_ending()
        one.accept_token(token)
        other.accept_token(token)
    assert other.is_finished()


def test_masks_of_a_stored_grammar_are_not_made_again() -> None:
    grammar = sample()
    loaded = load_grammar(dump_grammar(grammar), grammar.vocabulary)
    loaded.matcher().token_mask()
    assert loaded.masks.walks == 0


def test_a_cut_or_foreign_entry_is_refused() -> None:
    grammar = sample()
    data = dump_grammar(grammar)
    for damaged in (b"", b"garbage", data[: len(data) // 2], zstandard.compress(b"\x02\x00\x00\x00{}")):
        with pytest.raises((ValueError, KeyError)):
            load_grammar(damaged, grammar.vocabulary)


def test_a_tampered_entry_never_reaches_outside_its_arrays() -> None:
    """Random words are overwritten; whatever still loads must answer without a fault of memory."""
    grammar = sample()
    raw = bytearray(zstandard.decompress(dump_grammar(grammar)))
    begin = 4 + int.from_bytes(raw[:4], "little")
    chance = random.Random(1)
    refused = 0
    for _ in range(300):
        copy = bytearray(raw)
        for _ in range(3):
            place = chance.randrange(begin, len(copy) - 4)
            copy[place : place + 4] = chance.choice(
                [b"\xff\xff\xff\x7f", b"\xfe\xff\xff\xff", chance.randbytes(4)]
            )
        try:
            loaded = load_grammar(zstandard.compress(bytes(copy)), grammar.vocabulary)
        except ValueError:
            refused += 1
            continue
        state = loaded.automaton.advance(loaded.automaton.start, b"[[ab]")
        assert -1 <= state < loaded.automaton.state_count
    assert refused > 100
