"""Any grammar against all its derivations of short texts; and left recursion in its many disguises."""

from __future__ import annotations

import sys
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar import Grammar
from jfbatch.grammar.ebnf import grammar_to_rules
from jfbatch.grammar.ebnf.left_recursion import left_recursive_circles
from jfbatch.grammar.expression import RuleSet
from tests.grammar.ebnf.acceptance import BYTES, accepted_by, accepts

LONGEST = 5
ALL_TEXTS = ["".join(letters) for length in range(LONGEST + 1) for letters in product("ab", repeat=length)]
NAMES = ("root", "x", "y")

# A tree is ("text", t), ("rule", name), ("then", trees), ("or", trees) or ("repeat", tree, low, high).
Tree = tuple[Any, ...]
Texts = frozenset[str]

leaves = st.one_of(
    st.sampled_from(["", "a", "b", "ab"]).map(lambda text: ("text", text)),
    st.sampled_from(NAMES).map(lambda name: ("rule", name)),
    st.sampled_from(NAMES).map(lambda name: ("rule", name)),
)


def larger(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    several = st.lists(inner, min_size=1, max_size=3).map(tuple)
    bounds = st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (2, None)])
    return st.one_of(
        several.map(lambda trees: ("then", trees)),
        several.map(lambda trees: ("or", trees)),
        st.tuples(inner, bounds).map(lambda pair: ("repeat", pair[0], *pair[1])),
    )


trees = st.recursive(leaves, larger, max_leaves=6)

# Without a way out that names no rule, most grammars would match nothing.
bodies = st.one_of(
    trees,
    st.tuples(trees, st.sampled_from(["", "a", "ba"])).map(lambda pair: ("or", (pair[0], ("text", pair[1])))),
)
grammars = st.tuples(bodies, bodies, bodies).map(lambda chosen: dict(zip(NAMES, chosen, strict=True)))


def written(tree: Tree) -> str:
    """The tree in GBNF."""
    match tree:
        case ("text", text):
            return f'"{text}"'
        case ("rule", name):
            return str(name)
        case ("then", parts):
            return f"({' '.join(map(written, parts))})"
        case ("or", parts):
            return f"({' | '.join(map(written, parts))})"
        case ("repeat", inner, low, high):
            return f"({written(inner)}){{{low},{'' if high is None else high}}}"
    raise TypeError(tree)


def derived(rules: dict[str, Tree]) -> dict[str, Texts]:
    """For each rule all its texts of at most LONGEST letters: derivations, until no new text comes."""
    found: dict[str, Texts] = dict.fromkeys(rules, frozenset())
    while True:
        more = {name: texts_of(tree, found) for name, tree in rules.items()}
        if more == found:
            return found
        found = more


def texts_of(tree: Tree, found: dict[str, Texts]) -> Texts:
    match tree:
        case ("text", text):
            return frozenset({text})
        case ("rule", name):
            return found[name]
        case ("or", parts):
            return frozenset().union(*(texts_of(part, found) for part in parts))
        case ("then", parts):
            result = frozenset({""})
            for part in parts:
                result = joined(result, texts_of(part, found))
            return result
        case ("repeat", inner, low, high):
            once = texts_of(inner, found)
            rounds, result = frozenset({""}), frozenset({""} if low == 0 else ())
            for number in range(1, (high or low + LONGEST) + 1):
                rounds = joined(rounds, once)
                result |= rounds if number >= low else frozenset()
            return result
    raise TypeError(tree)


def joined(one: Texts, other: Texts) -> Texts:
    return frozenset(a + b for a in one for b in other if len(a + b) <= LONGEST)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(grammars)
def test_a_random_grammar_allows_exactly_its_derivations(rules: dict[str, Tree]) -> None:
    found = derived(rules)
    text = "\n".join(f"{name} ::= {written(tree)}" for name, tree in rules.items())
    try:
        grammar = Grammar.from_grammar(text, BYTES)
    except InvalidGrammar:
        assert not all(found.values()), text
        return
    try:
        allowed = {candidate for candidate in ALL_TEXTS if accepts(grammar, candidate)}
    except GrammarTooLarge:  # one in a thousand has 100,000 derivations of so short a text
        assume(False)
    assert allowed == found["root"], text


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(grammars, st.lists(st.sampled_from(b"ab"), max_size=12))
def test_whatever_was_allowed_so_far_can_be_completed(rules: dict[str, Tree], letters: list[int]) -> None:
    text = "\n".join(f"{name} ::= {written(tree)}" for name, tree in rules.items())
    try:
        grammar = Grammar.from_grammar(text, BYTES)
    except InvalidGrammar:
        assume(False)
    automaton = grammar.automaton
    try:
        state = automaton.start
        for letter in letters:
            following = automaton.advance(state, bytes([letter]))
            state = state if following < 0 else following
        ending = automaton.advance(state, automaton.shortest_ending(state))
    except GrammarTooLarge:
        assume(False)
    assert automaton.is_accepting(ending)


