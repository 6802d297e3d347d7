"""The examples of docs/grammars.md do what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar import Grammar
from jfbatch.rows.constraint import read_pattern
from jfbatch.rows.json_text import parse
from jfbatch.rows.tags import tag_set
from jfbatch.rows.tools import PRESETS, as_tags
from tests.grammar.ebnf.acceptance import BYTES, accepts
from tests.run_command import ROOT

PAGE = (ROOT / "docs" / "grammars.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_python_examples_run_one_after_the_other(tiny_model: Path) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    examples = blocks("python")
    assert len(examples) == 3
    for example in examples:
        exec(example.replace("Qwen/Qwen3-0.6B", str(tiny_model)), names)
    for text in names["texts"]:
        names["Invoice"].model_validate_json(text)


def test_the_example_rows_are_patterns_of_all_kinds() -> None:
    rows = [parse(line) for line in re.findall(r"^    (\{.*\})$", PAGE, re.MULTILINE)]
    patterns = [pattern for row in rows if (pattern := read_pattern(row))]
    assert [pattern.kind for pattern in patterns] == ["schema", "regex", "choice", "grammar", "tools", "tags"]
    for pattern, text in zip(patterns[:4], ["31", "2024-05-17", "no", "-7"], strict=True):
        assert accepts(Grammar.from_pattern(pattern.kind, pattern.text, BYTES), text)
    grammar = Grammar.from_pattern("tags", patterns[5].text, BYTES)
    spans = re.findall(r"`([^`\n]*)`", PAGE[PAGE.index("## Structural tags") :])
    texts = [span for span in spans if "<n>" in span]
    assert [accepts(grammar, text) for text in texts] == [True, False, False]


def test_the_call_shown_is_what_its_output_becomes() -> None:
    (line,) = re.findall(r'^    ("text": .*)$', PAGE, re.MULTILINE)
    shown = json.loads(f"{{{line}}}")
    (row,) = [parse(line) for line in re.findall(r'^    (\{.*"tools".*\})$', PAGE, re.MULTILINE)]
    pattern = read_pattern(row)
    assert pattern is not None
    for preset in PRESETS.values():
        tags = as_tags(pattern, preset)
        (call,) = shown["tool_calls"]
        written = preset.text.replace("NAME", call["name"]).replace("ARGS", call["arguments"])
        output = f"{shown['text']}\n{written}"
        assert accepts(Grammar.from_pattern("tags", tags.text, BYTES), output)
        text, calls = tag_set(tags).split(output).told
        assert {"text": text, "tool_calls": json.loads(calls)} == shown
        cell = preset.text.replace("\n", "⏎")
        assert f"`{cell}` | `{preset.trigger}` |" in PAGE


def test_both_example_grammars_allow_what_the_page_says() -> None:
    (gbnf,), (lark,) = blocks("gbnf"), blocks("lark")
    assert accepts(Grammar.from_grammar(gbnf, BYTES), "1-2+-30")
    assert accepts(Grammar.from_grammar(lark, BYTES), " a1=2 ,  B = 30 ")
    assert accepts(Grammar.from_grammar('start: NAME NAME\nNAME: /[a-z]+/\n%ignore " "', BYTES), "ab")


def test_the_message_shown_is_the_one_given() -> None:
    with pytest.raises(InvalidGrammar) as caught:
        Grammar.from_grammar("start: item\nitem: a NUMBER\na: /x/", BYTES)
    assert f"    {caught.value}\n" in PAGE


def test_a_text_with_too_many_readings_is_an_error_of_its_row() -> None:
    grammar = Grammar.from_grammar('root ::= ("a" | root root root?){1,9}', BYTES)
    with pytest.raises((InvalidGrammar, GrammarError), match="too ambiguous"):
        accepts(grammar, "a" * 40)
