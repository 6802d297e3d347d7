"""Tools, structural tags and the end of thinking as rows bring them, odd ones included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jfbatch.errors import UsageError
from jfbatch.grammar import Grammar
from jfbatch.rows.prompt import PromptRenderer, read_messages
from jfbatch.rows.reader import read_rows
from jfbatch.rows.reasoning import ReasoningEnd, reasoning_end
from jfbatch.rows.row import Pattern, Row, RowProblem
from jfbatch.rows.tags import tag_set, value_end
from jfbatch.rows.tools import PRESETS, as_tags, format_in, tool_format
from tests.grammar.ebnf.acceptance import BYTES, accepts

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
STRUCTURES = [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}]
TAG = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<n"]}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def read(tmp_path: Path, fields: dict[str, Any], body: bool = False) -> Row:
    line = {"custom_id": "c", "body": {"prompt": "p", **fields}} if body else {"prompt": "p", **fields}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (row,) = read_rows([str(file)])
    return row


@pytest.mark.parametrize("body", [False, True])
def test_tools_of_a_row_are_its_pattern(tmp_path: Path, body: bool) -> None:
    row = read(tmp_path, {"tools": [F], "tool_choice": named("f")}, body)
    assert row.error is None and row.pattern is not None and row.pattern.kind == "tools"
    (tag,) = tag_set(as_tags(row.pattern, PRESETS["hermes"])).tags
    assert (tag.name, tag.begin) == ("f", '<tool_call>\n{"name": "f", "arguments": ')


@pytest.mark.parametrize("draft", ["draft-07/schema#", "draft-04/schema", "draft/2020-12/schema"])
@pytest.mark.parametrize("target", [{"type": "integer"}, {"properties": {"a": {"type": "integer"}}}])
def test_arguments_are_objects_where_the_parameters_are_a_reference(
    tmp_path: Path, draft: str, target: dict[str, Any]
) -> None:
    address = ("https://" if "2020" in draft else "http://") + "json-schema.org/" + draft
    parameters = {"$schema": address, "$ref": "#/definitions/p", "definitions": {"p": target}}
    row = read(tmp_path, {"tools": [{"function": {"name": "f", "parameters": parameters}}]})
    assert row.pattern is not None
    (tag,) = tag_set(as_tags(row.pattern, PRESETS["hermes"])).tags
    check = tag.validator().check
    assert check("1") is not None and check('{"a": "x"}') is not None
    if "properties" in target:
        assert check('{"a": 1}') is None
        grammar = Grammar.from_json_schema(tag.schema, BYTES)
        texts = ("1", '{"a": 1}', '{"a": "x"}', '{"b": 1}')
        assert [accepts(grammar, text) for text in texts] == [False, True, False, False]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
        {"tools": [F], "tool_choice": "none"},
        {"tool_choice": "none"},
    ],
)
def test_no_tool_to_call_is_no_pattern(tmp_path: Path, fields: dict[str, Any]) -> None:
    row = read(tmp_path, fields)
    assert (row.error, row.pattern) == (None, None)
    row = read(tmp_path, {**fields, "regex": "a"})
    assert (row.error, row.pattern) == (None, Pattern("regex", "a"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{}]}, "tools[0] must be"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0] must be"),
        ({"tools": [named("")]}, "tools[0].function.name"),
        ({"tools": [named("get weather")]}, "tools[0].function.name"),
        ({"tools": [named('a"}')]}, "tools[0].function.name"),
        ({"tools": [named(5)]}, "tools[0].function.name"),
        ({"tools": [F, F]}, "tools[1].function.name: a tool 'f' was listed before"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "of an object"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "of an object"),
        ({"tools": [F], "tool_choice": named("g")}, "names 'g', which is not among the tools (f)"),
        ({"tools": [], "tool_choice": named("g")}, "not among the tools (none)"),
        ({"tools": [F], "tool_choice": "always"}, "tool_choice must be"),
        ({"tools": [F], "tool_choice": 5}, "tool_choice must be"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice must be"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [F], "parallel_tool_calls": "no"}, "parallel_tool_calls must be true or false"),
        ({"tools": [F], "schema": True}, "more than one constraint: tools and schema"),
        ({"tools": [F], "response_format": {"type": "json_object"}}, "tools and response_format.json_object"),
        ({"tools": [F], "structured_outputs": {"structural_tag": TAG}}, "structured_outputs.structural_tag"),
        ({"tools": [{"function": {"name": "f", "description": "\ud800"}}]}, "surrogate"),
        ({"tools": "[1"}, "not JSON"),
    ],
)
def test_odd_tools_are_the_fault_of_their_row(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    row = read(tmp_path, fields)
    assert row.error is not None and said in row.error and row.error.startswith("rows.jsonl:1") is False
    assert "rows.jsonl:1:" in row.error and row.pattern is None


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"response_format": TAG},
    ],
)
def test_structural_tags_in_every_spelling(tmp_path: Path, fields: dict[str, Any]) -> None:
    row = read(tmp_path, fields)
    assert row.error is None and row.pattern is not None and row.pattern.kind == "tags"
    tagged = tag_set(row.pattern).split("a <n>12</n> b")
    assert [call.arguments for call in tagged.calls] == ["12"]


def test_triggered_tags_say_how_many_there_are(tmp_path: Path) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {"type": "triggered_tags", "triggers": ["<n>"], "at_least_one": True, "stop_after_first": True}
    form["tags"] = [{"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}]
    row = read(tmp_path, {"response_format": {"type": "structural_tag", "format": form}})
    assert row.pattern is not None
    spec = json.loads(row.pattern.text)
    assert (spec["least"], spec["most"], spec["tags"][0]["schema"]) == (1, 1, {"type": "integer"})


def changed(**fields: Any) -> dict[str, Any]:
    return {**TAG, **fields}


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        (5, "must be an object"),
        (changed(triggers=[]), "triggers must be a list"),
        (changed(triggers=[""]), "triggers must be a list"),
        (changed(structures=[]), "at least one tag"),
        (changed(structures=[5]), "structures[0] must be an object"),
        (changed(structures=[{"begin": "<n>"}]), "begin and end must be texts"),
        (changed(structures=[{"begin": "<n>", "end": "</n>"}]), "its schema is missing"),
        (changed(triggers=["<m"]), "starts with none of the triggers"),
        (changed(triggers=["<n", "a<n"]), "stands inside the trigger"),
        (changed(structures=[{**STRUCTURES[0], "end": "0"}]), "could be part of a number"),
        (changed(structures=[{**STRUCTURES[0], "end": ""}]), "could be part of a number"),
        (changed(structures=[{**STRUCTURES[0], "schema": {"type": {}}, "end": ""}]), "part of a number"),
        (changed(structures=[{**STRUCTURES[0], "schema": {"type": [{}]}, "end": ""}]), "part of a number"),
        ({"type": "structural_tag", "format": {"type": "sequence"}}, "only the type triggered_tags"),
    ],
)
def test_odd_structural_tags_are_the_fault_of_their_row(tmp_path: Path, tag: Any, said: str) -> None:
    row = read(tmp_path, {"structured_outputs": {"structural_tag": tag}})
    assert row.error is not None and said in row.error


def test_keys_of_structural_tags_that_nobody_knows_are_refused_by_name(tmp_path: Path) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    tag = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    form = {"type": "triggered_tags", "triggers": ["<n>"], "tags": [tag]}

    def said(value: dict[str, Any]) -> str:
        return read(tmp_path, {"response_format": {"type": "structural_tag", **value}}).error or ""

    harmless = {**form, "tags": [{**tag, "content": {**content, "style": "json"}}]}
    assert said({"format": {**harmless, "excludes": [], "foo": None}}) == ""
    assert ".format.excludes" in said({"format": {**form, "excludes": ["a"]}})
    assert ".format.foo" in said({"format": {**form, "foo": 1}})
    assert ".foo" in said({"format": form, "foo": 1})
    assert ".structures" in said({"format": form, "structures": STRUCTURES})
    assert ".tags[0].foo" in said({"format": {**form, "tags": [{**tag, "foo": 1}]}})
    styled = {**content, "style": "qwen_xml"}
    assert ".tags[0].content.style" in said({"format": {**form, "tags": [{**tag, "content": styled}]}})
    assert ".structures[0].foo" in said(changed(structures=[{**STRUCTURES[0], "foo": 1}]))
    assert "unknown key response_format.structural_tag.foo" in said(changed(foo=1))


def test_triggers_that_begin_with_another_are_left_out(tmp_path: Path) -> None:
    row = read(tmp_path, {"response_format": changed(triggers=["<n>", "<n", "<n"])})
    assert row.pattern is not None and tag_set(row.pattern).triggers == ("<n",)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"a": "}"} x', 10),
        ("[1, [2]]]", 8),
        ('"a\\"b" c', 6),
        ("-1.5e3,", 6),
        ("true}", 4),
        ("{", None),
        ("x", None),
    ],
)
def test_where_a_value_ends(text: str, end: int | None) -> None:
    assert value_end(text, 0) == end


@pytest.mark.parametrize("text", ["<n", "a <n>x</n>", "<n>1", "<n>1.5</n>", "<n>1</n><n>"])
def test_outputs_that_are_not_as_they_should_be_are_told_apart(tmp_path: Path, text: str) -> None:
    pattern = read(tmp_path, {"response_format": TAG}).pattern
    assert pattern is not None
    with pytest.raises(ValueError, match=r"begins no whole call|structures"):
        tag_set(pattern).split(text)


def test_formats_are_found_in_chat_templates() -> None:
    qwen = "{% if tools %}<tools>{{ tools }}</tools>...<tool_call>{% endif %}"
    assert format_in(qwen) is PRESETS["hermes"]
    assert format_in("{{ tools }} <function=name>{..}</function>") is PRESETS["function"]
    llama = '{{ tools }} Respond in the format {"name": function name, "parameters": dictionary}'
    assert format_in(llama) is PRESETS["llama"]
    assert format_in("{{ messages }}") is PRESETS["hermes"]
    assert format_in("{{ tools }} [TOOL_CALLS]") is None
    assert format_in("<tool_call>\n<function=x>\n<parameter=y>") is None


def test_a_format_can_be_written_out() -> None:
    own = tool_format(r"[CALL]NAME\n[ARGS]ARGS")
    assert own is not None and own.trigger == "[CALL]"
    assert own.tag("p", "f", True).begin == "[CALL]f\n[ARGS]" and own.tag("p", "f", True).end == ""
    assert tool_format("auto") is None and tool_format("llama") is PRESETS["llama"]
    for wrong in ("qwen", "NAMEARGS", "<f=NAME>", "<ARGS>NAME"):
        with pytest.raises(UsageError, match="tool-format"):
            tool_format(wrong)


def test_the_end_of_thinking_is_found_in_chat_templates() -> None:
    qwen = "{{ content.split('</think>')[-1] }} {{ '\\n</think>\\n\\n' + content }}"
    assert reasoning_end("auto", qwen) == ReasoningEnd("</think>", "\n\n")
    assert reasoning_end("auto", "{{ messages }}") is None
    assert reasoning_end("none", qwen) is None
    assert reasoning_end(r"</x>\n", qwen) == ReasoningEnd("</x>", "\n")
    with pytest.raises(UsageError):
        reasoning_end(" ", "")


def test_an_output_is_split_at_the_first_end_tag() -> None:
    end = ReasoningEnd("</think>", "\n\n")
    assert end.split(b"<think>\nhm </think>\n\n{}</think>") == (b"hm", b"{}</think>")
    assert end.split(b"cut off") == (b"cut off", b"")
    assert end.is_over("<think>\n\n</think>\n\n") and not end.is_over("<think>\n")


class _Tokenizer:
    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template
        self.given: dict[str, Any] = {}

    def apply_chat_template(self, messages: Any, **given: Any) -> str:
        self.given = {"messages": messages, **given}
        return "text"


def tools_row(**fields: Any) -> Row:
    pattern = Pattern("tools", json.dumps({"tools": [F], "choice": "auto", "parallel": True}))
    return Row(0, "rows:1", 1, "k", b"", pattern=pattern, **fields)


def test_a_template_that_knows_tools_gets_them() -> None:
    tokenizer = _Tokenizer("{{ tools }}<tool_call>")
    PromptRenderer(tokenizer).text(tools_row(prompt="p"))
    assert tokenizer.given["tools"] == [F] and len(tokenizer.given["messages"]) == 1


def test_other_templates_get_them_in_the_system_message() -> None:
    tokenizer = _Tokenizer("{{ messages }}")
    PromptRenderer(tokenizer, system="Be brief.").text(tools_row(prompt="p"))
    system, user = tokenizer.given["messages"]
    assert system["content"].startswith("Be brief.\n\nYou may call") and user["content"] == "p"
    assert '{"name": "f"' in system["content"] and "<tool_call>" in system["content"]
    assert tokenizer.given["tools"] is None


def test_a_template_with_an_unknown_form_is_the_rows_fault_unless_the_form_is_given() -> None:
    tokenizer = _Tokenizer("{{ tools }} [TOOL_CALLS]")
    with pytest.raises(RowProblem, match="--tool-format"):
        PromptRenderer(tokenizer).text(tools_row(prompt="p"))
    PromptRenderer(tokenizer, tool_format=PRESETS["function"]).text(tools_row(prompt="p"))
    assert tokenizer.given["tools"] == [F]


def test_messages_of_earlier_calls_are_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    read_ones = read_messages(messages)
    assert read_ones[0]["content"] == ""
    assert read_ones[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert read_ones[1] == {"role": "tool", "content": "5", "tool_call_id": "1"}
    odd = [[{"function": {"name": "f", "arguments": arguments}}] for arguments in ("{", "[1]", [1], None)]
    for wrong in (5, [5], *odd):
        with pytest.raises(RowProblem, match="tool_calls"):
            read_messages([{"role": "assistant", "content": None, "tool_calls": wrong}])
    with pytest.raises(RowProblem, match="no place"):
        PromptRenderer(_Tokenizer("{{ messages }}")).text(Row(0, "rows:1", 1, "k", b"", messages=read_ones))
