"""What the reader understands: formats, fields, constraint spellings, identities, and names of inputs."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from jfbatch.errors import UsageError
from jfbatch.rows.constraint import FREE_OBJECT
from jfbatch.rows.reader import ReaderOptions, check_inputs, read_rows
from jfbatch.rows.row import Pattern, Row

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"z":{"type":"string"},"a":{"type":"integer"}}}'


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_one(tmp_path: Path, row: Any, **options: Any) -> Row:
    (only,) = read_rows([write_lines(tmp_path / "one.jsonl", row)], ReaderOptions(**options))
    return only


def test_all_fields_of_a_row_are_read(tmp_path: Path) -> None:
    row = read_one(
        tmp_path,
        {
            "id": 7,
            "prompt": "p",
            "schema": SCHEMA,
            "max_tokens": 9,
            "temperature": 0.5,
            "seed": 3,
            "tag": [1],
        },
        keep=("tag", "absent"),
    )
    assert (row.id, row.prompt, row.max_tokens, row.temperature, row.seed) == ("7", "p", 9, 0.5, 3)
    assert row.pattern == Pattern("schema", SCHEMA_TEXT)
    assert row.extra == {"tag": [1]}
    assert (row.error, row.messages, row.key) == (None, None, "id:7")


def test_fields_that_are_not_named_are_ignored(tmp_path: Path) -> None:
    row = read_one(tmp_path, {"prompt": "p", "functions": {}, "whatever": [None]})
    assert (row.error, row.extra) == (None, {})


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"schema": SCHEMA}, Pattern("schema", SCHEMA_TEXT)),
        ({"schema": json.dumps(SCHEMA)}, Pattern("schema", SCHEMA_TEXT)),
        ({"schema": True}, Pattern("schema", "true")),
        ({"regex": "[a-z]+"}, Pattern("regex", "[a-z]+")),
        ({"choice": ["yes", "no", "yes"]}, Pattern("choice", '["yes","no"]')),
        ({"grammar": "start: x"}, Pattern("grammar", "start: x")),
        ({"guided_json": SCHEMA}, Pattern("schema", SCHEMA_TEXT)),
        ({"guided_regex": "a"}, Pattern("regex", "a")),
        ({"guided_choice": ["ü"]}, Pattern("choice", '["ü"]')),
        ({"guided_grammar": "g"}, Pattern("grammar", "g")),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, Pattern("regex", "a")),
        ({"structured_outputs": {"json": SCHEMA}}, Pattern("schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": None}}, Pattern("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, Pattern("choice", '["a"]')),
        ({"structured_outputs": {"grammar": "g"}}, Pattern("grammar", "g")),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "regex": "a"}, Pattern("regex", "a")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Pattern("schema", SCHEMA_TEXT)),
        (
            {"response_format": {"type": "json_object"}},
            Pattern.of_schema(FREE_OBJECT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}},
            Pattern("schema", SCHEMA_TEXT),
        ),
        ({}, None),
    ],
)
def test_every_spelling_of_a_constraint(
    tmp_path: Path, fields: dict[str, Any], pattern: Pattern | None
) -> None:
    plain = read_one(tmp_path, {"prompt": "p", **fields})
    assert (plain.error, plain.pattern) == (None, pattern)
    batch = read_one(tmp_path, {"custom_id": "c", "body": {"prompt": "p", **fields}})
    assert (batch.error, batch.pattern, batch.id) == (None, pattern, "c")


def test_the_default_pattern_is_for_rows_without_their_own(tmp_path: Path) -> None:
    default = Pattern("regex", "d")
    rows = read_rows(
        [write_lines(tmp_path / "a.jsonl", {"prompt": "p"}, {"prompt": "p", "choice": ["x"]})],
        ReaderOptions(pattern=default),
    )
    assert [row.pattern for row in rows] == [default, Pattern("choice", '["x"]')]


def test_the_key_order_of_a_schema_makes_another_pattern(tmp_path: Path) -> None:
    one = read_one(tmp_path, {"prompt": "p", "schema": {"properties": {"a": {}, "b": {}}}})
    two = read_one(tmp_path, {"prompt": "p", "schema": {"properties": {"b": {}, "a": {}}}})
    assert one.pattern and two.pattern
    assert one.pattern.fingerprint != two.pattern.fingerprint


def test_an_openai_batch_row(tmp_path: Path) -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        "max_completion_tokens": 5,
        "metadata": {"k": 1},
    }
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    row = read_one(tmp_path, line, keep=("metadata",))
    assert row.error is None
    assert row.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]
    assert (row.key, row.max_tokens, row.extra) == ("id:r1", 5, {"metadata": {"k": 1}})


def test_a_table_gives_the_same_rows_as_json_lines(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "one", "schema": json.dumps(SCHEMA), "max_tokens": 5, "tag": "t"},
        {"id": "b", "prompt": 'two, "quoted"\nline', "schema": None, "max_tokens": None, "tag": None},
    ]
    lines = write_lines(tmp_path / "t.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    cells = ["id,prompt,schema,max_tokens,tag"]
    for row in rows:
        values = ["" if value is None else str(value) for value in row.values()]
        cells.append(",".join('"' + value.replace('"', '""') + '"' for value in values))
    (tmp_path / "t.csv").write_text("\r\n".join(cells))
    options = ReaderOptions(keep=("tag",))

    def told(path: str) -> list[tuple[Any, ...]]:
        return [
            (row.key, row.content, row.prompt, row.pattern, row.extra) for row in read_rows([path], options)
        ]

    assert told(str(tmp_path / "t.parquet")) == told(lines) == told(str(tmp_path / "t.csv"))


def test_parquet_messages_may_be_structs_or_json_text(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    pq.write_table(pa.table({"messages": [messages]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": [json.dumps(messages)]}), tmp_path / "b.parquet")
    rows = list(read_rows([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]))
    assert [row.messages for row in rows] == [messages, messages]


def test_a_schema_struct_of_a_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["p"], "schema": [{"type": "string"}]}), tmp_path / "a.parquet")
    (row,) = read_rows([str(tmp_path / "a.parquet")])
    assert row.error is not None and "must be JSON text" in row.error


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
        {"body": {"schema": SCHEMA}},
        {"body": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}},
        {"body": {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}},
    ],
)
def test_cells_may_hold_every_constraint_as_json_text(tmp_path: Path, fields: dict[str, Any]) -> None:
    row = read_one(tmp_path, {"prompt": "p", **fields})
    assert row.error is None and row.pattern is not None
    cells = {"prompt": "p", **{name: json.dumps(value) for name, value in fields.items()}}
    pq.write_table(pa.Table.from_pylist([cells]), tmp_path / "t.parquet")
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([cells.keys(), cells.values()])
    for name in ("t.parquet", "t.csv"):
        (read,) = read_rows([str(tmp_path / name)])
        assert (read.error, read.pattern) == (None, row.pattern)


@pytest.mark.parametrize("name", ["response_format", "tools", "body"])
def test_structs_of_a_table_are_refused(tmp_path: Path, name: str) -> None:
    value: Any = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    value = {"tools": [value], "body": {"response_format": value}}.get(name, value)
    pq.write_table(pa.table({"prompt": ["p"], name: [value]}), tmp_path / "a.parquet")
    (row,) = read_rows([str(tmp_path / "a.parquet")])
    assert row.error is not None and "must be JSON text" in row.error


def test_named_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('key,question,shape\n1,why,"{}"\n')
    options = ReaderOptions(prompt_column="question", id_column="key", schema_column="shape")
    (row,) = read_rows([str(tmp_path / "t.csv")], options)
    assert (row.prompt, row.id, row.pattern) == ("why", "1", Pattern("schema", "{}"))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_table_without_prompt_column_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "t.csv":
        path.write_text("question,answer\na,b\n")
    else:
        pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), path)
    with pytest.raises(UsageError, match=r"no column prompt .*question, answer.*--prompt-column"):
        check_inputs([str(path)])
    assert check_inputs([str(path)], ReaderOptions(prompt_column="question")) == [str(path)]


def test_packed_files_are_known_by_their_bytes_not_their_names(tmp_path: Path) -> None:
    data = b'{"prompt": "p"}\n'
    (tmp_path / "a").write_bytes(gzip.compress(data) + gzip.compress(data))
    (tmp_path / "b.jsonl").write_bytes(zstandard.compress(data) + zstandard.compress(data))
    assert len(list(read_rows([str(tmp_path / "a"), str(tmp_path / "b.jsonl")]))) == 4


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(gzip.compress(b'{"prompt": "p"}\n[]\n'))

    monkeypatch.setattr("sys.stdin", Stdin())
    rows = list(read_rows(["-"]))
    assert [row.place for row in rows] == ["stdin:1", "stdin:2"]
    assert rows[1].error is not None and rows[1].error.startswith("stdin:2:1: ")


def test_files_globs_and_directories_keep_their_order(tmp_path: Path) -> None:
    for name in (
        "d/b.jsonl",
        "d/a.jsonl.gz",
        "d/sub/c.ndjson",
        "d/.hidden.jsonl",
        "d/notes.txt",
        "x1.jsonl",
        "x2.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = check_inputs([str(tmp_path / "x*.jsonl"), str(tmp_path / "d"), str(tmp_path / "x1.jsonl")])
    names = [str(Path(name).relative_to(tmp_path)) for name in found]
    assert names == ["x1.jsonl", "x2.jsonl", "d/a.jsonl.gz", "d/b.jsonl", "d/sub/c.ndjson", "x1.jsonl"]


def test_the_output_is_not_its_own_input(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", {"prompt": "p"})
    (tmp_path / "out.jsonl").write_text("")
    (tmp_path / "out.jsonl.parts").mkdir()
    (tmp_path / "out.jsonl.parts" / "part-000001.parquet").write_text("")
    exclude = (str(tmp_path / "out.jsonl"), str(tmp_path / "out.jsonl.parts"))
    assert check_inputs([str(tmp_path)], ReaderOptions(exclude=exclude)) == [str(tmp_path / "in.jsonl")]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "no input"),
        (["missing.jsonl"], "missing.jsonl: no such file"),
        (["missing*.jsonl"], "glob matches no file"),
        (["."], "directory has no row files"),
        (["-", "-"], "named twice"),
    ],
)
def test_an_input_that_gives_nothing_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        check_inputs(inputs)


def test_rows_without_id_are_known_by_content_and_count(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a"}
    )
    keys = [row.key for row in read_rows([path])]
    assert len(set(keys)) == 4
    assert [key.rsplit(":", 1)[1] for key in keys] == ["0", "0", "1", "2"]
    edited = write_lines(
        tmp_path / "b.jsonl", {"prompt": "new"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}
    )
    assert [row.key for row in read_rows([edited])][1:] == [keys[0], keys[1], keys[2]]


def test_later_rows_with_the_same_id_are_invalid_and_name_both_places(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"})
    first, second = read_rows([path])
    assert first.error is None
    assert second.error == f"{path}:2: the id 'x' was used before, at {path}:1"
    assert second.id == "x"
    kept = list(read_rows([path], ReaderOptions(duplicate_ids="keep")))
    assert [row.error for row in kept] == [None, None]
    assert [row.key for row in kept] == ["id:x", "id#2:x"]
    assert kept[1].content != second.content


def test_a_row_may_choose_its_backend(tmp_path: Path) -> None:
    assert read_one(tmp_path, {"prompt": "p"}).backend is None
    assert read_one(tmp_path, {"prompt": "p", "backend": None}).backend is None
    for name in ("auto", "fsm", "llguidance", "xgrammar", "outlines"):
        assert read_one(tmp_path, {"prompt": "p", "backend": name}).backend == name
    batch = {
        "custom_id": "a",
        "body": {"messages": [{"role": "user", "content": "p"}], "backend": "xgrammar"},
    }
    assert read_one(tmp_path, batch).backend == "xgrammar"


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"structured_outputs": {"regex": "a", "backend": "guidance"}}, "llguidance"),
        ({"structured_outputs": '{"regex": "a", "backend": "outlines"}'}, "outlines"),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, "xgrammar"),
        ({"structured_outputs": {"backend": "fsm"}, "backend": "fsm"}, "fsm"),
        ({"structured_outputs": {"regex": "a", "disable_fallback": True}}, "fsm"),
        ({"structured_outputs": {"backend": "xgrammar", "disable_fallback": True}}, "xgrammar"),
        ({"structured_outputs": {"disable_fallback": False, "disable_any_whitespace": True}}, None),
        ({"structured_outputs": {"disable_additional_properties": True}}, None),
    ],
)
def test_vllms_options_are_honoured(tmp_path: Path, fields: dict[str, Any], backend: str | None) -> None:
    row = read_one(tmp_path, {"prompt": "p", **fields})
    assert (row.error, row.backend) == (None, backend)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"structured_outputs": {"backend": "lm-format-enforcer"}}, "structured_outputs.backend must be one"),
        ({"guided_decoding_backend": "xgrammar:no-fallback"}, "guided_decoding_backend must be one of"),
        (
            {"structured_outputs": {"backend": "xgrammar"}, "backend": "fsm"},
            "backend and structured_outputs.b",
        ),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern cannot"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern cannot be had"),
        ({"structured_outputs": {"disable_fallback": 1}}, "structured_outputs.disable_fallback must be true"),
        ({"structured_outputs": {"jason": {}}}, "unknown constraint structured_outputs.jason"),
        ({"response_format": {"type": "json_object", "shema": {}}}, "unknown key response_format.shema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}}},
            "unknown key response_format.json_schema.mode",
        ),
    ],
)
def test_options_that_nobody_can_fulfil_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    row = read_one(tmp_path, {"prompt": "p", **fields})
    assert row.error is not None and reason in row.error and "one.jsonl:1:17: " in row.error


def test_closing_objects_cannot_be_had_where_the_run_opens_them(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    fields = {"prompt": "p", "structured_outputs": {"json": {}, "disable_additional_properties": True}}
    path.write_text(json.dumps(fields))
    (row,) = read_rows([str(path)], ReaderOptions(open_objects=True))
    assert row.error is not None and "disable_additional_properties cannot be had with --objects" in row.error


@pytest.mark.parametrize("value", ["XGrammar", "", "guidance", 1, True, ["fsm"], {"name": "fsm"}])
def test_a_backend_that_is_not_known_makes_the_row_invalid(tmp_path: Path, value: Any) -> None:
    row = read_one(tmp_path, {"prompt": "p", "backend": value})
    assert row.error is not None
    assert "one.jsonl:1:17: backend must be one of auto, fsm, llguidance, xgrammar, outlines" in row.error


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "q"},
        {"max_tokens": 4},
        {"temperature": 0.1},
        {"seed": 1},
        {"backend": "fsm"},
        {"schema": {}},
        {"regex": "a"},
        {"tag": 1},
    ],
)
def test_any_change_of_a_row_changes_its_content(tmp_path: Path, change: dict[str, Any]) -> None:
    before = read_one(tmp_path, {"id": "x", "prompt": "p"}, keep=("tag",))
    after = read_one(tmp_path, {"id": "x", "prompt": "p", **change}, keep=("tag",))
    assert before.key == after.key
    assert before.content != after.content


def test_reading_does_not_hold_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    with open(path, "w") as file:
        for number in range(5000):
            file.write(json.dumps({"id": number, "prompt": "word " * 400}) + "\n")
    tracemalloc.start()
    count = sum(1 for _ in read_rows([str(path)]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 5000
    assert peak < 2_000_000, peak  # the file has 10 MB


@given(st.lists(st.text(min_size=1), max_size=6), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_any_prompt_comes_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], ascii_only: bool, end: str
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=ascii_only) for prompt in prompts]
    path.write_bytes(end.join(lines).encode())
    assert [row.prompt for row in read_rows([str(path)])] == prompts


def test_lines_of_50_megabytes_are_rows_like_others(tmp_path: Path) -> None:
    long = "x" * 50_000_000
    lines = [
        f'{{"prompt": "{long}"}}',
        f'{{"prompt": "{long}',
        f'{{"prompt": "p", "note": "{long}", "note": 1}}',
        '{"prompt": "p"}',
    ]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    rows = list(read_rows([str(tmp_path / "long.jsonl")]))
    assert [len(row.prompt or "") for row in rows] == [50_000_000, 0, 0, 1]
    assert "long.jsonl:2:12: not JSON: unterminated string" in (rows[1].error or "")
    assert f"long.jsonl:3:{50_000_029}: the key 'note' appears twice" in (rows[2].error or "")
