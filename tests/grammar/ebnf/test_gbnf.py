"""GBNF: what each construct means, and that faults name line, column and rule."""

from __future__ import annotations

import pytest

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar import Grammar
from jfbatch.grammar.ebnf import GrammarSyntaxError, grammar_to_rules
from tests.grammar.ebnf.acceptance import BYTES, accepted_by


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('root ::= "ab" | "c"', ["ab", "c"], ["", "a", "abc"]),
        ('root ::= "a"* "b"+ "c"?', ["b", "aabbc"], ["", "a", "bcc"]),
        ('root ::= "ab"{2} "c"{1,} "d"{0,2}', ["ababc", "ababccdd"], ["abc", "abab", "ababcddd"]),
        ('root ::= ("a" | "b" "c")+', ["a", "abc", "bcbc"], ["", "b", "ac"]),
        ("root ::= [a-c_] [^a-c] [-x] [x-]", ["azx-", "_é--", "b\nxx"], ["aax-", "dzx-", "azyx"]),
        (r"root ::= [\]\[\\\-^] [\x41-\x43\u00e9\U0001F600]", ["]A", "\\é", "^😀", "-B"], ["aA", "]D"]),
        (r'root ::= "\x41\u00e9\U0001F600\n\t\r\\\""', ['Aé😀\n\t\r\\"'], ["Aé"]),
        ("root ::= .{2}", ["日\n", "ab", "😀é"], ["", "a", "abc"]),
        ('root ::= "" | rule-2\nrule-2 ::= "x" | ', ["", "x"], ["xx"]),
        ('root ::= a_b 9\na_b ::= "u"\n9 ::= "v"', ["uv"], ["u"]),
        ('root ::= "("root")" | "x"', ["x", "((x))"], ["(x", "()"]),
        ('root ::= "a" "b"*?', ["a", "abb"], ["b"]),
    ],
)
def test_constructs_mean_what_llama_cpp_says(grammar: str, allowed: list[str], refused: list[str]) -> None:
    assert accepted_by(grammar, *allowed) == [True] * len(allowed)
    assert accepted_by(grammar, *refused) == [False] * len(refused)


def test_comments_and_line_breaks_stand_anywhere_between_items() -> None:
    grammar = """
        # the start
        root ::=       # of all
            "a" rest   # an alternative
          | "#"        # not a comment inside quotes
          | [#]
          "!" (
             "x"
          )
        rest ::= "b"
    """
    assert accepted_by(grammar, "ab", "#", "#!x", "a", "#!") == [True, True, True, False, False]


def test_a_byte_order_mark_and_windows_line_ends_are_read_over() -> None:
    assert accepted_by('\ufeffroot ::= a\r\na ::= "x"\r\n', "x", "") == [True, False]


@pytest.mark.parametrize(
    ("grammar", "line", "column", "rule", "fault"),
    [
        ('root ::= "a" missing', 1, 14, "root", "'missing' is not defined"),
        ('root ::= itme\nitem ::= "x"', 1, 10, "root", "'itme' is not defined; is 'item' meant"),
        ('rot ::= "a"', 1, 1, "", "no rule 'root' to start at"),
        ('root ::= a\n\na ::= a "x"', 3, 1, "a", r"no text can match this rule: .* \(a -> a\)"),
        ('root ::= a | "x"\na ::= b\nb ::= "(" a ")"', 2, 1, "a", r"\(a -> b -> a\)"),
        (r"root ::= [^\x00-\U0010FFFF]", 1, 1, "root", "no text can match this rule"),
        ('root ::= "a"\nroot ::= "b"', 2, 1, "root", "defined twice"),
        ('root ::= "a', 1, 10, "root", "literal is never closed"),
        ("root ::= [a-z", 1, 10, "root", "set .* is never closed"),
        ("root ::= []", 1, 10, "root", "set is empty"),
        ("root ::= [z-a]", 1, 11, "root", "out of order"),
        ('root ::= ("a" | "b"', 1, 10, "root", "group is never closed"),
        ('root ::= "a")', 1, 13, "root", "unmatched"),
        ('root ::= * "a"', 1, 10, "root", "nothing to repeat"),
        ('root ::= "a"{3,2}', 1, 13, "root", "out of order"),
        ('root ::= "a"{x}', 1, 13, "root", "a repeat is written"),
        ('root ::= "a"{99999999999}', 1, 14, "root", "more than 1,000,000,000 repeats"),
        (r'root ::= "\d"', 1, 11, "root", r"unknown escape \\d"),
        (r'root ::= "\x4"', 1, 11, "root", "2 hexadecimal digits"),
        (r'root ::= "\ud800"', 1, 11, "root", "no character"),
        ("root ::= <think>", 1, 10, "root", "tokens <...> are not supported"),
        ('root ::= "a"**?+', 1, 17, "root", "too many repeats"),
        ('root ::= "a" = "b"', 1, 14, "root", "expected .* but found '='"),
        ("root ::= " + "(" * 101 + '"a"' + ")" * 101, 1, 110, "root", "nest deeper than 100"),
    ],
)
def test_a_fault_is_named_with_its_place(grammar: str, line: int, column: int, rule: str, fault: str) -> None:
    with pytest.raises(GrammarSyntaxError, match=fault) as caught:
        grammar_to_rules(grammar)
    error = caught.value
    assert (error.line, error.column, error.rule) == (line, column, rule)
    assert str(error).startswith(f"grammar line {line}, column {column}")


@pytest.mark.parametrize("text", ["", "  \n", "hello", '{"type": "object"}', "# only: a comment"])
def test_what_is_no_grammar_at_all_is_refused(text: str) -> None:
    with pytest.raises(InvalidGrammar, match="no rule found"):
        grammar_to_rules(text)


def test_a_repeat_of_a_hundred_thousand_costs_no_more_than_one_of_ten() -> None:
    small = Grammar.from_grammar('root ::= ([a-z]{2} " "){10}', BYTES)
    large = Grammar.from_grammar('root ::= ([a-z]{2} " "){100000}', BYTES)
    assert len(large.program.code.op) == len(small.program.code.op)
