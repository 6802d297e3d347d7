"""Every file of the corpus of odd and broken input gives exactly the rows and errors that it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jfbatch.errors import InputError
from jfbatch.rows.reader import ReaderOptions, read_rows
from jfbatch.rows.result import RowResult, part_table
from jfbatch.rows.row import Row

CORPUS = Path(__file__).parent.parent / "data" / "bad"
EXPECTED: dict[str, Any] = json.loads((CORPUS / "expected.json").read_text())


def read_all(*inputs: str, options: ReaderOptions | None = None) -> tuple[list[Row], InputError | None]:
    rows = []
    try:
        for row in read_rows(inputs, options):
            rows.append(row)
    except InputError as error:
        return rows, error
    return rows, None


def test_every_file_of_the_corpus_is_expected() -> None:
    files = {path.name for path in CORPUS.iterdir()} - {"expected.json", "make.py", "__pycache__"}
    assert files == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_corpus_file_gives_the_expected_rows(name: str) -> None:
    path = str(CORPUS / name)
    rows, damage = read_all(path)
    if EXPECTED[name]["damage"] is None:
        assert damage is None
    else:
        assert damage is not None and EXPECTED[name]["damage"] in str(damage)
        assert damage.exit_code == 65
        assert damage.place == f"{path}:{rows[-1].line + 1 if rows else 1}"
    if EXPECTED[name]["rows"] is None:
        assert [row.prompt for row in rows] == [f"{n} {n * n}" for n in range(len(rows))]
        return
    assert [row.line for row in rows] == [row["line"] for row in EXPECTED[name]["rows"]]
    for row, told in zip(rows, EXPECTED[name]["rows"], strict=True):
        assert row.place == f"{path}:{row.line}"
        if "prompt" in told:
            assert (row.error, row.prompt) == (None, told["prompt"])
            continue
        assert row.error is not None and row.prompt is None and row.messages is None
        column = "" if told["column"] is None else f":{told['column']}"
        assert row.error.startswith(f"{path}:{row.line}{column}: "), row.error
        assert told["error"] in row.error


def test_all_rows_of_the_corpus_have_distinct_keys_and_can_be_written() -> None:
    rows, _ = read_all(*(str(CORPUS / name) for name in sorted(EXPECTED)))
    assert len({row.key for row in rows}) == len(rows) > 100
    assert [row.index for row in rows] == list(range(len(rows)))
    results = [RowResult.of(row, "invalid_input" if row.error else "ok", error=row.error) for row in rows]
    assert len(part_table(results)) == len(rows)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "temperature", "seed"])
def test_a_number_of_nested_brackets_costs_only_its_row(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("json.loads", lambda text: pytest.fail("would recurse without a limit"))
    path = tmp_path / "deep.jsonl"
    path.write_text(json.dumps({"prompt": "hi", name: "[" * 200_000}) + '\n{"prompt": "last"}\n')
    rows, _ = read_all(str(path))
    assert rows[0].error is not None and f"{name} must be a number" in rows[0].error
    assert rows[1].prompt == "last"


def test_a_damaged_file_does_not_keep_the_next_from_being_read() -> None:
    rows, damage = read_all(str(CORPUS / "cut.jsonl.gz"), str(CORPUS / "mixed.jsonl"))
    assert damage is not None and "cut.jsonl.gz" in damage.place
    assert rows[-1].prompt == "last"


def test_several_damaged_files_are_all_named() -> None:
    _, damage = read_all(str(CORPUS / "cut.jsonl.gz"), str(CORPUS / "cut.jsonl.zst"))
    assert damage is not None
    assert "cut.jsonl.gz" in str(damage) and "cut.jsonl.zst" in str(damage)


def test_a_line_of_50_megabytes_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    prompt = "long " * 10_000_000
    path.write_text(json.dumps({"prompt": prompt}) + "\n" + '{"prompt": "short"}\n')
    rows, damage = read_all(str(path))
    assert damage is None
    assert rows[0].prompt == prompt
    assert rows[1].prompt == "short"


def test_a_line_over_the_limit_is_refused_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jfbatch.rows.sources.MAXIMUM_LINE_BYTES", 100)
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 500}) + "\n" + '{"prompt": "short"}\n')
    rows, _ = read_all(str(path))
    assert rows[0].error is not None and "longer than 100 bytes" in rows[0].error
    assert (rows[1].line, rows[1].prompt) == (2, "short")
