"""The finished table in its formats: Parquet, JSON Lines, and OpenAI batch results. Written as a stream.

Writers take rows as parts have them (result.PART_SCHEMA); `read_table` gives them back, so that a
finished table can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from jfbatch.errors import UsageError
from jfbatch.rows.columns import Columns, parse_output
from jfbatch.rows.json_text import dump
from jfbatch.rows.output_path import followed
from jfbatch.rows.result import COUNTERS, PART_SCHEMA, value_json

TableFormat = Literal["parquet", "jsonl", "openai"]

_SLICE_ROWS = 4096
_PLAIN = ("id", "row", "status", "text", "error", *COUNTERS, "backend")
_FURTHER = ("reasoning", "tool_calls")  # in tables of models that think, and of rows with tools
_SUFFIXES: dict[str, TableFormat] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True)
class TableSettings:
    """What a writer needs besides the rows. `provenance` goes into Parquet's metadata; `created` is in
    seconds since 1970; `model` names the model in OpenAI batch results."""

    columns: Columns
    provenance: Mapping[str, str]
    model: str
    created: int


class TableWriter(Protocol):
    """Writes rows of result.PART_SCHEMA, in the order in which they come."""

    def write(self, part: pa.Table) -> None: ...

    def close(self) -> None: ...


def table_format(output: Path, given: str | None) -> TableFormat:
    """The format asked for, or by the output's suffix. Raises UsageError on one that is not known."""
    names = get_args(TableFormat)
    if given is not None:
        if given not in names:
            raise UsageError(f"unknown output format {given!r}: choose one of {', '.join(names)}")
        return next(name for name in names if name == given)
    form = _SUFFIXES.get(output.suffix.lower())
    if form is None:
        known = ", ".join(_SUFFIXES)
        raise UsageError(f"{output}: the suffix says no known format: use {known} or --output-format")
    return form


def format_by_name(output: Path, setting: str) -> TableFormat | None:
    """The format to give to `table_format` along with the file that `output`, a link, leads to.

    None where that file's own suffix says it, or nothing does. `setting` is --output-format.
    """
    if setting != "auto":
        return table_format(output, setting)
    own = _SUFFIXES.get(followed(output).suffix.lower())
    return None if own is not None else _SUFFIXES.get(output.suffix.lower())


def open_writer(form: TableFormat, file: BinaryIO, settings: TableSettings) -> TableWriter:
    """A writer of the format into an open file, which stays the caller's."""
    if form == "parquet":
        return _ParquetWriter(file, settings)
    return _LineWriter(file, _json_line if form == "jsonl" else _openai_line, settings)


class _ParquetWriter:
    def __init__(self, file: BinaryIO, settings: TableSettings) -> None:
        self._columns = settings.columns
        metadata = {"jfbatch": json.dumps(dict(settings.provenance), ensure_ascii=True)}
        schema = self._columns.arrow_schema.with_metadata(metadata)
        self._writer = pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True)
        self._schema = schema

    def write(self, part: pa.Table) -> None:
        # Slices keep the Python values of the conversion few at a time.
        slices = [
            self._columns.finished(part.slice(start, _SLICE_ROWS))
            for start in range(0, len(part), _SLICE_ROWS)
        ]
        table = pa.concat_tables(slices).replace_schema_metadata(self._schema.metadata)
        self._writer.write_table(table, row_group_size=max(len(table), 1))

    def close(self) -> None:
        self._writer.close()


class _LineWriter:
    def __init__(
        self,
        file: BinaryIO,
        line: Callable[[dict[str, Any], TableSettings], str],
        settings: TableSettings,
    ) -> None:
        self._file = file
        self._line = line
        self._settings = settings

    def write(self, part: pa.Table) -> None:
        for start in range(0, len(part), _SLICE_ROWS):
            rows = part.slice(start, _SLICE_ROWS).to_pylist()
            self._file.write("".join(self._line(row, self._settings) + "\n" for row in rows).encode())

    def close(self) -> None:
        return None


