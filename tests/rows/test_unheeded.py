"""Requests written for other engines: what they ask for in vain is told, what would be less is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfbatch.rows.reader import ReaderOptions, read_rows
from jfbatch.rows.row import Row

MESSAGES = [{"role": "user", "content": "hello"}]


def read(tmp_path: Path, line: dict[str, Any], **options: Any) -> Row:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (row,) = read_rows([str(file)], ReaderOptions(**options))
    return row


def test_a_line_for_another_endpoint_is_refused(tmp_path: Path) -> None:
    for url, refused in (("/v1/embeddings", True), ("/v1/chat/completions", False), (None, False)):
        row = read(tmp_path, {"custom_id": "a", "url": url, "body": {"messages": MESSAGES}})
        assert (row.error is not None) == refused
        assert not refused or "'/v1/embeddings'" in (row.error or "")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"top_p": 0.9, "temperature": 1}, ("top_p",)),
        ({"top_p": 0.9, "temperature": 0}, ()),  # the likeliest is taken
        ({"top_p": 1.0, "stop": None, "n": 1, "frequency_penalty": 0.0, "logit_bias": {}}, ()),
        ({"stop": "\n", "presence_penalty": 0.5}, ("stop", "presence_penalty")),
        ({"stop": ["a", "b"], "logit_bias": {"50256": -100}}, ("stop", "logit_bias")),
        ({"stop": [], "logprobs": False, "top_logprobs": 0, "function_call": "none", "functions": []}, ()),
        (
            {"logprobs": True, "chat_template_kwargs": {"enable_thinking": False}},
            ("logprobs", "chat_template_kwargs"),
        ),
        ({"model": "gpt", "user": "me", "stream": True, "store": False, "metadata": {"a": 1}}, ()),
    ],
)
def test_what_is_asked_for_in_vain_is_known_by_name(
    tmp_path: Path, fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    body = read(tmp_path, {"custom_id": "c", "body": {"messages": MESSAGES, **fields}})
    assert (body.error, body.unheeded) == (None, names)
    plain = read(tmp_path, {"prompt": "p", **fields})
    assert (plain.error, plain.unheeded) == (None, names)
    kept = read(tmp_path, {"prompt": "p", **fields}, keep=tuple(fields))
    assert (kept.error, kept.unheeded) == (None, ())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 3}, "n must be 1: a row has one output; repeat the row"),
        ({"best_of": 2}, "best_of must be 1"),
        ({"functions": [{"name": "f"}]}, "functions is not known: give tools"),
        ({"function_call": {"name": "f"}}, "function_call is not known: give tools"),
    ],
)
def test_requests_that_would_get_less_than_they_ask_for_are_refused(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    row = read(tmp_path, {"custom_id": "c", "body": {"messages": MESSAGES, **fields}})
    assert row.error is not None and said in row.error and "rows.jsonl:1:" in row.error
    assert read(tmp_path, {"messages": MESSAGES, **fields}).error is not None
    assert read(tmp_path, {"messages": MESSAGES, **fields}, keep=tuple(fields)).error is None


def test_fields_of_the_users_own_with_ordinary_names_are_let_be(tmp_path: Path) -> None:
    row = read(tmp_path, {"prompt": "p", "n": 7, "suffix": "Jr.", "echo": 3, "functions": "baker, poet"})
    assert (row.error, row.unheeded) == (None, ())


def test_columns_of_tables_count_as_well(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text("prompt,top_p,stop,presence_penalty\na,1.0,,0\nb,0.5,END,0.0\nc,1,,0.25\n")
    assert [row.unheeded for row in read_rows([str(csv)])] == [(), ("top_p", "stop"), ("presence_penalty",)]
    parquet = tmp_path / "rows.parquet"
    columns = {"prompt": ["a", "b", "c"], "top_p": [1.0, 0.5, float("nan")], "stop": [[], ["x"], None]}
    pq.write_table(pa.table(columns), parquet)
    assert [row.unheeded for row in read_rows([str(parquet)])] == [(), ("top_p", "stop"), ()]
