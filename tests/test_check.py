"""`jfbatch check`: says what a run would refuse and why, without weights, and is right about it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jfbatch.check import forced_share, label_of
from jfbatch.engine.model import load_model
from jfbatch.engine.tokenizer import load_tokenizer
from jfbatch.errors import ModelError
from jfbatch.grammar import Grammar, Vocabulary
from jfbatch.rows.row import Pattern
from tests.run_command import ROOT, Job, invoke, write_lines

POINT = {
    "type": "object",
    "title": "A point",
    "properties": {"x": {"type": "integer"}, "kind": {"const": "point in the plane"}},
    "required": ["x", "kind"],
}
CHECKED = {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True}
MIXED: list[Any] = [
    {"id": "a", "prompt": "fine", "schema": POINT},
    {"prompt": "fine as well", "schema": POINT},
    {"prompt": "checked", "schema": CHECKED, "max_tokens": 30},
    '{"prompt": ',
    {"prompt": "no such place", "schema": {"properties": {"a": {"$ref": "#/$defs/none"}}}},
    {"prompt": "x", "schema": {"type": "objekt"}},
    {"prompt": "x", "regex": "(open"},
    {"prompt": "far too long " * 300, "choice": ["yes"]},
    {"prompt": "x", "schema": POINT, "max_tokens": 3},
    {"prompt": "long, but not too long" * 20, "choice": ["yes"]},
    {"prompt": "almost no room " * 155, "schema": {"type": "string", "minLength": 200}},
    {"prompt": "free", "max_tokens": 4},
    {"prompt": "", "choice": ["yes"]},
    {"messages": [{"role": "user", "content": "hello"}], "choice": ["yes", "no"]},
]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return Job(tmp_path, tiny_model, tmp_path / "cache")


def check(job: Job, lines: list[Any], *flags: str | Path, code: int) -> dict[str, Any]:
    """The findings as JSON."""
    write_lines(job.input, lines)
    found = job.directory / "found.json"
    assert invoke("check", job.input, "--model", job.model, "--json", found, *flags) == code
    document: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("flags", [(), ("--raw",), ("--strict",), ("--system", "Be brief. " * 20)])
def test_the_rows_that_would_fail_are_those_that_fail(job: Job, flags: tuple[str, ...]) -> None:
    document = check(job, MIXED, *flags, code=1)
    rows = job.run(None, *flags, code=1)
    failed = [row for row in rows if row["status"] not in ("ok", "shortened")]
    assert [(fault["id"], fault["status"]) for fault in document["failing"]] == [
        (row["id"], row["status"]) for row in failed
    ]
    for fault, row in zip(document["failing"], failed, strict=True):
        if fault["status"] != "failed":
            assert fault["reason"] == row["error"]
        assert fault["place"] == f"{job.input}:{row['row'] + 1}"
    assert document["rows"] == len(MIXED)
    assert document["rows_failing"] == len(failed)
    assert document["failing_left_out"] == 0
    assert sum(document["failing_by_status"].values()) == len(failed)


def test_patterns_are_told_apart_and_judged(job: Job) -> None:
    patterns = check(job, MIXED, code=1)["patterns"]
    assert [(pattern["kind"], pattern["rows"], pattern["verdict"]) for pattern in patterns] == [
        ("schema", 3, "enforced"),
        ("schema", 1, "checked"),
        ("schema", 1, "refused"),
        ("schema", 1, "refused"),
        ("regex", 1, "refused"),
        ("choice", 3, "enforced"),
        ("schema", 1, "enforced"),
        ("free text", 1, "enforced"),
        ("choice", 1, "enforced"),
    ]
    point, checked, nowhere, misspelt, regex, *_ = patterns
    assert point["label"] == "A point"
    assert point["first"] == f"{job.input}:1"
    assert point["fingerprint"] == Pattern.of_schema(POINT).fingerprint
    assert point["states"] > 10
    assert 0.7 < point["forced_share"] < 1
    assert point["shortest_bytes"] == len('{"x": 0, "kind": "point in the plane"}')
    assert checked["unenforced"] == ["#: uniqueItems"]
    assert (nowhere["pointer"], nowhere["keyword"]) == ("/properties/a", "$ref")
    assert "#/$defs/none" in nowhere["reason"]
    assert "objekt" in misspelt["reason"]
    assert "(open" in regex["reason"]


def test_strict_and_open_objects_change_the_verdict(job: Job) -> None:
    lines = [{"prompt": "x", "schema": CHECKED}]
    assert check(job, lines, code=0)["patterns"][0]["verdict"] == "checked"
    (refused,) = check(job, lines, "--strict", code=1)["patterns"]
    assert (refused["verdict"], refused["keyword"]) == ("refused", "uniqueItems")
    free = [{"prompt": "x", "schema": {"type": "object", "properties": {"a": {"const": 1}}}}]
    closed, opened = (
        check(job, free, "--objects", objects, code=0)["patterns"][0]["states"]
        for objects in ("closed", "open")
    )
    assert closed < opened


def test_a_default_schema_that_cannot_be_enforced_is_a_finding(job: Job, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"items": {"$ref": "https://example.com/x"}}')
    document = check(job, [{"prompt": "x"}, {"prompt": "y"}], "--schema", schema, code=1)
    (pattern,) = document["patterns"]
    assert (pattern["rows"], pattern["verdict"], pattern["pointer"]) == (2, "refused", "/items")
    assert document["failing_by_status"] == {"unsupported_schema": 2}


def test_an_unknown_format_is_a_warning(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "string", "format": "klingon", "maxLength": 9}
    (pattern,) = check(job, [{"prompt": "x", "schema": schema}], code=0)["patterns"]
    assert any("klingon" in warning for warning in pattern["warnings"])
    assert "warning: " in capsys.readouterr().out


def test_the_text_names_patterns_rows_and_reasons(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    check(job, MIXED, code=1)
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert any("A point" in line and "enforced" in line for line in lines)
    assert any(line.startswith("pattern 3 ") and "/properties/a: $ref" in line for line in lines)
    assert any("checked after decoding: #: uniqueItems" in line for line in lines)
    assert any(line.startswith("prompt_too_long: ") and f"{job.input}:8" in line for line in lines)
    assert lines[-1].startswith("14 rows, 9 patterns: ") and "would fail" in lines[-1]
    capsys.readouterr()
    check(job, MIXED[:2], code=0)
    assert capsys.readouterr().out.splitlines()[-1] == "2 rows, 1 patterns: nothing would fail"


def test_json_to_stdout_takes_the_texts_place(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(job.input, MIXED)
    assert invoke("check", job.input, "--model", job.model, "--json", "-") == 1
    assert json.loads(capsys.readouterr().out)["rows"] == len(MIXED)


def test_damaged_input_is_checked_as_far_as_it_goes(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    packed = job.directory / "rows.jsonl.gz"
    lines = "".join(json.dumps({"prompt": os.urandom(60).hex()}) + "\n" for _ in range(30))
    packed.write_bytes(gzip.compress(lines.encode())[:-300])
    found = job.directory / "found.json"
    arguments = ("check", packed, "--model", job.model, "--choice", "a,b", "--json", found)
    assert invoke(*arguments) == 65
    document = json.loads(found.read_text())
    assert 0 < document["rows"] < 30
    assert "rows.jsonl.gz" in document["damage"]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.jsonl",), "missing.jsonl"),
        ((), "no input"),
        (("ROWS", "--schema", "missing.json"), "missing.json"),
        (("ROWS", "--model", "no/such/model/here"), "no/such/model/here"),
        (("ROWS", "--raw", "--system", "x"), "--system"),
        (("ROWS", "-o", "t.parquet"), "-o"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    job: Job, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(job.input, MIXED[:1])
    given = [str(job.input) if argument == "ROWS" else argument for argument in arguments]
    assert invoke("check", *given) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_neither_torch_nor_weights_are_loaded(job: Job) -> None:
    write_lines(job.input, MIXED)
    script = (
        "import sys\nfrom jfbatch import cli\n"
        "try: cli.main(sys.argv[1:])\nexcept SystemExit as end: assert end.code == 1\n"
        "assert 'torch' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith('transformers.models.llama')]"
    )
    arguments = ["check", str(job.input), "--model", str(job.model)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, env=environment, timeout=60)


# -- its parts ----------------------------------------------------------------------------------------------


def test_the_tokenizer_alone_is_the_models(tiny_model: Path, tmp_path: Path) -> None:
    alone, loaded = load_tokenizer(str(tiny_model), tmp_path), load_model(str(tiny_model))
    assert alone.context_length == loaded.context_length == 512
    messages = [{"role": "user", "content": "What about 東京, naïve Größe and <|end|>?"}]
    for tokenizer in (alone.tokenizer, loaded.tokenizer):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith("<|turn|>user")
    assert alone.tokenizer(text)["input_ids"] == loaded.tokenizer(text)["input_ids"]


def test_a_tokenizer_that_is_not_there_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path), tmp_path)


def test_forced_share_is_the_share_of_determined_bytes() -> None:
    vocabulary = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])
    assert forced_share(Grammar.from_choice(["only this"], vocabulary)) == 1.0
    assert forced_share(Grammar.from_regex("[ab]{6}", vocabulary)) == 0.0
    assert forced_share(Grammar.from_regex("[ab]cc[de]ff", vocabulary)) == pytest.approx(4 / 6)
    assert forced_share(Grammar.from_regex("", vocabulary)) == 0.0


def test_labels_are_short_and_telling() -> None:
    assert label_of(Pattern.of_schema(POINT)) == "A point"
    assert label_of(Pattern.of_schema({"properties": {"a": {}, "b": {}}})) == "{a, b}"
    assert label_of(Pattern.of_schema(True)) == "true"
    assert label_of(Pattern.of_choices(["yes", "no"])) == "yes, no"
    assert label_of(Pattern("regex", "x" * 100)) == "x" * 45 + "..."
