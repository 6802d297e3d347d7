"""Regular expressions mean what their engines say: Python's re for "python", ECMA-262 for "ecma".

The expected values of ECMA_CASES are those of V8 (`new RegExp(pattern, "u").test(text)`).
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar.expression import Expression, Repeat
from jfbatch.grammar.regex import (
    JSON_CHARACTER,
    JSON_STRING,
    RAW_UTF8,
    Alphabet,
    Dialect,
    pattern_tree,
    regex_to_expression,
)
from jfbatch.grammar.regex.syntax import width
from tests.grammar.expression_oracle import matches, size


def python_matches(pattern: str, text: str) -> bool:
    return matches(regex_to_expression(pattern, dialect="python", alphabet=RAW_UTF8), text)


def ecma_finds(pattern: str, text: str) -> bool:
    spelled = json.dumps(text, ensure_ascii=False)[1:-1]
    return matches(regex_to_expression(pattern, dialect="ecma", alphabet=JSON_STRING), spelled)


def expression_or_refusal(pattern: str, dialect: Dialect, alphabet: Alphabet) -> Expression | InvalidGrammar:
    try:
        return regex_to_expression(pattern, dialect=dialect, alphabet=alphabet)
    except InvalidGrammar as error:
        return error


ECMA_CASES = [
    ("^\\d+$", ["0", "42"], ["১", "", "4a", "４"]),
    ("^\\w{2}$", ["a_", "ab"], ["éa", "a-", "ÀB"]),
    ("^a\\sb$", ["a b", "a\xa0b", "a\ufeffb", "a\u2028b"], ["a\x85b", "a\u180eb", "a\x1cb", "ab"]),
    ("^\\S$", ["a", "\u200b", "é"], [" ", "\u3000"]),
    ("^\\D\\W$", ["১é", "a-"], ["1é", "aa"]),
    ("^.$", ["a", "\x85", "😀"], ["\n", "\r", "\u2028", "\u2029", "ab"]),
    ("^[^]$", ["\n", "a", "😀"], [""]),
    ("[]", [], ["", "a"]),
    ("b", ["abc"], ["ac", ""]),
    ("^b", ["bc", "b"], ["abc"]),
    ("b$", ["ab", "b"], ["abc", "b\n"]),
    ("^$", [""], ["a", "\n"]),
    ("^a|b$", ["ax", "xb", "a", "b"], ["xbx"]),
    ("(^a|b$)", ["ax", "xb"], ["xbx"]),
    ("^(a|$)b*$", ["ab", "", "a", "abb"], ["b"]),
    ("x(^|,)y", ["x,y"], ["xy", ",y"]),
    ("(^|,)y", ["y", "x,y"], ["xy"]),
    ("(a|^)*b", ["b", "ab", "cb"], []),
    (
        "^(\\/?((\\.{2})|([a-z0-9\\-]*))($|\\/))*$",
        ["", "/", "a/b", "../a", "//", "a//b", "..", "/a/../b/"],
        ["A", "...", "a/.b"],
    ),
    ("\\bfoo\\b", ["foo", "a foo b", "foo-bar"], ["afoo", "foo_", "foobar"]),
    ("\\Bo", ["foo", "xo"], ["o", " o"]),
    ("^\\B$", [""], ["a"]),
    ("é\\b", ["éa"], ["aé", "é"]),
    ("(?=.*a)(?=.*b)^.{2,3}$", ["ab", "ba", "aab"], ["abcd", "bb", "a"]),
    ("^(?!.*--)[a-z-]+$", ["a-b", "-", "a"], ["a--b", "--"]),
    ("^(?!-)[a-z-]{1,5}(?<!-)$", ["a-b", "a"], ["-a", "a-", "-", "abcdef"]),
    (
        "^((?!-)[a-z-]{1,3}(?<!-)\\.)+[a-z]{2,3}$",
        ["a.bc", "a-b.cd", "a.b-c.de", "ab.cd.ef"],
        ["-a.bc", "a-.bc", "abcd.ef"],
    ),
    ("^a(?!b)", ["ac", "a"], ["ab"]),
    ("(?<=\\$)\\d+", ["$1", "a$12b"], ["1"]),
    ("(?<!\\d)\\d{2}(?!\\d)", ["12", "a12b", "1 23"], ["123", "1234"]),
    ("(?<=ab)c", ["abc", "aabc"], ["xbc"]),
    ("(?<!ab)c$", ["xbc", "c", "bc"], ["abc"]),
    ("^(?=[^@]{1,3}@)[^@]+@b$", ["a@b", "abc@b"], ["abcd@b", "@b"]),
    ("^(?:(?=a)[a-c]|x)+$", ["a", "xax", "xx"], ["b", "ab"]),
    ("a*?b+?", ["b", "aab"], ["a"]),
    ("^(?<year>\\d{4})-\\d\\d$", ["2024-01"], ["24-01"]),
    ("^\\u{1F600}+$", ["😀", "😀😀"], ["a"]),
    ("^\\uD83D\\uDE00$", ["😀"], ["😁"]),
    ("^[\\uD83D\\uDE00-\\uD83D\\uDE02]$", ["😀", "😁", "😂"], ["😃"]),
    ("^[😀-😂x]$", ["😁", "x"], ["😃"]),
    ("^\\u0041\\x42\\cA$", ["AB\x01"], ["AB"]),
    ("^[\\b\\t\\0]$", ["\x08", "\t", "\x00"], ["b"]),
    ("^\\p{L}+$", ["abc", "éß", "日本"], ["a1", "_"]),
    ("^\\p{Lu}\\p{Ll}*$", ["Abc", "Éà"], ["ÉÀ", "abc"]),
    ("^\\P{N}$", ["a"], ["1", "٣", "Ⅷ"]),
    ("^\\p{Script=Greek}+$", ["αβγ", "Ω"], ["abc"]),
    ("^\\p{sc=Cyrl}$", ["д"], ["d"]),
    ("^[\\p{Nd}_]+$", ["1_٣"], ["a"]),
    ("^\\p{General_Category=Decimal_Number}$", ["7"], ["a"]),
    ("^\\p{Alphabetic}$", ["a", "ⓐ"], ["1"]),
    ("^[^\\s\\d]+$", ["ab", "é"], ["a b", "a1"]),
    ("^[a-z.\\-_]+$", ["a-b", "a.b_"], ["A"]),
    ("^[\\w.-]+$", ["a-b", "a.b"], ["é"]),
    ("^[+-]?\\d+(?:\\.\\d+)?$", ["-1.5", "+2", "4"], ["3."]),
    ("^(a{2}){1,2}$", ["aa", "aaaa"], ["aaa", ""]),
    ("^(a|ab)(c|bcd)(d*)$", ["abcd", "acd", "abcdd"], ["abd"]),
    ("^(?:a?b??)*$", ["", "ab", "ba", "bb"], ["c"]),
    ('^"\\\\\\/$', ['"\\/'], ['"/']),
    ("^\\.\\*\\$\\^\\|\\(\\)\\[\\]\\{\\}\\?\\+$", [".*$^|()[]{}?+"], ["a"]),
    ("^((?!foo).)*$", ["", "fo", "barfo"], ["foo", "afoob", "fofoo"]),
    (
        "^<!--((?!-->).)*-->x$",
        ["<!-- a -->x", "<!---->x", "<!-- - -- ->-->x"],
        ["<!-- a --> -->x", "<!--->x"],
    ),
    ("^(?:(?!ab)[a-c]){2,3}$", ["ac", "cba", "aca"], ["ab", "cab", "a"]),
    ("^(.(?<!ba))*$", ["ab", "", "bb"], ["aba", "ba"]),
]


@pytest.mark.parametrize(("pattern", "found", "not_found"), ECMA_CASES, ids=[case[0] for case in ECMA_CASES])
def test_ecma_search_agrees_with_v8(pattern: str, found: list[str], not_found: list[str]) -> None:
    assert [text for text in found if not ecma_finds(pattern, text)] == []
    assert [text for text in not_found if ecma_finds(pattern, text)] == []


LENIENT_CASES = [  # refused or read otherwise by V8's Unicode mode, but with one sensible reading
    (r"^\-\_\~$", ["-_~"], ["\\-"]),
    (r"^]}$", ["]}"], ["]"]),
    (r"^a{,3}$", ["a{,3}"], ["aa"]),
    (r"^(?P<x>a)$", ["a"], ["x"]),
    (r"(?i)^straSSe$", ["STRASSE", "strasse"], ["strase"]),
    (r"^(?i:ab)c$", ["ABc", "abc"], ["abC"]),
    (r"^(?i:[k])$", ["k", "K", "\u212a"], ["i"]),
    (r"^(?i:i)$", ["i", "I"], ["\u0131", "\u0130"]),
    (r"\Aab\z", ["ab"], ["xab", "abx"]),
    (r"\Aab\Z", ["ab"], ["xab", "abx", "ab\n"]),
    (r"^[\w-.]+$", ["a-.b"], ["a,b"]),
    (r"^[a-zA-Z-_0-9]+$", ["a-_9"], ["a."]),
    (r"^[[a-z]*[-]?[a-z]*]*$", ["[a-b]"], ["[A"]),
    (r"^\pL$", ["é"], ["1"]),
    (r"^\p{IsGreek}$", ["α"], ["a"]),
    (r"(?=a)*b", ["b"], ["a"]),
]


@pytest.mark.parametrize(("pattern", "found", "not_found"), LENIENT_CASES, ids=[c[0] for c in LENIENT_CASES])
def test_what_unicode_mode_refuses_but_people_write_is_understood(
    pattern: str, found: list[str], not_found: list[str]
) -> None:
    assert [text for text in found if not ecma_finds(pattern, text)] == []
    assert [text for text in not_found if ecma_finds(pattern, text)] == []


PYTHON_CASES = [
    r"\w+\s\d",
    r"(?a)\w+\s\d",
    r"(?i)straße|ſ|k",
    r"(?s)a.b",
    r"a.b",
    r"(?m)a$\n^b",
    r"a$\n?",
    r"(?:a$|b)\n?",
    r"(?x) a b  # comment\n c",
    r"\Aab\Z",
    r"\x41\u00e9\U0001F600\N{DIGIT ONE}\a\07\101",
    r"[]a]+",
    r"[^]a]+",
    r"[a\]-]+",
    r"a{,2}b{2,}c{1}",
    r"a{x}",
    r"(?P<name>a)(?#comment)b",
    r"(?i:a)b",
    r"(?i)a(?-i:b)",
    r"\bfoo\b.*",
    r"\B",
    r"é\B",
    r"(?<!a)b|a(?=c)c",
    r"(?=.*\d)(?=.*[a-z]).{3,}",
    r"[\s\S]",
    r"[^\W_]+",
]
PYTHON_TEXTS = [
    *[
        "",
        "a",
        "b",
        "ab",
        "aab",
        "abc",
        "a b",
        "AB",
        "aB",
        "a\nb",
        "a\n",
        "b\n",
        "\n",
        "]",
        "a]-",
        "b!",
        "a{x}",
        "é",
        "éa",
    ],
    *[
        "foo",
        "foo bar",
        "foox",
        "STRASSE",
        "STRAßE",
        "straße",
        "s",
        "K",
        "\u212a",
        "É 1",
        "x ١",
        "x 1",
        "x\u00a01",
        "x\x1c1",
    ],
    *[
        "Aé😀1\x07\x07A",
        "bbc",
        "abbc",
        "aabbbc",
        "ac",
        "1a2",
        "a1",
        "ab12",
        "__",
        "aé1",
        "  ",
        "😀",
        "\u2028",
        "ab\n",
    ],
]


@pytest.mark.parametrize("pattern", PYTHON_CASES)
def test_python_patterns_match_what_fullmatch_matches(pattern: str) -> None:
    compiled = re.compile(pattern)
    wrong = [t for t in PYTHON_TEXTS if python_matches(pattern, t) != (compiled.fullmatch(t) is not None)]
    assert wrong == []


PIECES = ["a", "b", "-", r"\n", "é", ".", "[a-b]", "[^a]", r"\w", r"\d", r"\s", r"\W", "ab"]
ASSERTIONS = [
    "^",
    "$",
    r"\b",
    r"\B",
    r"\A",
    r"\Z",
    "(?!b)",
    "(?=[ab])",
    "(?<!a)",
    "(?<=b)",
    "(?!ab)",
    "(?=a*b)",
]


def patterns() -> st.SearchStrategy[str]:
    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])
        return st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            st.tuples(inner, counts).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
            inner.map(lambda body: f"(?={body})"),
            inner.map(lambda body: f"(?!{body})"),
        )

    return st.recursive(st.sampled_from(PIECES + ASSERTIONS), extend, max_leaves=7)


@settings(max_examples=400, deadline=None)
@given(pattern=patterns(), texts=st.lists(st.text("aabb- \né1_", max_size=6), min_size=5, max_size=12))
def test_random_patterns_with_assertions_agree_with_re(pattern: str, texts: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = re.compile(pattern)
        except re.error:
            assume(False)
    expression = expression_or_refusal(pattern, "python", RAW_UTF8)
    if isinstance(expression, InvalidGrammar):
        refused = "not supported" in expression.reason or isinstance(expression, GrammarTooLarge)
        assert refused and "(?" in pattern
        return
    assume(size(expression) < 3000)
    for text in ["", "a", "b", "ab", "a\n", *texts]:
        assert matches(expression, text) == (compiled.fullmatch(text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a)\1", "back-references are not regular, and not supported at position 3"),
        (r"(?<n>a)\k<n>", "back-references"),
        (r"a(?>b)", "atomic groups (?>...) are not supported at position 1"),
        (r"(a", "group is never closed at position 0"),
        (r"a)", "unmatched ) at position 1"),
        (r"[a", "a set [ is never closed at position 0"),
        (r"[b-a]", "out of order at position 1"),
        (r"a{3,2}", "out of order at position 1"),
        (r"*a", "nothing to repeat at position 0"),
        (r"a|*", "nothing to repeat at position 2"),
        (r"a**", "nothing to repeat at position 2"),
        ("a\\", "a backslash ends the pattern at position 1"),
        (r"\p{Klingon}", "the Unicode property 'Klingon' is not known at position 0"),
        (r"\u{110000}", "needs a code point"),
        (r"\xg0", "needs 2 hexadecimal digits"),
        (r"\c1", "\\c needs a letter"),
        (r"\y", "unknown escape \\y at position 0"),
        (r"(?z)a", "unknown flag z"),
        (r"a{9999999999}", "repeats at position 1"),
    ],
)
def test_malformed_and_irregular_patterns_are_refused_with_their_place(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        regex_to_expression(pattern, dialect="ecma", alphabet=JSON_STRING)
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    "pattern", ["(", "a++b", r"(a)\1", "(?P<n>a)(?P=n)", "(?>a)", "(a)?(?(1)b|c)", "x*+", "[z-a]"]
)
def test_python_patterns_that_are_malformed_or_irregular_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidGrammar):
        regex_to_expression(pattern, dialect="python", alphabet=RAW_UTF8)


def test_nested_bounded_repeats_stay_small() -> None:
    assert size(regex_to_expression("(a{1,1000}){1,1000}", dialect="python", alphabet=RAW_UTF8)) < 10
    nested = "(((([ab]{1,9}c){2,50}){3,70}d){1,1000}){5,100000}"
    assert size(regex_to_expression(nested, dialect="ecma", alphabet=JSON_STRING)) < 70
    labels = r"^((?!-)[a-z-]{1,63}(?<!-)\.){1,8}$"
    assert size(regex_to_expression(labels, dialect="ecma", alphabet=JSON_STRING)) < 80


def test_catastrophic_alternations_stay_small() -> None:
    assert size(regex_to_expression("^(a|a|aa|a*)*$" * 20, dialect="ecma", alphabet=JSON_STRING)) < 2000
    assert size(regex_to_expression("(x+x+)+y" * 50, dialect="python", alphabet=RAW_UTF8)) < 1000


@pytest.mark.parametrize("shape", ["({}a)", "(?:{})*", "({}|b)", "(?={})a"])
def test_deep_nesting_is_understood_or_refused_but_never_crashes(shape: str) -> None:
    pattern = "a"
    for _ in range(500):
        pattern = shape.replace("{}", pattern)
    expression = expression_or_refusal(pattern, "ecma", JSON_STRING)
    if isinstance(expression, InvalidGrammar):
        assert "nest" in expression.reason
    else:
        assert matches(expression, "a")


def test_redundant_parentheses_cost_nothing() -> None:
    assert ecma_finds("^" + "(" * 500 + "a" + ")" * 500 + "$", "a")
    assert size(regex_to_expression("(((((a)))))", dialect="python", alphabet=RAW_UTF8)) == 2


def test_any_character_in_json_is_one_known_object() -> None:
    expression = regex_to_expression(r"^[\s\S]*$", dialect="ecma", alphabet=JSON_STRING)
    assert isinstance(expression, Repeat)
    assert expression.inner is JSON_CHARACTER


def test_a_search_absorbs_what_any_text_may_already_hold() -> None:
    free = regex_to_expression("", dialect="ecma", alphabet=JSON_STRING)
    assert regex_to_expression(".*", dialect="ecma", alphabet=JSON_STRING) == free
    assert regex_to_expression("^.*$|x*", dialect="ecma", alphabet=JSON_STRING) == free
    assert size(regex_to_expression("x*a+b?", dialect="ecma", alphabet=RAW_UTF8)) == size(
        regex_to_expression("a", dialect="ecma", alphabet=RAW_UTF8)
    )


def test_letters_of_unicode_make_a_small_trie() -> None:
    letter = regex_to_expression(r"^\p{L}$", dialect="ecma", alphabet=RAW_UTF8)
    assert size(letter) < 1500
    for code in range(0, 0x20000, 37):
        character = chr(code)
        if unicodedata.category(character) not in ("Cn", "Cs"):
            assert matches(letter, character) == unicodedata.category(character).startswith("L")


def test_widths_count_characters_not_bytes() -> None:
    assert width(pattern_tree("^[é😀]{2,5}x?$", "ecma")) == (2, 6)
    assert width(pattern_tree("^ab*$", "ecma")) == (1, None)


def test_a_typical_pattern_takes_well_under_a_millisecond() -> None:
    def fresh(number: int) -> float:
        began = time.perf_counter()
        regex_to_expression(rf"^[a-z{number}]{{1,{number}}}(-\d+)*_x$", dialect="ecma", alphabet=JSON_STRING)
        return time.perf_counter() - began

    assert min(fresh(number) for number in range(100, 140)) < 0.001
