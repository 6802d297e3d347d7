"""Files that are not what their names say, and tables as other programs write them."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfbatch.errors import InputError, UsageError
from jfbatch.rows.reader import ReaderOptions, check_inputs, read_rows


def table(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.json", b'[{"prompt": "a"}]', r"a JSON array, and rows are lines: jq -c '\.\[\]'"),
        ("rows.json", b'\n [\n{"prompt": "a"}]', "a JSON array"),
        ("rows.json.gz", gzip.compress(b"[1]"), "a JSON array"),
        ("rows.json", b'{\n "prompt": "a"\n}', r"JSON over several lines, .* jq -c '\.'"),
        ("rows.jsonl", b"PAR1\0\0\0", "this is a Parquet file"),
    ],
)
def test_files_that_hold_no_rows_are_refused_with_a_way_out(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name}: .*{said}"):
        check_inputs([str(tmp_path / name)])


@pytest.mark.parametrize("content", ['{"prompt": "a"}\n{"prompt": "b"}\n', "", "\n", '{"prompt": "a"}'])
def test_json_files_of_lines_are_fine(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content)
    assert check_inputs([str(file)]) == [str(file)]
    assert [row.error for row in read_rows([str(file)])] == [None] * content.count("{")


def test_nothing_is_taken_from_a_pipe_to_look_at_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert check_inputs([str(tmp_path / "pipe")])  # nobody writes to it: reading would wait


def test_an_empty_name_is_not_this_directory() -> None:
    with pytest.raises(UsageError, match="the name of an input is empty"):
        check_inputs([""])


def test_a_column_that_counts_must_not_stand_twice(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text("prompt,note,note,tag,tag\na,1,2,3,4\n")
    assert check_inputs([str(csv)])
    with pytest.raises(UsageError, match=r"rows.csv: the column tag stands there twice"):
        check_inputs([str(csv)], ReaderOptions(keep=("tag",)))
    arrays = [pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(arrays, names=["prompt", "prompt"]), tmp_path / "rows.parquet")
    with pytest.raises(UsageError, match="the column prompt stands there twice"):
        check_inputs([str(tmp_path / "rows.parquet")])


def test_text_that_a_table_has_as_bytes_is_text(tmp_path: Path) -> None:
    file = table(tmp_path / "t.parquet", prompt=["größe".encode(), b"\xff", b"c"], id=[b"x", b"y", b"\xff"])
    good, bad_prompt, bad_id = read_rows([file], ReaderOptions(keep=("prompt",)))
    assert (good.id, good.prompt, good.extra) == ("x", "größe", {"prompt": "größe"})
    assert bad_prompt.error == f"{file}:2: prompt must be text, not bytes that are no UTF-8"
    assert bad_id.error == f"{file}:3: id must be text or a number, not bytes that are no UTF-8"


@pytest.mark.parametrize(
    ("value", "identity"),
    [
        (datetime.date(2024, 5, 17), "2024-05-17"),
        (datetime.datetime(2024, 5, 17, 8), "2024-05-17 08:00:00"),
        (decimal.Decimal("10000000000000000000000000000000000001"), "10000000000000000000000000000000000001"),
        (decimal.Decimal("1.50"), "1.50"),
        ([1], None),
    ],
)
def test_ids_of_tables_may_be_of_any_type_that_names_something(
    tmp_path: Path, value: Any, identity: str | None
) -> None:
    (row,) = read_rows([table(tmp_path / "t.parquet", prompt=["a"], id=[value])])
    assert row.id == identity
    assert (row.error is None) == (identity is not None)


def test_uuids_of_tables_are_ids(tmp_path: Path) -> None:
    name = uuid.UUID(int=7)
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([name.bytes], pa.binary(16)))
    (row,) = read_rows([table(tmp_path / "t.parquet", prompt=["a"], id=ids)])
    assert (row.id, row.error) == (str(name), None)


def test_decimals_are_numbers(tmp_path: Path) -> None:
    decimals = {"max_tokens": [decimal.Decimal("7.00")], "temperature": [decimal.Decimal("0.25")]}
    (row,) = read_rows([table(tmp_path / "t.parquet", prompt=["a"], **decimals)])
    assert (row.max_tokens, row.temperature, row.error) == (7, 0.25, None)


def test_moments_in_nanoseconds_are_kept_as_text(tmp_path: Path) -> None:
    moment = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))
    (row,) = read_rows([table(tmp_path / "t.parquet", prompt=["a"], at=moment)], ReaderOptions(keep=("at",)))
    assert row.extra == {"at": "2023-11-14 22:13:20.123456789"}
    assert json.dumps(row.extra)


def test_a_moment_that_python_does_not_know_is_damage_with_its_place(tmp_path: Path) -> None:
    file = table(tmp_path / "t.parquet", prompt=["a"], at=pa.array([2**60], pa.timestamp("ms")))
    with pytest.raises(InputError, match=r"t.parquet:1: cannot be read further"):
        list(read_rows([file], ReaderOptions(keep=("at",))))
