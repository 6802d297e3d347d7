"""The lazily run machine against exact sets of texts, and its queries."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.expression import (
    NOTHING,
    ByteSet,
    Expression,
    Literal,
    Reference,
    Repeat,
    RuleSet,
    choice,
    literal,
    optional,
    sequence,
)
from jfbatch.grammar.language import dfa_of
from jfbatch.grammar.program import compile_program
from tests.grammar.random_expressions import ALL_TEXTS, LONGEST, expressions, texts_of


def automaton_of(expression: Expression, **rules: Expression) -> Automaton:
    return Automaton(compile_program(RuleSet(expression, rules), dfa_of))


def accepts(automaton: Automaton, text: bytes) -> bool:
    state = automaton.advance(automaton.start, text)
    return state >= 0 and automaton.is_accepting(state)


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_accepts_exactly_the_texts_of_an_expression(expression: Expression) -> None:
    texts = texts_of(expression)
    try:
        automaton = automaton_of(expression)
    except InvalidGrammar:
        assert not texts
        return
    assert {text for text in ALL_TEXTS if accepts(automaton, text)} == texts


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_every_state_can_finish_and_its_ending_is_shortest(expression: Expression) -> None:
    try:
        automaton = automaton_of(expression)
    except InvalidGrammar:
        assume(False)
    texts = texts_of(expression)
    for text in ALL_TEXTS:
        state = automaton.advance(automaton.start, text)
        if state < 0:
            continue
        ending = automaton.shortest_ending(state)
        assert len(ending) == automaton.ending_length(state)
        assert accepts(automaton, text + ending)
        longer = [len(other) - len(text) for other in texts if other.startswith(text)]
        if longer:
            assert len(ending) == min(longer)
        else:
            assert len(text) + len(ending) > LONGEST


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_forced_bytes_start_every_text(expression: Expression) -> None:
    texts = texts_of(expression)
    try:
        automaton = automaton_of(expression)
    except InvalidGrammar:
        assume(False)
    forced = automaton.forced(automaton.start)
    for text in texts:
        shorter = min(len(forced), len(text))
        assert len(text) >= len(forced)
        assert text[:shorter] == forced[:shorter]
    nothing_follows = all(automaton.advance(automaton.start, byte) < 0 for byte in (b"a", b"b"))
    assert automaton.is_last(automaton.start) == nothing_follows


def test_recursion_needs_a_stack_and_ends_where_it_began() -> None:
    value = choice(literal("0"), sequence(literal("["), optional(Reference("list")), literal("]")))
    rest = Repeat(sequence(literal(","), Reference("value")), 0, None)
    nested = automaton_of(Reference("value"), value=value, list=sequence(Reference("value"), rest))
    assert accepts(nested, b"[[0,[0]],0,[]]")
    assert not accepts(nested, b"[[0,[0]],0,[]")
    assert accepts(nested, b"[" * 300 + b"]" * 300)
    state = nested.advance(nested.start, b"[[[")
    assert nested.shortest_ending(state) == b"]]]"
    assert nested.is_last(nested.advance(state, b"]]]"))


def test_a_counter_of_thousands_is_exact_and_cheap_to_compile() -> None:
    bounded = automaton_of(sequence(Repeat(ByteSet.of(b"xy"), 3, 5000), literal(".")))
    assert len(bounded.code.op) < 10
    assert not accepts(bounded, b"xy.")
    assert accepts(bounded, b"x" * 5000 + b".")
    assert bounded.advance(bounded.start, b"x" * 5001) == -1
    assert bounded.forced(bounded.advance(bounded.start, b"x" * 5000)) == b"."


def test_nested_bounded_repeats_join_into_one_count() -> None:
    nested = automaton_of(Repeat(Repeat(literal("a"), 1, 1000), 1, 1000))
    assert nested.advance(nested.start, b"a" * 3000) >= 0
    assert nested.state_count < 3100


def test_ambiguity_past_the_limit_is_an_error_not_a_hang() -> None:
    a = Repeat(sequence(Repeat(literal("a"), 2, 900), optional(literal("b"))), 2, 900)
    automaton = automaton_of(sequence(a, a))
    with pytest.raises(GrammarTooLarge):
        automaton.advance(automaton.start, b"a" * 5000)


def test_left_recursion_is_an_error_not_a_hang() -> None:
    rule = choice(sequence(Reference("x"), literal("a")), literal("a"))
    with pytest.raises(GrammarTooLarge):
        automaton_of(Reference("x"), x=rule)


def test_a_pattern_without_texts_is_refused() -> None:
    with pytest.raises(InvalidGrammar):
        automaton_of(sequence(literal("a"), NOTHING))
    with pytest.raises(InvalidGrammar):
        automaton_of(Reference("endless"), endless=sequence(literal("a"), Reference("endless")))
    with pytest.raises(InvalidGrammar, match="'missing' is not defined"):
        automaton_of(Reference("missing"))


def test_alternatives_without_texts_are_pruned_before_they_can_be_entered() -> None:
    dead = sequence(literal("ab"), Reference("endless"))
    automaton = automaton_of(
        choice(dead, literal("ac")), endless=sequence(literal("x"), Reference("endless"))
    )
    assert automaton.forced(automaton.start) == b"ac"


def test_ten_thousand_literals_share_their_prefixes() -> None:
    words = [f"value-{number:05d}" for number in range(10_000)]
    automaton = automaton_of(choice(*(Literal(word.encode()) for word in words)))
    assert automaton.forced(automaton.start) == b"value-0"
    assert accepts(automaton, b"value-09999")
    assert not accepts(automaton, b"value-10000")
    assert automaton.state_count < 100


def test_exploring_reports_whether_all_states_were_met() -> None:
    finite = automaton_of(Repeat(literal("ab"), 0, 10))
    assert finite.explore(1000)
    assert finite.state_count == 21
    assert not automaton_of(Repeat(literal("ab"), 0, 1000)).explore(100)


def test_forced_bytes_do_not_end_where_the_store_grows() -> None:
    text = b"all of it is forced, whatever the room " * 8
    automaton = automaton_of(literal(text.decode()))
    for length in range(len(text)):
        state = automaton.advance(automaton.start, text[:length])
        assert automaton.forced(state) == text[length:], length
