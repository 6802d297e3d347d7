"""`jfbatch run` with every grammar backend, row by row, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from jfbatch.grammar.backends import is_installed
from tests.run_command import Job, invoke, write_lines

FOREIGN = [
    pytest.param(name, marks=pytest.mark.skipif(not is_installed(name), reason=f"{name} is not installed"))
    for name in ("llguidance", "xgrammar", "outlines")
]
with_llguidance = pytest.mark.skipif(not is_installed("llguidance"), reason="llguidance is not installed")
with_xgrammar = pytest.mark.skipif(not is_installed("xgrammar"), reason="xgrammar is not installed")
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b", None]}, "done": {"type": "boolean"}},
    "required": ["kind", "done"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, cache: Path) -> Job:
    return Job(tmp_path, tiny_model, cache)


def test_rows_of_one_batch_have_different_backends(job: Job) -> None:
    names = ["fsm", *(name for name in ("llguidance", "xgrammar", "outlines") if is_installed(name))]
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += [
            {"prompt": "x", "backend": name, "schema": RECORD},
            {"prompt": "x", "backend": name, "regex": "[a-c]{2}-[0-9]"},
            {"prompt": "x", "backend": name, "choice": ["red", "green"]},
        ]
    rows.append({"prompt": "x", "schema": RECORD})
    found = job.run(rows, "--json-style", "compact", "--temperature", "1")
    assert [row["backend"] for row in found] == [name for name in names for _ in range(3)] + ["fsm"]
    assert {row["status"] for row in found} == {"ok"}
    validator = jsonschema_rs.validator_for(RECORD)
    assert all(validator.is_valid(json.loads(row["text"])) for row in found[::3])
    assert all(row["text"] in ("red", "green") for row in found[2::3])
    assert list(found[0])[-1] == "backend"


@pytest.mark.parametrize("name", FOREIGN)
def test_greedy_outputs_are_those_of_our_own_backend(job: Job, name: str) -> None:
    # The same masks give the same tokens, jumps or not.
    rows = [{"prompt": f"number {number}", "regex": "[a-z]{3}= (yes|no|[0-9]{2});"} for number in range(6)]
    ours = job.run(rows, "--backend", "fsm")
    theirs = job.run(None, "--backend", name, "--overwrite")
    assert [row["text"] for row in theirs] == [row["text"] for row in ours]
    assert {row["backend"] for row in theirs} == {name}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_output_is_completed_in_time(job: Job, name: str) -> None:
    schema = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    rows = [{"prompt": f"{number}", "schema": schema, "max_tokens": 16} for number in range(6)]
    found = job.run(rows, "--backend", name, "--json-style", "compact")
    assert {row["status"] for row in found} <= {"ok", "shortened"}
    assert "shortened" in {row["status"] for row in found}
    assert all(set(row["value"]) == {"note"} and row["completion_tokens"] <= 16 for row in found)


@with_llguidance
def test_auto_takes_llguidance_for_what_ours_refuses_and_says_so(job: Job) -> None:
    grammar = 'start: "x" %json {"type": "boolean"}\n'  # llguidance's dialect
    rows = [{"prompt": "x", "grammar": grammar, "backend": name} for name in (None, "llguidance", "fsm")]
    found = job.run(rows, code=1)
    assert [row["status"] for row in found] == ["ok", "ok", "unsupported_schema"]
    assert [row["backend"] for row in found] == ["llguidance", "llguidance", None]
    assert all(row["text"] in ("xtrue", "xfalse") for row in found[:2])


@with_llguidance
def test_a_pattern_that_both_refuse_has_both_reasons(job: Job) -> None:
    (row,) = job.run([{"prompt": "x", "grammar": "start: nowhere\n"}], code=1)
    assert row["status"] == "unsupported_schema"
    assert "rows.jsonl:1" in row["error"] and "llguidance refuses it too" in row["error"]


@with_xgrammar
def test_what_an_engine_lets_through_is_caught(job: Job) -> None:
    twice = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    rows = [
        {"prompt": "x", "schema": twice},
        {"prompt": "x", "regex": r"a\Z"},  # XGrammar reads a letter Z
        {"prompt": "x", "regex": "ab"},
    ]
    found = job.run(rows, "--backend", "xgrammar", "--retries", "1", code=1)
    assert [row["status"] for row in found] == ["invalid", "invalid", "ok"]
    assert "2 outputs were sampled" in found[0]["error"] and "regex" in found[1]["error"]
    assert [row["value"] for row in found[:2]] == [None, None]


@pytest.mark.parametrize("name", ["llguidance", "xgrammar", "outlines"])
def test_a_missing_backend_is_told_before_anything_starts(
    job: Job, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jfbatch.grammar.backends.find_spec", lambda package: None)
    assert job.start([{"prompt": "x"}], "--backend", name) == 2
    told = capsys.readouterr().err
    assert f"pip install 'jfbatch[{name}]'" in told and told.count("\n") == 1
    assert not job.output.exists()


def test_a_missing_backend_of_a_row_costs_that_row(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jfbatch.grammar.backends.find_spec", lambda package: None)
    rows = job.run(
        [{"prompt": "x", "regex": "a", "backend": "xgrammar"}, {"prompt": "x", "regex": "a"}], code=1
    )
    assert [row["status"] for row in rows] == ["unsupported_schema", "ok"]
    assert "pip install 'jfbatch[xgrammar]'" in rows[0]["error"]


@with_llguidance
def test_a_pattern_that_the_chosen_backend_refuses_is_told_before_anything_starts(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "uniqueItems": true}')
    assert job.start([{"prompt": "x"}], "--schema", schema, "--backend", "llguidance") == 2
    told = capsys.readouterr().err
    assert "s.json" in told and "llguidance" in told and "uniqueItems" in told and told.count("\n") == 1
    job.run(None, "--schema", schema, "--backend", "auto", "--retries", "30")


def test_a_start_with_another_backend_is_another_job(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.run([{"prompt": "x", "regex": "a"}], "--backend", "fsm")
    assert job.start(None, "--backend", "auto") == 2
    assert "backend" in capsys.readouterr().err


@with_llguidance
def test_check_says_which_backend_would_decode(tmp_path: Path, tiny_model: Path, cache: Path) -> None:
    rows = [
        {"prompt": "x", "schema": RECORD},
        {"prompt": "x", "schema": RECORD, "backend": "llguidance"},
        {"prompt": "x", "grammar": 'start: "x" %json {"type": "boolean"}\n'},
    ]
    findings = tmp_path / "findings.json"
    arguments = [
        "check",
        write_lines(tmp_path / "rows.jsonl", rows),
        "--json",
        findings,
        "--model",
        tiny_model,
    ]
    assert invoke(*arguments, "--cache-dir", cache) == 0
    patterns = json.loads(findings.read_text())["patterns"]
    assert [(found["backend"], found["verdict"]) for found in patterns] == [
        ("fsm", "enforced"),
        ("llguidance", "checked"),
        ("llguidance", "checked"),
    ]
