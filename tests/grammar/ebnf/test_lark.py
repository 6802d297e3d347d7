"""Lark's syntax, held against the lark package: it is the judge of which texts a grammar allows."""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import lark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.grammar import Grammar
from jfbatch.grammar.ebnf import GrammarSyntaxError, grammar_to_rules
from jfbatch.grammar.ebnf.terminals import NAMES
from tests.grammar.ebnf.acceptance import BYTES, accepted_by, accepts

GRAMMARS = {
    "groups": 'start: ("a" | "b" "c")+ ["b"] | x?\nx: "c" ~ 2 | "a" ~ 3..4 "c"*',
    "names": """
        ?start.2: item -> first
            | _hidden item   // a comment
            | !kept
        !item: AB "c"*
        _hidden: "b"
        kept: [ "c" | "a" item ]
        AB.1: "a" | "b" "a"
    """.replace("| !kept", "| kept"),
    "left": 'start: start "a" start | start "b" | pair\npair: single "c" | "c"\nsingle: pair "b" | "b"',
    "terminals": 'start: RANGE+ | /[^a]a+/ | "AB"i "c"\nRANGE: "a".."b" INNER?\nINNER: /c{2}/ | "c" "a"',
    "ignored": 'start: word ("b" word)*\nword: W | "c" word\nW: "a"+\n%ignore " "\n%ignore /x(y)?/',
    "ignored alternatives": 'start: ("a" "b")* C\n%ignore " " | "c" "x"\nC: "c"',
}
ALPHABETS = {"ignored": "abc x", "ignored alternatives": "abc x", "terminals": "abcB"}


@cache
def judge(name: str) -> lark.Lark:
    return lark.Lark(GRAMMARS[name], parser="earley", lexer="dynamic_complete")


def lark_accepts(name: str, text: str) -> bool:
    try:
        judge(name).parse(text)
    except lark.exceptions.UnexpectedInput:
        return False
    return True


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_short_text_is_judged_as_lark_judges_it(name: str) -> None:
    grammar = Grammar.from_grammar(GRAMMARS[name], BYTES)
    alphabet = ALPHABETS.get(name, "abc")
    longest = 5 if len(alphabet) == 3 else 4
    texts = [
        "".join(letters) for length in range(longest + 1) for letters in product(alphabet, repeat=length)
    ]
    judged = {text: lark_accepts(name, text) for text in texts}
    assert any(judged.values()) and not all(judged.values())
    assert {text: accepts(grammar, text) for text in texts} == judged


@cache
def lark_regex(name: str) -> re.Pattern[str]:
    parser = lark.Lark(f"start: {name}\n%import common.{name}", parser="earley", lexer="basic")
    return re.compile(parser.terminals[0].pattern.to_regexp())


@cache
def ours(name: str) -> Grammar:
    return Grammar.from_grammar(f"start: {name}\n%import common.{name}", BYTES)


@settings(max_examples=200, deadline=None)
@given(st.text('0179afzAFZ_+-.eE \t\f\r\n#/*"\\é', max_size=7))
def test_the_terminals_of_common_are_those_of_lark(text: str) -> None:
    for name in NAMES:
        found = lark_regex(name).match(text)  # as a lexer would: ESCAPED_STRING and C_COMMENT end early
        if name in ("ESCAPED_STRING", "C_COMMENT"):
            assert accepts(ours(name), text) == (found is not None and found.end() == len(text)), name
        else:
            assert accepts(ours(name), text) == (lark_regex(name).fullmatch(text) is not None), name


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("ESCAPED_STRING", ['""', '"a"', r'"\""', r'"\\"'], ['"', '"""', r'"\"', '"\n"']),
        ("C_COMMENT", ["/**/", "/* a * / \n*/", "/***/"], ["/*/", "/* */ */", "/*"]),
        ("SIGNED_NUMBER", ["-1", "+.5e-3", "1."], [".", "1e", "--1"]),
    ],
)
def test_terminals_end_where_a_lexer_ends_them(name: str, allowed: list[str], refused: list[str]) -> None:
    assert [accepts(ours(name), text) for text in allowed] == [True] * len(allowed)
    assert [accepts(ours(name), text) for text in refused] == [False] * len(refused)


