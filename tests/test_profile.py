"""`jfbatch run --profile`: the trace of a whole run, and what the hooks on a model cost without it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.report.test_trace import assert_nested, spans_of
from tests.run_command import invoke, write_lines
from tests.tiny_model import tiny_model  # noqa: F401 - a fixture

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}, "n": {"type": "integer"}}}


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> list[str]:  # noqa: F811
    write_lines(tmp_path / "rows.jsonl", [{"id": str(n), "prompt": f"row {n}"} for n in range(6)])
    (tmp_path / "schema.json").write_text(json.dumps({**SCHEMA, "required": ["kind", "n"]}))
    return [
        *("run", str(tmp_path / "rows.jsonl"), "--schema", str(tmp_path / "schema.json")),
        *("-o", str(tmp_path / "out.parquet"), "--model", str(tiny_model), "--raw", "--max-tokens", "40"),
        *("--cache-dir", str(tmp_path / "cache"), "--device", "cpu", "--threads", "2"),
    ]


def test_a_run_is_profiled_from_reading_to_the_finished_table(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*job, "--profile", tmp_path / "trace.json") == 0
    spans = spans_of(tmp_path / "trace.json")
    names = {span["name"] for span in spans}
    assert names >= {
        "load model",
        "vocabulary",
        "pack weights",
        "wait for weights",
        "read",
        "render",
        "compile",
        "fetch",
    }
    assert names >= {"step", "plan", "draft", "forward", "layers", "LM head"}
    assert names >= {"linear", "gated linear", "attention", "norm", "waiting"}
    assert names >= {"mask", "choose", "accept", "jump", "retire", "complete", "write", "finish table"}
    assert_nested(spans)
    steps = sum(span["dur"] for span in spans if span["name"] == "step")
    forward = sum(span["dur"] for span in spans if span["name"] == "forward")
    assert 0 < forward < steps
    times = Counter(span["name"] for span in spans)
    assert times["forward"] == times["layers"] == times["linear"] > 0
    shown = capsys.readouterr().err
    assert "is not the forward pass" in shown and "retokenise" in shown


def test_a_run_without_it_writes_no_trace(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*job) == 0
    assert "forward pass)" not in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json.*")) and not (tmp_path / "trace.json").exists()


def test_a_directory_that_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*job, "--profile", tmp_path / "missing" / "trace.json") == 2
    assert "--profile: there is no directory" in capsys.readouterr().err