@settings(max_examples=200, deadline=None)
@given(grammars)
def test_no_rule_begins_with_itself_afterwards(rules: dict[str, Tree]) -> None:
    text = "\n".join(f"{name} ::= {written(tree)}" for name, tree in rules.items())
    try:
        rewritten = grammar_to_rules(text)
    except InvalidGrammar:
        assume(False)
    assert left_recursive_circles(rewritten.rules) == []


def test_rules_without_left_recursion_stay_as_they_are() -> None:
    rules = grammar_to_rules('root ::= "(" root ")" | item*\nitem ::= "a" item | "b"').rules
    assert sorted(rules) == ["item", "root"]


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('root ::= root "b" | "a"', ["a", "abb"], ["", "b", "aba"]),
        ('root ::= root root | "a"', ["a", "aaaa"], ["", "ab"]),
        ('root ::= root root | "a" | ""', ["", "a", "aaaa"], ["ab"]),
        ('root ::= "b"? root "a" | "a"', ["a", "aa", "baa", "bbaaa"], ["ba", "b"]),
        ('root ::= x "1" | "a"\nx ::= y "2"\ny ::= root "3" | root', ["a", "a321", "a21321"], ["a1", "21"]),
        ('root ::= (root "+" | root "-") root | [0-9]', ["1", "1+2-3"], ["1+", "+1"]),
        ('root ::= (root)* "a"', ["a", "aaa"], ["", "b"]),
        ('root ::= e\ne ::= e e e | "x" e? | e{2,3} "y"', ["x", "xxx", "xxy", "xxyxxy"], ["", "y", "xyxx"]),
    ],
)
def test_disguises_of_left_recursion(grammar: str, allowed: list[str], refused: list[str]) -> None:
    assert accepted_by(grammar, *allowed) == [True] * len(allowed)
    assert accepted_by(grammar, *refused) == [False] * len(refused)


OPERATORS = 'root ::= root [+*] root | root "?" root ":" root | "-" root | [0-9] | "(" root ")"'


@cache
def operators() -> Grammar:
    return Grammar.from_grammar(OPERATORS, BYTES)


def test_a_long_text_of_an_ambiguous_grammar_needs_few_states() -> None:
    assert accepts(operators(), "1" + "+-2*3?4+5:6" * 500)
    assert operators().automaton.state_count < 5000
    flat = Grammar.from_grammar('root ::= root [+*/] root | "-" root | [0-9]', BYTES)
    assert accepts(flat, "1" + "+-2*3/4" * 2000)
    assert flat.automaton.state_count < 20


def test_rules_that_begin_with_one_another_in_too_many_ways_are_refused_by_name() -> None:
    names = [f"r{number}" for number in range(14)]
    lines = [
        f"{name} ::= "
        + " | ".join(f'{other} "{name}{other}" {name}' for other in names if other != name)
        + f' | "{name}"'
        for name in names
    ]
    with pytest.raises(InvalidGrammar, match=r"r0 -> r1 -> .*begin with one another"):
        grammar_to_rules("root ::= r0\n" + "\n".join(lines))


def test_many_rules_in_one_circle_are_rewritten_quickly() -> None:
    count = 300
    lines = [f'r{number} ::= r{(number + 1) % count} "{number % 10}" | "x"' for number in range(count)]
    rules = grammar_to_rules("root ::= r0\n" + "\n".join(lines))
    assert isinstance(rules, RuleSet)
    assert accepted_by("root ::= r0\n" + "\n".join(lines), "x0", "x10", "x", "x1") == [
        True,
        True,
        True,
        False,
    ]


def test_groups_that_nest_too_deeply_are_refused() -> None:
    deep = "root ::= " + '("x" | ' * 100 + 'root "a" | "b"' + ' "d")+?*' * 100
    limit = sys.getrecursionlimit()  # compiling threads raise it, for the whole process
    sys.setrecursionlimit(1000)
    try:
        with pytest.raises(InvalidGrammar, match="nest too deeply"):
            grammar_to_rules(deep)
    finally:
        sys.setrecursionlimit(limit)