def test_imports_in_all_spellings() -> None:
    grammar = """
        %import common.INT
        %import common.WORD -> NAME
        %import common (HEXDIGIT, NEWLINE)
        start: INT NAME HEXDIGIT NEWLINE
    """
    assert accepted_by(grammar, "12abF\n", "abF\n") == [True, False]


def test_a_literal_in_any_case_takes_no_letters_of_other_alphabets() -> None:
    assert accepted_by('start: "Kis"i', "kis", "KIS", "kiſ", "\u212ais") == [True, True, False, False]
    assert accepted_by('start: "é"i', "é", "É") == [True, True]


def test_regular_expressions_keep_their_flags() -> None:
    assert accepted_by("start: /a.b/", "a\nb", "axb") == [False, True]
    assert accepted_by("start: /a.b/s", "a\nb") == [True]
    assert accepted_by("start: /a b # c/x", "ab", "a b") == [True, False]
    assert accepted_by(r"start: /a\/[^\/]/i", "A/x", "a//") == [True, False]
    assert accepted_by(r"start: /[+?]\*?a?}?/", "+", "?*a}", "+a?") == [True, True, False]


def test_escapes_in_literals() -> None:
    assert accepted_by(r'start: "\x41\u00e9\n\t\"\\\/"', 'Aé\n\t"\\/') == [True]


@pytest.mark.parametrize(
    ("grammar", "line", "column", "rule", "fault"),
    [
        ('start: "a" B', 1, 12, "start", "'B' is not defined"),
        ('begin: "a"', 1, 1, "", "no rule 'start' to start at"),
        ("start: a\na: a B\nB: /x/", 2, 1, "a", r"no text can match this rule: .*\(a -> a\)"),
        ('start: "a"\nstart: "b"', 2, 1, "start", "defined twice"),
        ("start: /\\bx/", 1, 8, "start", "look-arounds reach beyond"),
        ('start: "a"\n  | /x(?=y)/', 2, 5, "start", "look-arounds reach beyond"),
        ("start: /a.*?b/", 1, 8, "start", "lazy quantifiers"),
        ("start: /(/", 1, 8, "start", "regex '\\('"),
        ("start: /a/l", 1, 8, "start", "flags of a regular expression"),
        ("start: /abc", 1, 8, "start", "regular expression is never closed"),
        ('start: "abc', 1, 8, "start", "literal is never closed"),
        (r'start: "\d"', 1, 9, "start", r"unknown escape \\d"),
        ('start: ("a"', 1, 8, "start", "group is never closed"),
        ('start: ["a")', 1, 8, "start", "group is never closed"),
        ('start: "a")', 1, 11, "start", "expected an item or the next rule"),
        ('start: * "a"', 1, 8, "start", "nothing to repeat"),
        ('start: "a"+?', 1, 12, "start", "nothing to repeat"),
        ('start: "a" ~ 3..2', 1, 12, "start", "out of order"),
        ('start: "a" ~ x', 1, 12, "start", "a repeat is written"),
        ('start: "ab".."c"', 1, 8, "start", "a range is written"),
        ('start: "b".."a"', 1, 8, "start", "range is out of order"),
        ("start: fooBar", 1, 8, "start", "all lower case"),
        ('fooBar: "a"', 1, 1, "fooBar", "all lower case"),
        ('start: A\nA: b\nb: "x"', 2, 4, "A", "cannot be made of the rule 'b'"),
        ('start: list{"a"}', 1, 8, "start", "templates"),
        ('list{x}: x\nstart: "a"', 1, 1, "list", "templates"),
        ('%declare A\nstart: "a"', 1, 1, "", "directive %declare is not supported"),
        ('start: "a"\n%import .other.A', 2, 9, "", "only terminals of common"),
        ('start: "a"\n%import common.A', 2, 16, "", "common has no terminal A; it has DIGIT"),
        ('start: "a"\n%import common (INT', 2, 9, "", "list of names is never closed"),
        ('start: "a" %ignore " "', 1, 12, "start", "expected a literal"),
    ],
)
def test_a_fault_is_named_with_its_place(grammar: str, line: int, column: int, rule: str, fault: str) -> None:
    with pytest.raises(GrammarSyntaxError, match=fault) as caught:
        grammar_to_rules(grammar)
    error = caught.value
    assert (error.line, error.column, error.rule) == (line, column, rule)
