"""Endings for engines that have no call for them: what is reused, what is known, what is searched for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar import Grammar
from jfbatch.grammar.backends import endings
from jfbatch.grammar.backends.endings import Endings, RowEndings, search, shortened
from jfbatch.grammar.backends.oracle import Oracle, byte_vocabulary
from tests.grammar.backends.engines import compiled, feed, param, random_tokens, takes

SEARCHING = [param("llguidance"), param("xgrammar")]
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 5},
        "lines": {
            "type": "array",
            "minItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string"},
                    "count": {"type": "integer"},
                    "gift": {"type": "boolean"},
                },
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
        "state": {"enum": ["open", "closed", "lost"]},
    },
    "required": ["id", "lines", "state"],
    "additionalProperties": False,
}


class Walk:
    """Our own matcher over bytes as a ByteWalk; `asked` counts what was asked whether it completes."""

    def __init__(self, grammar: Grammar, text: bytes = b"") -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher()
        self.asked: list[bytes] = []
        feed(self.matcher, text)

    def allowed(self) -> bytes:
        mask = self.matcher.token_mask()
        return bytes(byte for byte in range(256) if mask[byte >> 5] >> (byte & 31) & 1)

    def step(self, byte: int) -> bool:
        try:
            self.matcher.accept_token(byte)
        except GrammarError:
            return False
        return True

    def undo(self, count: int) -> None:
        self.matcher.rollback(count)

    def accepting(self) -> bool:
        return self.matcher.is_accepting()

    def completes(self, text: bytes) -> bool:
        self.asked.append(text)
        walk = self.copy()
        return all(walk.step(byte) for byte in text) and walk.accepting()

    def copy(self) -> Walk:
        other = Walk(self.grammar)
        other.matcher = self.matcher.fork()
        return other


class Silent(Oracle):
    """An oracle that knows nothing, as for patterns that our front ends refuse."""

    def __init__(self) -> None:
        super().__init__("regex", "", "compact", "closed")

    def ending(self, text: bytes) -> bytes | None:
        return None


def own(kind: str, pattern: str) -> Grammar:
    return Grammar.from_pattern(kind, pattern, byte_vocabulary(), "compact")


@pytest.mark.parametrize(
    ("pattern", "written", "ending"),
    [
        ("abc", "", "abc"),
        ("(a|b)cd", "", "acd"),
        ("[a-z]{6}!", "ab", "aaaa!"),
        ('"[^"]*"', '"some', '"'),
        ("x*", "", ""),
        ("(long way round|no)", "", "no"),
        ("(long way round|no)", "lo", "ng way round"),
    ],
)
def test_a_search_finds_a_short_ending(pattern: str, written: str, ending: str) -> None:
    assert search(Walk(own("regex", pattern), written.encode())) == ending.encode()


def test_a_found_ending_loses_what_it_can_do_without() -> None:
    walk = Walk(own("regex", '"[a-z]{2,}(,opt:(yes|no))?(;more){1,3}"'))
    short = shortened(walk, b'"abcde,opt:yes;more;more"')
    assert walk.completes(short) and len(short) == len('"ab;more"')
    assert shortened(walk, b'"ab;more"') == b'"ab;more"'


def test_a_search_goes_on_into_the_ending_that_was_known() -> None:
    grammar = own("regex", r"\[(\(a+\))*\]xxxxxxxxxx(yes|no) and more")
    last = b"]xxxxxxxxxxno and more"
    walk = Walk(grammar, b"[(")
    assert search(walk, last) == b"a)" + last


def test_a_search_that_does_not_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "MOST_STEPS", 50)
    grammar = own("regex", "[ab]{200}")
    assert search(Walk(grammar)) is None
    row = RowEndings(Endings(lambda: Walk(grammar), Silent()))
    with pytest.raises(GrammarError, match="no ending"):
        row.ending(b"")


def test_the_ending_that_was_known_is_used_as_far_as_it_goes() -> None:
    grammar = own("regex", '"[a-z]{5,}" (yes|no)')
    row = RowEndings(Endings(lambda: Walk(grammar), Silent()))
    assert row.ending(b"") == b'"aaaaa" no'
    assert row.ending(b'"') == b'aaaaa" no'  # its own continuation
    assert row.ending(b'"xy') == b'aaa" no'  # two letters less are needed
    assert row.ending(b'"xyzzyxy') == b'" no'
    assert row.ending(b'"xyzzyxyz') == b'" no'  # as it was
    assert row.ending(b'"xyzzyxyz" y') == b"es"
    assert row.ending(b'"xyz') == b'aa" no'  # undone
    assert row.ending(b'"xyzab" no') == b""


def test_an_ending_of_our_automaton_counts_only_if_the_engine_agrees() -> None:
    grammar = own("regex", "(a|bb)c")
    agreeing = RowEndings(Endings(lambda: Walk(grammar), Oracle("regex", "[a-z]c", "compact", "closed")))
    assert agreeing.ending(b"") == b"ac"
    other = RowEndings(Endings(lambda: Walk(grammar), Oracle("regex", "[A-Z]", "compact", "closed")))
    assert other.ending(b"") == b"ac"  # found by the search


def test_a_twin_that_cannot_be_made_costs_the_row_not_the_run() -> None:
    def broken() -> Walk:
        raise InvalidGrammar("no twin")

    row = RowEndings(Endings(broken, Silent()))
    with pytest.raises(GrammarError, match="no twin"):
        row.ending(b"")


def test_an_oracle_judges_all_but_json() -> None:
    assert Oracle("regex", "a+", "compact", "closed").fault(b"aa") is None
    assert "regex" in (Oracle("regex", "a+", "compact", "closed").fault(b"ab") or "")
    assert "regex" in (Oracle("regex", "a+", "compact", "closed").fault(b"") or "")
    assert "choice" in (Oracle("choice", '["a"]', "compact", "closed").fault(b"b") or "")
    assert Oracle("schema", '{"type": "null"}', "compact", "closed").fault(b"1") is None
    assert Oracle("regex", "(unclosed", "compact", "closed").fault(b"anything") is None
    assert Oracle("regex", "(unclosed", "compact", "closed").ending(b"") is None


@pytest.mark.parametrize("name", SEARCHING)
@pytest.mark.parametrize("knows", [True, False], ids=["with our automaton", "by searching alone"])
def test_endings_of_a_nested_schema_are_found_everywhere(
    name: Any, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows:
        monkeypatch.setattr(Oracle, "ending", lambda self, text: None)
    grammar = compiled(name, "schema", ORDER)
    exact = compiled("fsm", "schema", ORDER)
    for seed in range(3):
        tokens = random_tokens(exact, random.Random(seed), most=40, plain=True)
        matcher, best, excess = grammar.matcher(), exact.matcher(), 0
        for token_id in tokens:
            ending, shortest = matcher.shortest_ending(), best.shortest_ending()
            excess = max(excess, len(ending) - len(shortest))
            feed(matcher, ending)
            assert matcher.is_accepting()
            matcher.rollback(len(ending))
            matcher.accept_token(token_id)
            best.accept_token(token_id)
        assert excess <= 15  # not always a shortest one, but short


@pytest.mark.parametrize("name", SEARCHING)
def test_a_pattern_that_our_front_end_refuses_has_endings(name: Any) -> None:
    left = "root ::= sum\nsum ::= sum [+-] num | num\nnum ::= [0-9]+\n"
    grammar = compiled(name, "grammar", left)
    matcher = grammar.matcher()
    feed(matcher, b"12+")
    assert takes(grammar, b"12+" + matcher.shortest_ending())


@pytest.mark.parametrize("name", [param("outlines")])
def test_states_that_only_longer_tokens_reach_have_endings(name: Any) -> None:
    # Single bytes do not lead on from "red" (see the known disagreements), but a longer token may.
    matcher = compiled(name, "regex", "r(abcd)?").matcher()
    feed(matcher, b"r")
    for token_id in (259, 260):
        try:
            matcher.accept_token(token_id)
        except GrammarError:
            continue
        assert matcher.shortest_ending() == b"cd"
        return
    pytest.fail("no token leads on")
