"""Patterns with a bounded length: the counting machine against the product of both automata."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar import counted
from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.expression import Expression, Intersection, Repeat, RuleSet, literal, sequence
from jfbatch.grammar.json_schema.strings import keys_excluding, string_expression
from jfbatch.grammar.language import dfa_of
from jfbatch.grammar.program import compile_program
from jfbatch.grammar.regex import JSON_CHARACTER, JSON_STRING, regex_to_expression

PATTERNS = ["^a*b$", "^(ab|é)+$", "x", "^[ab]{2,5}c?$", "^(aa)*$", r"^\n|\"+$", "^a(bc)*d|e$", "b$"]


def automaton(expression: Expression) -> Automaton:
    return Automaton(compile_program(RuleSet(expression), counted.leaf_of, JSON_CHARACTER))


def accepts(machine: Automaton, text: bytes) -> bool:
    state = machine.advance(machine.start, text)
    return state >= 0 and machine.is_accepting(state)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    st.integers(0, 4),
    st.integers(0, 6),
    st.lists(st.sampled_from(["a", "b", "c", "d", "é", "x", r"\n", r"\"", "bc", "e"]), max_size=9),
)
def test_counting_equals_the_product(pattern: str, low: int, extra: int, pieces: list[str]) -> None:
    body = regex_to_expression(pattern, dialect="ecma", alphabet=JSON_STRING)
    both = Intersection((body, Repeat(JSON_CHARACTER, low, low + extra)))
    whole = dfa_of(both)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted, "WORTH_COUNTING", 0)
        counted._leaf.cache_clear()
        try:
            machine = automaton(sequence(literal("<"), both, literal(">")))
        except InvalidGrammar:
            assert whole.is_empty
            return
    text = "".join(pieces).encode()
    assert accepts(machine, b"<" + text + b">") == whole.accepts(text)
    state = machine.start
    for byte in b"<" + text:
        state = machine.advance(state, bytes([byte]))
        if state < 0:
            break
        ending = machine.shortest_ending(state)
        assert machine.is_accepting(machine.advance(state, ending))
    counted._leaf.cache_clear()


def test_a_long_limit_costs_the_pattern_alone() -> None:
    expression = string_expression(patterns=["^([a-z]+ )*[a-z]+$"], max_length=5000)
    machine = automaton(expression)
    assert len(machine.code.op) < 100
    words = b'"' + b"ab " * 1666
    assert accepts(machine, words + b'a"')
    assert accepts(machine, words + b'ab"')
    assert machine.advance(machine.start, words + b"abc") == -1  # 5001 characters
    assert machine.forced(machine.advance(machine.start, words + b"ab")) == b'"'


def test_a_bitmap_beyond_memory_is_refused() -> None:
    expression = string_expression(patterns=["^([a-z]{3} )*x{1,60}$"], max_length=50_000_000)
    with pytest.raises(GrammarTooLarge):
        automaton(expression)


@settings(max_examples=100, deadline=None)
@given(
    st.sets(st.text(alphabet="abc", max_size=4), min_size=1, max_size=6),
    st.text(alphabet='abcé"\n', max_size=5),
)
def test_undeclared_keys_are_all_texts_but_the_names(names: set[str], text: str) -> None:
    machine = automaton(keys_excluding(names))
    spelled = json.dumps(text, ensure_ascii=False).encode()
    assert accepts(machine, spelled) == (text not in names)
