"""`jfbatch run` end to end on a tiny random model: what goes in, what comes out, and what is said."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pyarrow as pa
import pytest

from jfbatch import decoding, outcomes
from jfbatch.rows.row import Pattern
from tests.run_command import COLUMNS, ROOT, Job, invoke, write_lines

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "mood": {"enum": ["calm", "cross", None]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "active": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "mood", "age", "active", "tags"],
    "additionalProperties": False,
}
# Both texts that the items allow, three of them, all different: no output can pass the check.
IMPOSSIBLE: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^(yes|no)$"},
    "minItems": 3,
    "maxItems": 3,
    "uniqueItems": True,
}
# At least 89 tokens, and more as soon as a number has a second digit.
LONG: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 30}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, cache: Path) -> Job:
    return Job(tmp_path, tiny_model, cache)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "person.schema.json"
    path.write_text(json.dumps(PERSON))
    return path


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "prompt": f"Who is number {number}?"} for number in range(count)]


# -- what outputs obey --------------------------------------------------------------------------------------


def test_every_value_obeys_the_schema_and_has_its_types(job: Job, schema: Path) -> None:
    rows = job.run(prompts(6), "--schema", schema)
    assert [(row["id"], row["row"], row["status"]) for row in rows] == [(f"r{n}", n, "ok") for n in range(6)]
    validator = jsonschema_rs.validator_for(PERSON)
    for row in rows:
        assert list(row["value"]) == list(PERSON["properties"])
        validator.validate(row["value"])
        assert json.loads(row["text"]) == row["value"]
        assert row["text"] == json.dumps(row["value"], ensure_ascii=False)  # the spaced style
    assert len({row["text"] for row in rows}) > 1, "the model must see its prompt"
    table = job.table()
    assert table.column_names == COLUMNS
    assert table.schema.field("value").type == pa.struct(
        {
            "name": pa.string(),
            "mood": pa.string(),
            "age": pa.int64(),
            "active": pa.bool_(),
            "tags": pa.list_(pa.string()),
        }
    )
    assert {str(table.schema.field(name).type) for name in ("id", "status", "text", "error", "backend")} == {
        "string"
    }
    assert {str(table.schema.field(name).type) for name in ["row", *COLUMNS[6:11]]} == {"int64"}


@pytest.mark.parametrize("style", ["spaced", "compact", "pretty"])
def test_json_is_laid_out_in_the_style_asked_for(job: Job, schema: Path, style: str) -> None:
    (row,) = job.run(prompts(1), "--schema", schema, "--json-style", style)
    layout: Any = {
        "spaced": {},
        "compact": {"separators": (",", ":")},
        "pretty": {"indent": 2},
    }[style]
    assert row["text"] == json.dumps(row["value"], ensure_ascii=False, **layout)


def test_a_regex_and_a_choice_for_all_rows(job: Job) -> None:
    rows = job.run(prompts(3), "--regex", r"[A-C]{2}-\d{3}")
    assert all(re.fullmatch(r"[A-C]{2}-\d{3}", row["value"]) for row in rows)
    assert all(row["value"] == row["text"] and row["status"] == "ok" for row in rows)
    rows = job.run(None, "--choice", "red,dark green,blue", "--overwrite")
    assert {row["value"] for row in rows} <= {"red", "dark green", "blue"}


def test_rows_bring_their_own_patterns_in_every_spelling(job: Job) -> None:
    code = {"type": "object", "properties": {"code": {"const": 7}}, "required": ["code"]}
    rows = job.run(
        [
            {"prompt": "a", "schema": {"type": "integer", "minimum": 0, "maximum": 99}},
            {"prompt": "b", "regex": "(ab){2}"},
            {"prompt": "c", "choice": ["one", "two"]},
            {"prompt": "d", "max_tokens": 5},
            {"messages": [{"role": "user", "content": "e"}], "guided_json": {"type": "boolean"}},
            {"prompt": "f", "response_format": {"type": "json_schema", "json_schema": {"schema": code}}},
            {"custom_id": "g", "body": {"messages": [{"role": "user", "content": "g"}], "guided_regex": "x"}},
        ],
        "--choice",
        "from,the,default",
    )
    assert [row["status"] for row in rows] == ["ok"] * 7
    values = [json.loads(row["value"]) for row in rows]  # several patterns: JSON text
    assert 0 <= values[0] <= 99
    assert values[1] == rows[1]["text"] == "abab"
    assert values[2] in ("one", "two")
    assert values[3] in ("from", "the", "default")
    assert isinstance(values[4], bool)
    assert values[5] == {"code": 7}
    assert (values[6], rows[6]["id"]) == ("x", "g")
    assert [row["id"] for row in rows[:6]] == [None] * 6


def test_a_row_without_a_pattern_writes_what_it_likes(job: Job) -> None:
    (row,) = job.run([{"prompt": "speak", "max_tokens": 9}])
    assert row["status"] in ("ok", "shortened")
    assert row["value"] == json.dumps(row["text"], ensure_ascii=False)
    assert 0 < row["completion_tokens"] <= 9


def test_every_schema_row_meets_the_validator(
    job: Job, schema: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Refusing:
        def __init__(self, pattern: Pattern) -> None:
            self.pattern = pattern

        def check(self, text: str) -> str | None:
            asked.append(text)
            return "not today"

    monkeypatch.setattr(outcomes, "validator", Refusing)
    lines = [*prompts(3), {"prompt": "x", "regex": "y"}]
    rows = job.run(lines, "--schema", schema, "--retries", "1", code=1)
    assert [row["status"] for row in rows] == ["invalid", "invalid", "invalid", "ok"]
    assert len(asked) == 6 and {row["text"] for row in rows[:3]} <= set(asked)
    assert all("not today" in row["error"] and row["value"] is None for row in rows[:3])


# -- every row has a status and a reason --------------------------------------------------------------------


def test_each_row_gets_its_status_and_the_others_run(job: Job) -> None:
    lines = [
        {"prompt": "fine", "choice": ["yes"]},
        '{"prompt": "broken',
        [1, 2],
        {"id": "empty"},
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
        {"prompt": 7},
        {"prompt": "x", "regex": "a", "choice": ["b"]},
        {"prompt": "x", "max_tokens": 0},
        {"id": "empty", "prompt": "x", "choice": ["no"]},
        {"prompt": "x", "guided_bogus": 1},
        {"prompt": "x", "schema": {"$ref": "https://example.com/other.json"}},
        {"prompt": "x", "schema": {"type": "objekt"}},
        {"prompt": "x", "regex": "(unclosed"},
        {"prompt": "word " * 600, "choice": ["no"]},
        {"prompt": "x", "schema": PERSON, "max_tokens": 2},
        {"prompt": "x", "schema": LONG, "max_tokens": 100},
        {"prompt": "x", "schema": IMPOSSIBLE},
        {"prompt": "last", "choice": ["yes"]},
    ]
    rows = job.run(lines, code=1)
    assert [row["row"] for row in rows] == list(range(len(lines)))
    assert [row["status"] for row in rows] == [
        "ok",
        *["invalid_input"] * 9,
        *["unsupported_schema"] * 3,
        "prompt_too_long",
        "failed",
        "shortened",
        "invalid",
        "ok",
    ]
    for row in rows:
        if row["status"] in ("ok", "shortened"):
            assert (row["error"], row["value"]) == (None, json.dumps(json.loads(row["value"])))
        else:
            place = f"rows.jsonl:{row['row'] + 1}"
            assert place in row["error"] and "\n" not in row["error"]
            assert row["value"] is None
    errors = [row["error"] or "" for row in rows]
    for index, reason in {
        1: "not JSON",
        2: "must be a JSON object",
        3: "no prompt",
        4: "both prompt and messages",
        5: "must be text",
        6: "regex and choice",
        7: "max_tokens",
        8: "rows.jsonl:4",
        9: "guided_bogus",
        10: "example.com",
        11: "objekt",
        13: "the model's context holds 512",
        14: "max_tokens is 2",
        16: "3 outputs were sampled",
    }.items():
        assert reason in errors[index], (index, errors[index])
    counters = ["prompt_tokens", "completion_tokens", "sampled_tokens", "jumped_tokens", "forward_passes"]
    assert all(rows[index][name] is None for index in range(1, 14) for name in counters)
    assert len(json.loads(rows[15]["value"])) == 30


def test_an_output_cut_by_max_tokens_is_completed(job: Job) -> None:
    schema = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    rows = job.run([{"prompt": f"{n}", "schema": schema, "max_tokens": 14} for n in range(8)])
    assert {row["status"] for row in rows} <= {"ok", "shortened"}
    assert "shortened" in {row["status"] for row in rows}
    assert all(set(row["value"]) == {"note"} and row["completion_tokens"] <= 14 for row in rows)


def test_max_string_bounds_free_strings_and_belongs_to_the_settings(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "free.schema.json"
    path.write_text(json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}))
    flags = ("--schema", path, "--max-tokens", "200")
    rows = job.run(prompts(3), *flags, "--max-string", "6")
    assert all(row["status"] == "ok" and len(text) <= 6 for row in rows for text in row["value"])
    assert job.start(None, *flags) == 2
    assert "max-string (was" in capsys.readouterr().err


def test_columns_are_named_and_results_are_written_as_openai_batches(job: Job) -> None:
    source, output = job.directory / "rows.csv", job.directory / "results.jsonl"
    source.write_text("key,question\nfirst,Who is it?\nsecond,And who is that?\n")
    named = ("--prompt-column", "question", "--id-column", "key", "--choice", "a,b")
    settings = ("--model", job.model, "--cache-dir", job.cache, "--output-format", "openai")
    assert invoke("run", source, "-o", output, *named, *settings) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["first", "second"]
    contents = {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert contents <= {"a", "b"}


def test_dates_get_arrow_types_where_that_is_asked_for(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "date.schema.json"
    path.write_text(json.dumps({"type": "string", "format": "date"}))
    job.run(prompts(2), "--schema", path, "--arrow-dates")
    assert job.table().schema.field("value").type == pa.date32()


def test_an_output_that_fails_its_check_is_sampled_again(job: Job) -> None:
    pair = {
        "type": "array",
        "items": {"type": "string", "pattern": "^[ab]$"},
        "minItems": 2,
        "maxItems": 2,
        "uniqueItems": True,
    }
    lines = [{"prompt": f"try {n}", "schema": pair} for n in range(6)]
    once = job.run(lines, "--retries", "0", code=1)
    assert "invalid" in {row["status"] for row in once}
    again = job.run(None, "--retries", "30", "--retry", "invalid")
    assert [row["status"] for row in again] == ["ok"] * 6
    assert all(set(row["value"]) == {"a", "b"} for row in again)
    assert [new["text"] for new, old in zip(again, once, strict=True) if old["status"] == "ok"] == [
        old["text"] for old in once if old["status"] == "ok"
    ]


def test_an_output_that_repeats_an_undeclared_key_is_sampled_again(job: Job) -> None:
    pair = {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "propertyNames": {"enum": ["a", "b"]},
        "minProperties": 2,
        "maxProperties": 2,
    }
    lines = [{"prompt": f"try {n}", "schema": pair} for n in range(6)]
    once = job.run(lines, "--retries", "0", code=1)
    repeated = [row["error"] for row in once if row["status"] == "invalid"]
    assert repeated and all("appears twice in one object" in error for error in repeated)
    again = job.run(None, "--retries", "30", "--retry", "invalid")
    assert [row["status"] for row in again] == ["ok"] * 6


def test_an_output_without_any_choice_that_fails_its_check_is_not_lost(job: Job) -> None:
    # The grammar gives the whole text, so the engine is done with the row before its first step.
    twice = {
        "type": "array",
        "items": {"type": "string", "pattern": "^same$"},
        "minItems": 2,
        "maxItems": 2,
        "uniqueItems": True,
    }
    (row,) = job.run([{"prompt": "x", "schema": twice}], code=1)
    assert (row["status"], row["text"]) == ("invalid", '["same", "same"]')


def test_strict_refuses_what_can_only_be_checked(job: Job, tmp_path: Path) -> None:
    rows = job.run([{"prompt": "x", "schema": IMPOSSIBLE}], "--strict", code=1)
    assert rows[0]["status"] == "unsupported_schema"
    assert "uniqueItems" in rows[0]["error"]


# -- columns ------------------------------------------------------------------------------------------------


def test_flatten_and_keep(job: Job, schema: Path) -> None:
    lines = [{"id": "a", "prompt": "x", "source": "mail", "value": [1]}, {"id": 7, "prompt": "y"}]
    rows = job.run(lines, "--schema", schema, "--flatten", "--keep", "source,value")
    assert list(rows[0]) == [
        *("id", "row", "status", "text", *PERSON["properties"]),
        *("error", *COLUMNS[6:], "source", "input.value"),
    ]
    assert [json.loads(row["text"])["age"] for row in rows] == [row["age"] for row in rows]
    assert [(row["id"], row["source"], row["input.value"]) for row in rows] == [
        ("a", "mail", "[1]"),
        ("7", None, None),
    ]


def test_open_objects_keep_what_the_model_adds(job: Job) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "minProperties": 2,
    }
    rows = job.run(
        [{"prompt": f"{n}", "schema": schema, "max_tokens": 60} for n in range(3)], "--objects", "open"
    )
    assert all(json.loads(row["value"]) == json.loads(row["text"]) for row in rows)
    assert all(len(json.loads(row["value"])) >= 2 for row in rows)


def test_counters_add_up(job: Job, schema: Path) -> None:
    for row in job.run(prompts(4), "--schema", schema):
        assert row["prompt_tokens"] > 10
        assert row["jumped_tokens"] > 5
        assert row["completion_tokens"] <= row["sampled_tokens"] + row["jumped_tokens"]
        assert 0 < row["forward_passes"] <= row["sampled_tokens"] + 1


# -- prompts and sampling -----------------------------------------------------------------------------------


def test_system_and_raw_change_the_prompt(job: Job, tmp_path: Path) -> None:
    plain = job.run(prompts(1), "--choice", "a,b")[0]["prompt_tokens"]
    system = job.run(None, "--choice", "a,b", "--system", "Be brief.", "--overwrite")[0]["prompt_tokens"]
    raw = job.run(None, "--choice", "a,b", "--raw", "--overwrite")[0]["prompt_tokens"]
    assert raw < plain < system
    messages = [{"role": "user", "content": "x"}]
    row = job.run([{"messages": messages}], "--choice", "a,b", "--raw", "--overwrite", code=1)[0]
    assert row["status"] == "invalid_input"
    assert "chat template" in row["error"]


def test_sampling_depends_on_seed_and_row_alone(job: Job, schema: Path) -> None:
    def texts(*flags: str) -> list[str]:
        found = job.run(prompts(6), "--schema", schema, "--temperature", "1", "--overwrite", *flags)
        return [row["text"] for row in found]

    seven = texts("--seed", "7", "--batch-size", "6")
    assert texts("--seed", "7", "--batch-size", "1", "--retry", "all") == seven
    assert texts("--seed", "8", "--batch-size", "6") != seven
    # A row's own seed and temperature win.
    own = [{**row, "seed": 7, "temperature": 1.0} for row in prompts(6)]
    assert [row["text"] for row in job.run(own, "--schema", schema, "--overwrite")] == seven


def start_over(job: Job) -> None:
    """Make the next start begin anew, as --overwrite does not where the settings are the same."""
    job.output.unlink()
    job.output.with_name("table.parquet.journal").unlink()


def test_drafts_and_batch_size_change_no_text(job: Job, schema: Path) -> None:
    texts = [row["text"] for row in job.run(prompts(6), "--schema", schema)]
    for flags in [("--drafts", "off"), ("--batch-size", "2"), ("--batch-size", "1")]:
        start_over(job)
        assert [row["text"] for row in job.run(None, "--schema", schema, *flags)] == texts


def test_jumps_change_no_text_and_save_forward_passes(job: Job) -> None:
    # The forced characters have one tokenization only, so that both ways the model reads the same tokens.
    flags = ("--regex", "[a-z]{2}¶§¶[a-z]{2}§§§§§[0-9]¶")
    jumped = job.run(prompts(6), *flags)
    start_over(job)
    unjumped = job.run(None, *flags, "--jump", "off", "--drafts", "off")
    assert [row["text"] for row in jumped] == [row["text"] for row in unjumped]
    assert [row["jumped_tokens"] for row in unjumped] == [0] * 6
    assert all(
        2 * row["forward_passes"] < other["forward_passes"]
        for row, other in zip(jumped, unjumped, strict=True)
    )


def test_without_jumps_outputs_obey_their_schema_as_well(job: Job, schema: Path) -> None:
    rows = job.run(prompts(4), "--schema", schema, "--jump", "off")
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert all(list(row["value"]) == list(PERSON["properties"]) for row in rows)


# -- starting again -----------------------------------------------------------------------------------------


@pytest.fixture
def kept(job: Job) -> Callable[..., tuple[int, int]]:
    """How many rows the last start took from an earlier one, and how many it ran."""

    def count(rows: list[Any] | None, *flags: str, code: int = 0) -> tuple[int, int]:
        summary = job.directory / "summary.json"
        found = job.run(rows, "--summary-json", str(summary), *flags, code=code)
        statistics = json.loads(summary.read_text())["statistics"]
        return statistics["rows_kept"], len(found) - statistics["rows_kept"]

    return count


def test_a_second_start_runs_nothing_and_loads_no_model(
    job: Job, schema: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job.run(prompts(3), "--schema", schema)
    before = job.output.stat().st_mtime_ns
    monkeypatch.setattr(decoding, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert job.run(None, "--schema", schema) == first
    assert job.output.stat().st_mtime_ns == before


def test_changed_and_added_rows_run_and_the_others_do_not(
    job: Job, kept: Callable[..., tuple[int, int]]
) -> None:
    flags = ("--regex", "[a-z]{4}")
    assert kept(prompts(4), *flags) == (0, 4)
    before = job.rows()
    changed = prompts(6)
    changed[1]["prompt"] = "another question"
    assert kept([changed[5], *changed[:5]], *flags) == (3, 3)
    after = job.rows()
    assert [row["id"] for row in after] == ["r5", "r0", "r1", "r2", "r3", "r4"]
    assert [after[place]["text"] for place in (1, 3, 4)] == [before[place]["text"] for place in (0, 2, 3)]
    assert kept(changed[2:4], *flags) == (2, 0)  # fewer rows: the table shrinks
    assert [row["id"] for row in job.rows()] == ["r2", "r3"]


def test_other_settings_are_refused_by_name_and_overwrite_starts_anew(
    job: Job, kept: Callable[..., tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert kept(prompts(3), "--regex", "[a-z]{4}") == (0, 3)
    capsys.readouterr()
    assert job.start(None, "--regex", "[a-y]{4}", "--max-tokens", "9") == 2
    complaint = capsys.readouterr().err
    assert "max-tokens (was '512', now '9')" in complaint
    assert "pattern (was" in complaint
    assert "seed" not in complaint
    assert complaint.count("\n") == 1
    assert kept(None, "--regex", "[a-y]{4}", "--overwrite") == (0, 3)
    assert all(re.fullmatch("[a-y]{4}", row["value"]) for row in job.rows())


def test_retry_runs_failed_rows_again(job: Job, kept: Callable[..., tuple[int, int]]) -> None:
    lines = [*prompts(2), {"prompt": "x", "regex": "longer than one token", "max_tokens": 1}, {"id": "none"}]
    assert kept(lines, "--choice", "a,b", code=1) == (0, 4)
    assert kept(None, "--choice", "a,b", code=1) == (4, 0)
    assert kept(None, "--choice", "a,b", "--retry", "failed", code=1) == (3, 1)
    assert kept(None, "--choice", "a,b", "--retry", "invalid", code=1) == (3, 1)
    assert kept(None, "--choice", "a,b", "--retry", "all", code=1) == (2, 2)


def test_max_failures_ends_the_run_and_the_same_command_continues(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"regex": "far longer than a token", "max_tokens": 1}
    lines = [{"id": f"r{n}", "prompt": f"{n}", **(bad if n % 3 == 0 else {})} for n in range(150)]
    flags = ("--choice", "a,b", "--flush-rows", "4", "--batch-size", "2")
    summary = job.directory / "summary.json"
    assert job.start(lines, *flags, "--max-failures", "3", "--summary-json", summary) == 1
    assert not job.output.exists()
    document = json.loads(summary.read_text())
    assert (document["exit_code"], document["finished"]) == (1, False)
    assert document["rows"]["failed"] >= 3
    assert "continues" in capsys.readouterr().err
    rows = job.run(None, *flags, code=1)
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(150)]
    assert [row["status"] for row in rows] == ["failed" if n % 3 == 0 else "ok" for n in range(150)]


def test_fields_without_effect_are_told_with_the_number_of_their_rows(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = [{"top_p": 0.9}, {"top_p": 1}, {"top_p": 0.5, "stop": "x"}]
    lines = [{"custom_id": str(n), "body": {"prompt": "p", **fields}} for n, fields in enumerate(asks)]
    summary = job.directory / "summary.json"
    job.run(lines, "--choice", "a,b", "--summary-json", summary)
    told = capsys.readouterr().err
    assert told.count("top_p has no effect here") == told.count("stop has no effect here") == 1
    assert re.search(r"without effect +top_p in 2 rows, stop in 1 rows\n", told)
    assert json.loads(summary.read_text())["statistics"]["unheeded"] == {"top_p": 2, "stop": 1}
    assert invoke("check", job.input, "--model", job.model, "--choice", "a,b") == 0
    assert "warning: top_p has no effect here, though 2 rows ask for it" in capsys.readouterr().out


@pytest.mark.parametrize("count", [5, 70])
@pytest.mark.parametrize(
    "bad", [{"prompt": 7}, {"prompt": "x", "regex": "longer than a token", "max_tokens": 1}]
)
def test_a_last_row_that_is_one_failure_too_many_leaves_a_whole_table(
    job: Job, count: int, bad: dict[str, Any]
) -> None:
    summary = job.directory / "summary.json"
    flags = ("--max-failures", str(count), "--summary-json", summary)
    rows = job.run([bad] * count, *flags, code=1)
    assert len(rows) == count
    document = json.loads(summary.read_text())
    assert (document["exit_code"], document["finished"]) == (1, True)


# -- what is said -------------------------------------------------------------------------------------------


def test_the_summary_and_the_grammar_cache(
    job: Job, schema: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fresh = Job(tmp_path, job.model, tmp_path / "own cache")
    lines = [*prompts(2), {"prompt": "x", "regex": "[ab]+c"}]
    summary = tmp_path / "summary.json"
    fresh.run(lines, "--schema", schema, "--summary-json", summary)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert re.search(r"patterns +2 compiled, 0 loaded from the cache", captured.err)
    assert str(fresh.output) in captured.err
    document = json.loads(summary.read_text())
    assert (document["exit_code"], document["finished"]) == (0, True)
    assert document["rows"]["ok"] == 3
    assert document["statistics"]["patterns_compiled"] == 2
    assert document["statistics"]["sampled_tokens"] > 0
    assert document["settings"]["model"] == str(job.model)

    start_over(fresh)
    fresh.run(None, "--schema", schema)
    assert re.search(r"patterns +0 compiled, 2 loaded from the cache", capfd.readouterr().err)


def test_quiet_says_nothing(job: Job, schema: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job.run(prompts(1), "--schema", schema, "-q")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_damaged_input_gives_what_can_be_read_and_exit_code_65(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = job.directory / "rows.jsonl.gz"
    content = "".join(
        json.dumps({"prompt": f"{number} {os.urandom(40).hex()}"}) + "\n" for number in range(40)
    )
    packed.write_bytes(gzip.compress(content.encode())[:-300])
    arguments = [
        argument.replace(str(job.input), str(packed)) for argument in job.arguments("--choice", "a,b")
    ]
    assert invoke(*arguments) == 65
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("jfbatch: ") and "rows.jsonl.gz" in complaint
    rows = job.rows()
    assert 0 < len(rows) < 40
    assert {row["status"] for row in rows} == {"ok"}
    assert invoke(*arguments) == 65  # and again, with nothing left to run


def test_an_output_that_cannot_be_written_is_exit_code_74(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = job.directory / "file"
    blocked.write_text("not a directory")
    write_lines(job.input, prompts(1))
    arguments = [
        argument.replace(str(job.output), str(blocked / "t.parquet")) for argument in job.arguments()
    ]
    assert invoke(*arguments) == 74
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and str(blocked) in captured.err


def test_a_summary_that_cannot_be_written_is_told_before_the_run(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.start(prompts(1), "--summary-json", job.directory / "none" / "s.json") == 2
    assert "--summary-json" in capsys.readouterr().err
    assert not job.output.exists()


def test_mistakes_and_finished_runs_are_told_without_torch(job: Job, schema: Path, tmp_path: Path) -> None:
    job.run(prompts(1), "--schema", schema, "-q")
    broken, unsupported = tmp_path / "broken.json", tmp_path / "unsupported.json"
    broken.write_text('{"type": ')
    unsupported.write_text('{"properties": {"a": {"$ref": "#/nowhere"}}}')
    common = ["run", str(job.input), "-o", str(tmp_path / "new.parquet"), "--model", str(job.model)]
    attempts = [
        (["run", "missing.jsonl", "-o", "x.parquet"], 2, "missing.jsonl"),
        ([*common, "--schema", "missing.json"], 2, "missing.json"),
        ([*common, "--schema", str(broken)], 2, "broken.json: not JSON"),
        ([*common, "--schema", str(unsupported)], 2, "unsupported.json: "),
        ([*common, "--regex", "(x"], 2, "--regex"),
        ([*common, "--regex", "x", "--choice", "a"], 2, "regex"),
        ([*common, "--raw", "--system", "x"], 2, "--system"),
        ([*common, "--max-tokens", "0"], 2, "--max-tokens"),
        ([*common[:4], "--model", str(tmp_path)], 2, "config.json"),
        ([*common[:4], "--model", "no/such/model/here"], 2, "no/such/model/here"),
        ([*common[:3], str(job.output), *common[4:], "--seed", "5"], 2, "seed (was"),
        (job.arguments("--schema", schema, "-q"), 0, ""),
    ]
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, io, json, sys\n"
        "from jfbatch import cli\n"
        "for arguments, code, said in json.loads(sys.argv[1]):\n"
        "    stderr = io.StringIO()\n"
        "    with contextlib.redirect_stderr(stderr):\n"
        "        try: cli.main(arguments)\n"
        "        except SystemExit as end: found = end.code\n"
        "    text = stderr.getvalue()\n"
        "    assert (found, said in text, text.count('\\n')) == (code, True, 1 if code else 0), "
        "(arguments, found, text)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, str(script), json.dumps(attempts)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert not (tmp_path / "new.parquet").exists()


def test_the_input_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "x", "choice": ["a"]}\n')
    before = prompts.read_bytes()
    assert invoke("run", prompts, "-o", prompts, "--overwrite") == 2
    assert "both input and output" in capsys.readouterr().err
    assert prompts.read_bytes() == before


def test_an_empty_choice_is_no_constraint_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    assert invoke("run", prompts, "-o", tmp_path / "out.parquet", "--choice", "") == 2
    assert "choice" in capsys.readouterr().err
