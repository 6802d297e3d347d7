"""Tags in free text: what the masks let through can be taken apart again, and no trigger stands loose."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarTooLarge, InvalidGrammar, UnsupportedSchema
from jfbatch.grammar import Grammar, Vocabulary
from jfbatch.rows.row import Pattern, RowProblem
from jfbatch.rows.tags import Tag, tag_set, tags_pattern
from jfbatch.rows.tools import PRESETS, as_tags, read_tools
from tests.grammar.ebnf.acceptance import BYTES, accepts

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string", "maxLength": 4}}}
CHOSEN = {"type": "object", "properties": {"c": {"enum": ["a", "</tool_call>"]}}, "required": ["c"]}
# Tokens that begin, cross and hold triggers, ends and braces, so that walks meet them.
VOCABULARY = Vocabulary.from_tokens(
    [
        *(bytes([byte]) for byte in range(256)),
        *(
            b"<tool",
            b"<tool_call>",
            b"x<tool_call>",
            b"</tool_call>",
            b'<tool_call>\n{"name": "',
            b"tool_call>",
        ),
        *(
            b"<f",
            b"<function=",
            b"unction=",
            b'": ',
            b'{"',
            b'"}',
            b"}</",
            b"</function>",
            b"</function>a<fun",
        ),
        *("é".encode(), b"ab", b"12", b'{"name": "', b'"parameters'),
        None,
    ],
    end_ids=[276],
)


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("point", POINT), tool("pointed", CHOSEN), tool("now")]


def pattern_of(format_name: str, choice: Any = "auto", tools: Any = None, **fields: Any) -> Pattern:
    tools = TOOLS if tools is None else tools
    pattern = read_tools(fields, {"tools": tools, "tool_choice": choice})
    assert pattern is not None
    return as_tags(pattern, PRESETS[format_name])


def over(vocabulary: Vocabulary, pattern: Pattern) -> Grammar:
    return Grammar.from_pattern(pattern.kind, pattern.text, vocabulary)


def random_text(grammar: Grammar, chance: random.Random, longest: int = 60) -> str:
    """A walk through the masks that likes long tokens, then the shortest ending."""
    matcher, vocabulary, text = grammar.matcher(), grammar.vocabulary, b""
    for _ in range(chance.randrange(longest)):
        bits = np.unpackbits(matcher.token_mask().view(np.uint8), bitorder="little")
        tokens = [token for token in np.flatnonzero(bits).tolist() if token not in vocabulary.end_ids]
        long = [token for token in tokens if len(vocabulary.token_bytes[token] or b"") > 1]
        if not tokens:
            break
        token = chance.choice(long if long and chance.random() < 0.8 else tokens)
        matcher.accept_token(token)
        text += vocabulary.token_bytes[token] or b""
    text += matcher.shortest_ending()
    return text.decode()


@pytest.mark.parametrize("form", PRESETS)
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "pointed"}}]
)
def test_walks_through_the_masks_parse_to_valid_calls(form: str, choice: Any) -> None:
    pattern = pattern_of(form, choice)
    grammar, tagged = over(VOCABULARY, pattern), tag_set(pattern)
    chance = random.Random(f"{form} {choice}")
    trigger, calls = PRESETS[form].trigger, 0
    for _ in range(60):
        text = random_text(grammar, chance)
        parsed = tagged.split(text)  # checks every call's arguments against its schema
        calls += len(parsed.calls)
        pieces = text
        for call in parsed.calls:
            whole = call.tag.begin + call.arguments + call.tag.end
            assert whole in pieces
            pieces = pieces.replace(whole, "\0", 1)
        assert trigger not in pieces
        if choice != "auto":
            assert parsed.calls and parsed.text.strip() == ""
        if isinstance(choice, dict):
            assert [call.tag.name for call in parsed.calls] == ["pointed"]
    assert calls > 10


def test_free_text_may_hold_all_but_the_trigger() -> None:
    grammar = over(BYTES, pattern_of("hermes"))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for good in (
        "",
        "a",
        "<tool_call",
        "</tool_call>",
        f"{call}{call}",
        f"<{call}",
        f"<tool_{call}é",
        f"a{call}<t",
    ):
        assert accepts(grammar, good), good
    for bad in ("<tool_call>", f"{call}<tool_call>", "a<tool_call>b", f"<tool_call>{call}", call[:-1]):
        assert not accepts(grammar, bad), bad
    assert not accepts(grammar, b"\xff")
    assert not accepts(grammar, "é".encode()[:1])


def test_no_parallel_calls_means_at_most_one() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for choice, none in (("auto", True), ("required", False)):
        grammar = over(BYTES, pattern_of("hermes", choice, parallel_tool_calls=False))
        assert accepts(grammar, call) and not accepts(grammar, f"{call}\n{call}")
        assert accepts(grammar, "") is none
        grammar = over(BYTES, pattern_of("hermes", choice))
        assert accepts(grammar, f"{call}\n{call}") and accepts(grammar, "") is none


def test_a_tool_without_parameters_takes_none() -> None:
    grammar = over(BYTES, pattern_of("function", "required", [tool("now")]))
    assert accepts(grammar, "<function=now>{}</function>")
    assert not accepts(grammar, '<function=now>{"a": 1}</function>')


def test_required_calls_are_forced_from_the_start() -> None:
    matcher = over(BYTES, pattern_of("hermes", "required", [tool("now")])).matcher()
    assert matcher.forced_bytes() == b'<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert not matcher.is_accepting()


def test_what_a_schema_leaves_to_a_check_names_the_tool() -> None:
    several = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
    grammar = over(BYTES, pattern_of("hermes", tools=[tool("now"), tool("f", several)]))
    assert [label.split("/")[0] for label in grammar.unenforced] == ["tools[1].function.parameters"]


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "(?<=a)(b)\\1"}},
            "required": ["a"],
        },
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "nothing"}}},
    ],
)
def test_a_tool_that_nobody_can_call_is_refused_with_its_place(schema: Any) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        over(BYTES, pattern_of("hermes", tools=[tool("now"), tool("f", schema)]))
    assert "tools[1].function.parameters" in str(caught.value)


def test_recursive_schemas_of_several_tools_do_not_mix() -> None:
    def tree(leaf: str) -> dict[str, Any]:
        node = {
            "type": "object",
            "properties": {leaf: {"$ref": "#/$defs/node"}},
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}

    grammar = over(BYTES, pattern_of("function", tools=[tool("a", tree("x")), tool("b", tree("y"))]))
    assert accepts(grammar, '<function=a>{"x": {"x": {}}}</function>')
    assert accepts(grammar, '<function=b>{"y": {"y": {}}}</function>')
    assert not accepts(grammar, '<function=a>{"y": {}}</function>')
    assert not accepts(grammar, '<function=b>{"y": {"x": {}}}</function>')


TRIGGER_TEXT = st.text("ab<", min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(TRIGGER_TEXT, min_size=1, max_size=3, unique=True),
    st.lists(st.text("ab<1", max_size=12), max_size=6),
)
def test_any_triggers_mean_what_a_plain_search_says(triggers: list[str], texts: list[str]) -> None:
    tags = [Tag("t", f"{trigger}(", {"enum": [1, "a<"]}, ")") for trigger in triggers]
    kept = [one for one in triggers if not any(one != two and one.startswith(two) for two in triggers)]
    if any(one != two and two in one for one in kept for two in kept):
        with pytest.raises(RowProblem, match="stands inside"):
            tags_pattern(tags, triggers)
        return
    pattern = tags_pattern(tags, triggers)
    grammar, tagged = over(BYTES, pattern), tag_set(pattern)
    for text in [*texts, *(f"{text}{triggers[0]}(1)" for text in texts), f'{triggers[-1]}("a<")a']:
        try:
            tagged.split(text)
            good = True
        except ValueError:
            good = False
        assert accepts(grammar, text) is good, text


def test_triggers_past_all_measure_are_refused_soon() -> None:
    trigger = "<" + "ab" * 5_000
    with pytest.raises(GrammarTooLarge, match="triggers"):
        over(BYTES, tags_pattern([Tag("t", trigger, True, ">")], [trigger]))
    shorter = trigger[:2_000]
    assert accepts(over(BYTES, tags_pattern([Tag("t", shorter, True, ">")], [shorter])), f"a{shorter}1>")


def test_unknown_counts_are_refused() -> None:
    spec = json.loads(pattern_of("hermes").text)
    with pytest.raises(InvalidGrammar):
        Grammar.from_pattern("tags", json.dumps({**spec, "least": 2}), BYTES)


def test_a_real_vocabulary_may_write_the_marker_as_one_token_or_in_letters() -> None:
    path = Path(os.environ.get("JFBATCH_TEST_DATA", "")) / "tokenizers" / "qwen3" / "tokenizer.json.gz"
    if not path.is_file():
        pytest.skip("JFBATCH_TEST_DATA does not hold tokenizers/qwen3/tokenizer.json.gz")
    vocabulary = Vocabulary.from_file(path)
    marker = vocabulary.token_bytes.index(b"<tool_call>")
    matcher = over(vocabulary, pattern_of("hermes")).matcher()
    assert matcher.token_mask()[marker >> 5] >> (marker & 31) & 1
    matcher.accept_token(marker)
    assert matcher.forced_bytes() == b'\n{"name": "'
    matcher.rollback(1)
    for byte in b"<tool_call>":
        matcher.accept_token(vocabulary.token_bytes.index(bytes([byte])))
    assert matcher.forced_bytes() == b'\n{"name": "'
    chance = random.Random(3)
    grammar, tagged = over(vocabulary, pattern_of("hermes")), tag_set(pattern_of("hermes"))
    for _ in range(4):
        tagged.split(random_text(grammar, chance, longest=15))


@pytest.mark.parametrize("integers", ["int64", "any"])
def test_integers_of_arguments_are_held_to_int64_as_those_of_schemas_are(integers: Any) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    pattern = pattern_of("function", "required", [tool("f", parameters)])
    grammar = Grammar.from_pattern(pattern.kind, pattern.text, BYTES, integers=integers)
    largest, beyond = (f'<function=f>{{"n": {number}}}</function>' for number in (2**63 - 1, 2**63))
    assert accepts(grammar, largest)
    assert accepts(grammar, beyond) == (integers == "any")
