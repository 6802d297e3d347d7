"""`jfbatch run` with grammar files: --grammar for all rows, "grammar" and its other spellings per row."""

from __future__ import annotations

import ast
import csv
import io
from pathlib import Path

import pytest

from tests.run_command import ROOT, Job, invoke

SAMPLES = ROOT / "data" / "grammars"
SHORT = 'start: "yes" | "no" /[!?]{1,3}/'


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return Job(tmp_path, tiny_model, tmp_path / "cache")


def test_every_output_obeys_the_grammar_file(job: Job) -> None:
    rows = job.run(
        [{"prompt": f"Give me table {number}."} for number in range(4)],
        *("--grammar", SAMPLES / "csv.gbnf", "--max-tokens", "60", "--temperature", "1"),
    )
    assert {row["status"] for row in rows} <= {"ok", "shortened"}
    for row in rows:
        records = list(csv.reader(io.StringIO(row["text"], newline=""), strict=True))
        assert records[0] == ["name", "quantity", "note"]
        assert {len(record) for record in records} == {3}


def test_rows_bring_grammars_of_their_own_in_every_spelling(job: Job) -> None:
    arithmetic = (SAMPLES / "arithmetic.gbnf").read_text(encoding="utf-8")
    rows = job.run(
        [
            {"prompt": "What is it?", "grammar": arithmetic},
            {"prompt": "Yes?", "grammar": SHORT},
            {"prompt": "Yes?", "guided_grammar": SHORT},
            {"prompt": "Yes?", "structured_outputs": {"grammar": SHORT}},
            {"prompt": "Yes?", "grammar": "root ::= root"},
            {"prompt": "Yes?", "grammar": SHORT, "regex": "a"},
        ],
        *("--max-tokens", "40"),
        code=1,
    )
    assert [row["status"] for row in rows[4:]] == ["unsupported_schema", "invalid_input"]
    assert {row["status"] for row in rows[:4]} <= {"ok", "shortened"}
    ast.parse(rows[0]["text"], mode="eval")
    for row in rows[1:4]:
        assert row["text"] == "yes" or row["text"].rstrip("!?") == "no"
    assert "no text can match this rule" in rows[4]["error"]
    assert "grammar and regex" in rows[5]["error"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'root ::= "a" itme\nitem ::= "b"', "line 1, column 14, in rule 'root': 'itme' is not defined"),
        (b"hello", "no rule found"),
        (b"\xff", "not UTF-8 text"),
        (None, "No such file or directory; give --grammar a file that exists"),
    ],
)
def test_a_wrong_grammar_file_is_named_before_anything_starts(
    job: Job, capsys: pytest.CaptureFixture[str], text: bytes | None, said: str
) -> None:
    file = job.directory / "wrong.gbnf"
    if text is not None:
        file.write_bytes(text)
    assert job.start([{"prompt": "a"}], "--grammar", file) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert said in error
    assert error.count("\n") == 1
    assert not job.output.exists()


def test_check_reads_grammar_files_too(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.input.write_text('{"prompt": "a"}\n', encoding="utf-8")
    flags = ["--model", str(job.model), "--cache-dir", str(job.cache)]
    assert invoke("check", job.input, *flags, "--grammar", SAMPLES / "select.lark") == 0
    assert "grammar" in capsys.readouterr().out
