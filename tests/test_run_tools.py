"""`jfbatch run` with tools, structural tags and thinking, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pyarrow as pa
import pytest

from jfbatch.grammar.backends import BACKENDS, is_installed
from jfbatch.rows.columns import CALLS
from tests.run_command import COLUMNS, Job, invoke

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "forecast"}}
TAG = {
    "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
    "triggers": ["<n>"],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, cache: Path) -> Job:
    return Job(tmp_path, tiny_model, cache)


def rows_of_all_choices() -> list[dict[str, Any]]:
    return [
        *({"prompt": f"p{n}", "tools": TOOLS} for n in range(4)),
        {"prompt": "p", "tools": TOOLS, "tool_choice": "required"},
        {"prompt": "p", "tools": TOOLS, "tool_choice": NAMED},
        {"prompt": "p", "tools": TOOLS, "tool_choice": "none"},
        {"prompt": "p", "regex": "[ab]"},
        {"prompt": "p", "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ]


@pytest.mark.parametrize("form", ["hermes", "function", "llama", r"<call:NAME>ARGS</call>"])
def test_calls_are_columns_and_their_arguments_valid(job: Job, form: str) -> None:
    flags = ("--tool-format", form, "--max-tokens", "70", "--temperature", "1")
    rows = job.run(rows_of_all_choices(), *flags, code=1)
    assert list(rows[0]) == [*COLUMNS[:4], "tool_calls", *COLUMNS[4:]]
    assert job.table().schema.field("tool_calls").type == CALLS
    assert {row["status"] for row in rows[:-1]} <= {"ok", "shortened"}
    assert rows[-1]["status"] == "invalid_input" and "'g'" in rows[-1]["error"]
    for row in rows[:6]:
        for call in row["tool_calls"]:
            arguments = json.loads(call["arguments"])
            if call["name"] == "forecast":
                jsonschema_rs.validate(PARAMETERS, arguments)
            else:
                assert (call["name"], arguments) == ("now", {})
    assert rows[4]["tool_calls"] and rows[4]["text"] == ""
    assert [call["name"] for call in rows[5]["tool_calls"]] == ["forecast"]
    assert [row["tool_calls"] for row in rows[6:]] == [None, None, None]


def test_batch_results_have_the_calls(job: Job) -> None:
    lines = [
        {"custom_id": "a", "body": {"prompt": "p", "tools": TOOLS, "tool_choice": NAMED}},
        {"custom_id": "b", "body": {"prompt": "p", "regex": "x"}},
    ]
    (job.directory / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = job.directory / "out.jsonl"
    arguments = [*job.arguments("--output-format", "openai")]
    arguments[arguments.index("-o") + 1] = str(output)
    assert invoke(*arguments) == 0
    first, second = [json.loads(line) for line in output.read_text().splitlines()]
    (choice,) = first["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "forecast"
    jsonschema_rs.validate(PARAMETERS, json.loads(call["function"]["arguments"]))
    (choice,) = second["response"]["body"]["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "x"
    (job.directory / "rows.jsonl").open("a").write(
        '{"custom_id": "c", "body": {"prompt": "p", "regex": "y"}}\n'
    )
    assert invoke(*arguments) == 0
    again = [json.loads(line) for line in output.read_text().splitlines()]
    first["response"]["body"]["created"] = again[0]["response"]["body"]["created"]  # when the table was
    assert again[0] == first and len(again) == 3


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_finished_table_with_calls_and_thinking_is_continued(job: Job, suffix: str) -> None:
    flags = ["--reasoning-end", "</think>", "--max-reasoning-tokens", "4"]
    row = {"id": "1", "prompt": "p", "tools": TOOLS, "tool_choice": NAMED}
    arguments = job.arguments(*flags)
    output = job.directory / f"table.{suffix}"
    arguments[arguments.index("-o") + 1] = str(output)
    job.input.write_text(json.dumps(row) + "\n")
    assert invoke(*arguments) == 0
    before = output.read_bytes()
    assert invoke(*arguments) == 0
    assert output.read_bytes() == before
    with job.input.open("a") as file:
        file.write(json.dumps({**row, "id": "2"}) + "\n")
    assert invoke(*arguments) == 0
    rows = (
        job.rows() if suffix == "parquet" else [json.loads(line) for line in output.read_text().splitlines()]
    )
    assert [found["id"] for found in rows] == ["1", "2"]
    for found in rows:
        assert found["reasoning"] is not None
        assert [call["name"] for call in found["tool_calls"]] == ["forecast"]


def test_too_few_tokens_for_a_required_call_are_told(job: Job) -> None:
    rows = job.run(
        [
            {"prompt": "p", "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 3},
            {"prompt": "p", "tools": TOOLS, "max_tokens": 1},
        ],
        code=1,
    )
    assert rows[0]["status"] == "failed" and "the shortest output needs" in rows[0]["error"]
    assert rows[1]["status"] in ("ok", "shortened") and rows[1]["tool_calls"] == []


def test_a_tool_whose_schema_cannot_be_held_is_named(job: Job) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a)\\1"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    rows = job.run(
        [{"prompt": "p", "tools": tools}, {"prompt": "p", "tools": TOOLS}], "--max-tokens", "9", code=1
    )
    assert rows[0]["status"] == "unsupported_schema" and "tools[2].function.parameters" in rows[0]["error"]
    assert rows[1]["status"] in ("ok", "shortened")


@pytest.mark.parametrize("name", ["llguidance", "xgrammar", "outlines"])
def test_other_backends_refuse_tools_by_name(job: Job, name: str) -> None:
    (row,) = job.run([{"prompt": "p", "tools": TOOLS, "backend": name}], code=1)
    assert row["status"] == "unsupported_schema" and name in row["error"]


def test_structural_tags_leave_the_text_whole(job: Job) -> None:
    rows = job.run(
        [{"prompt": "p", "response_format": {"type": "structural_tag", **TAG}}], "--max-tokens", "20"
    )
    assert "tool_calls" not in rows[0] and rows[0]["status"] in ("ok", "shortened")


@pytest.mark.parametrize("backend", BACKENDS)
def test_thinking_is_a_column_with_a_limit_of_its_own(job: Job, backend: str) -> None:
    if not is_installed(backend):  # type: ignore[arg-type]
        pytest.skip(f"{backend} is not installed")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    rows: list[dict[str, Any]] = [
        {"prompt": "p", "schema": schema},
        {"prompt": "q", "regex": "[ab]{3}"},
        {"prompt": "r", "choice": ["red", "green"]},
    ]
    flags = ("--reasoning-end", r"</think>\n\n", "--max-reasoning-tokens", "10", "--max-tokens", "40")
    found = job.run(rows, *flags, "--backend", backend, "--json-style", "compact", "--temperature", "1")
    assert list(found[0]) == [*COLUMNS[:4], "reasoning", *COLUMNS[4:]]
    assert {row["status"] for row in found} == {"ok"}
    assert all("</think>" not in row["reasoning"] for row in found)
    assert set(json.loads(found[0]["text"])) == {"a"}
    assert len(found[1]["text"]) == 3 and found[2]["text"] in ("red", "green")
    plain = job.run(
        None,
        *flags[:2],
        "--max-reasoning-tokens",
        "0",
        "--backend",
        backend,
        "--overwrite",
        "--json-style",
        "compact",
    )
    assert [row["reasoning"] for row in plain] == ["", "", ""]


def test_free_text_can_be_thought_about_and_rows_stay_within_their_tokens(job: Job) -> None:
    flags = ("--reasoning-end", "</think>", "--max-reasoning-tokens", "10", "--max-tokens", "8")
    (row,) = job.run([{"prompt": "p"}], *flags)
    assert row["status"] in ("ok", "shortened") and row["reasoning"]
    assert row["completion_tokens"] <= 8 + 10 + len("</think>") + 3


def test_no_reasoning_where_the_template_shows_none(job: Job) -> None:
    (row,) = job.run([{"prompt": "p", "regex": "a"}])
    assert "reasoning" not in row and "tool_calls" not in row


def test_a_property_called_reasoning_is_still_a_column(job: Job) -> None:
    schema = {"type": "object", "properties": {"reasoning": {"enum": ["x"]}}, "required": ["reasoning"]}
    row = {"prompt": "p", "schema": schema}
    (found,) = job.run([row], "--flatten")
    assert found["reasoning"] == "x"
    (again,) = job.run([row], "--flatten")
    assert again == found
    flags = ("--flatten", "--reasoning-end", "</think>", "--max-reasoning-tokens", "2", "--overwrite")
    (found,) = job.run([row], *flags)
    assert found["value.reasoning"] == "x" and pa.types.is_string(job.table().schema.field("reasoning").type)


def test_check_looks_at_tools(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.input.write_text(json.dumps({"prompt": "p", "tools": TOOLS, "tool_choice": NAMED}) + "\n")
    flags = ["--model", str(job.model), "--cache-dir", str(job.cache)]
    assert invoke("check", job.input, *flags) == 0
    assert "forecast" in capsys.readouterr().out
    assert invoke("check", job.input, *flags, "--max-tokens", "3") == 1
    assert invoke("run", job.input, "-o", job.output, *flags, "--tool-format", "x") == 2
    assert "--tool-format" in capsys.readouterr().err


@pytest.mark.parametrize("choice", [None, "required"])
def test_tools_that_a_raw_prompt_does_not_tell_of_are_refused(job: Job, choice: str | None) -> None:
    tools = {"tools": TOOLS, "tool_choice": choice}
    rows: list[dict[str, Any]] = [
        {"prompt": "How is the weather?", **tools},
        {"prompt": "You may call now() and forecast(city, days). How is the weather?", **tools},
        {"prompt": "How is the weather?", "tools": TOOLS, "tool_choice": NAMED},
        {"prompt": "How is the weather?", "tools": TOOLS, "tool_choice": "none"},
    ]
    first, *others = job.run(rows, "--raw", "--max-tokens", "70", code=1)
    assert first["status"] == "invalid_input"
    assert "with --raw the model sees the prompt alone" in first["error"] and "forecast" in first["error"]
    assert {row["status"] for row in others} <= {"ok", "shortened"}
    assert [call["name"] for call in others[1]["tool_calls"]] == ["forecast"]
    assert invoke("check", job.input, "--model", job.model, "--raw") == 1


def test_thinking_leaves_nothing_to_the_output_and_takes_nothing_of_it(job: Job) -> None:
    # Each of these characters is a token of its own, so that the text's length is the output's.
    lines: list[dict[str, Any]] = [{"prompt": f"p{n}", "regex": "[~^`]{8,}"} for n in range(12)]
    lines.append({"prompt": "p", "regex": "[~^]{9,}"})
    flags = (
        "--reasoning-end",
        "~",
        "--max-reasoning-tokens",
        "200",
        "--max-tokens",
        "8",
        "--temperature",
        "9",
    )
    *rows, refused = job.run(lines, *flags, code=1)
    assert {row["status"] for row in rows} <= {"ok", "shortened"}
    assert {len(row["text"]) for row in rows} == {8}
    assert refused["status"] == "failed"
    assert "the shortest output needs 9 tokens; max_tokens is 8" in refused["error"]


def test_check_counts_the_end_of_the_thinking(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    def starts(size: int, *flags: str) -> tuple[int, str | None]:
        """Whether check says that a prompt of this length leaves too little, and what a run says."""
        job.output.unlink(missing_ok=True)
        job.output.with_name(job.output.name + ".journal").unlink(missing_ok=True)
        job.input.write_text(json.dumps({"prompt": "~" * size, "regex": "[~^]{9}"}) + "\n")
        code = invoke("check", job.input, "--model", job.model, "--raw", *flags)
        assert invoke(*job.arguments("--raw", *flags)) == code
        (row,) = job.rows()
        return code, row["error"]

    context = 512
    assert starts(context - 9) == (0, None)
    assert starts(context - 8)[0] == 1
    tag = ("--reasoning-end", "^^^^")
    assert starts(context - 13, *tag) == (0, None)
    code, error = starts(context - 12, *tag)
    assert code == 1 and error is not None and "the shortest output needs 13 tokens" in error
    assert "the shortest output needs 13 tokens; the prompt leaves 12" in capsys.readouterr().out
    assert starts(context - 12, *tag, "--max-tokens", "9")[0] == 1
    assert starts(context - 13, *tag, "--max-tokens", "9") == (0, None)
    assert starts(context - 100, *tag, "--max-tokens", "8")[0] == 1