def _json_line(row: dict[str, Any], settings: TableSettings) -> str:
    """One object with the table's columns. A value keeps its exact text, joined to one line."""
    columns = settings.columns
    value = value_json(row["status"], row["text"], row["_is_json"])
    members = {name: dump(row[name]) for name in _PLAIN[:4]}
    further = {name: row[name] for name in columns.further}
    if further.get("tool_calls") is not None:
        further["tool_calls"] = json.loads(further["tool_calls"])
    members.update({name: dump(value) for name, value in further.items()})
    if columns.lifted:
        parsed = _properties(value) if value is not None else {}
        members.update({column: dump(parsed.get(name)) for name, column, _ in columns.lifted})
    else:
        # Line ends inside a JSON text stand only between its tokens.
        members["value"] = "null" if value is None else value.replace("\r", "").replace("\n", " ")
    members.update({name: dump(row[name]) for name in _PLAIN[4:]})
    extra = json.loads(row["_extra"]) if row["_extra"] else {}
    for name, column in zip(columns.keep, columns.kept_columns, strict=True):
        members[column] = dump(extra.get(name))
    return "{" + ", ".join(f"{dump(name)}: {text}" for name, text in members.items()) + "}"


def _properties(text: str) -> dict[str, Any]:
    """The properties of an object's text; none where Python cannot hold it: the text column has it."""
    try:
        parsed = parse_output(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _openai_line(row: dict[str, Any], settings: TableSettings) -> str:
    """One line of an OpenAI batch output file; our own fields are under "jfbatch"."""
    name = f"jfbatch-{row['row']}"
    response = None
    error = None
    if value_json(row["status"], row["text"], row["_is_json"]) is None:
        error = {"code": row["status"], "message": row["error"] or row["status"]}
    else:
        finish = "stop" if row["status"] == "ok" else "length"
        message: dict[str, Any] = {"role": "assistant", "content": row["text"]}
        if row["reasoning"] is not None:
            message["reasoning_content"] = row["reasoning"]
        if row["tool_calls"] is not None and (calls := json.loads(row["tool_calls"])):
            message["content"] = row["text"] or None
            message["tool_calls"] = [
                {"id": f"{name}-call-{number}", "type": "function", "function": call}
                for number, call in enumerate(calls)
            ]
            finish = "tool_calls" if row["status"] == "ok" else finish
        prompt, completion = row["prompt_tokens"] or 0, row["completion_tokens"] or 0
        body = {
            "id": name,
            "object": "chat.completion",
            "created": settings.created,
            "model": settings.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
        response = {"status_code": 200, "request_id": name, "body": body}
    ours = {field: row[field] for field in _PLAIN if field not in ("id", "text")}
    ours.update({name: row[name] for name in settings.columns.further})
    if row["_extra"]:
        ours["extra"] = json.loads(row["_extra"])
    if response is None and row["text"] is not None:
        ours["text"] = row["text"]
    line = {"id": name, "custom_id": row["id"], "line": row["_line"], "response": response, "error": error}
    return dump({**line, "jfbatch": ours})


def read_table(
    path: Path, form: TableFormat, kept: Mapping[str, str], further: Sequence[str] = ()
) -> Iterator[pa.Table]:
    """The rows of a finished table, a few thousand at a time, with the columns of PART_SCHEMA that it has.

    `kept` gives the column of each kept field, `further` are Columns.further. Raises OSError, ValueError or
    pa.ArrowException on damage.
    """
    if form == "parquet":
        with open(path, "rb") as stream, pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(_SLICE_ROWS, columns=[*_PLAIN, *further, *kept.values()]):
                yield _as_part(batch.to_pylist(), kept, further)
        return
    with open(path, "rb") as lines:
        while chunk := [json.loads(line) for line in islice(lines, _SLICE_ROWS)]:
            rows = chunk if form == "jsonl" else [_from_openai(line, kept) for line in chunk]
            yield _as_part(rows, kept, further)


def _from_openai(line: dict[str, Any], kept: Mapping[str, str]) -> dict[str, Any]:
    ours = line["jfbatch"]
    text = ours.get("text")
    if line["response"] is not None:
        text = line["response"]["body"]["choices"][0]["message"]["content"] or ""
    extra = {kept[name]: value for name, value in (ours.get("extra") or {}).items() if name in kept}
    return {**ours, "id": line["custom_id"], "text": text, **extra}


def _as_part(rows: list[dict[str, Any]], kept: Mapping[str, str], further: Sequence[str]) -> pa.Table:
    arrays = [pa.array([row[name] for row in rows], PART_SCHEMA.field(name).type) for name in _PLAIN]
    for name in _FURTHER:
        values = [row[name] if name in further else None for row in rows]
        texts = [dump(value) if isinstance(value, list) else value for value in values]
        arrays.append(pa.array(texts, pa.string()))
    extras = []
    for row in rows:
        extra = {name: row[column] for name, column in kept.items() if row.get(column) is not None}
        extras.append(dump(extra) if extra else None)
    return pa.Table.from_arrays(
        [*arrays, pa.array(extras, pa.string())], names=[*_PLAIN, *_FURTHER, "_extra"]
    )
