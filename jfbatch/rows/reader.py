"""From input files to rows, as a stream: every record becomes one Row, and what is wrong stays with its row.

JSONL (plain, gzip, zstandard, stdin), CSV, Parquet and OpenAI batch files give the same rows. Memory does
not grow with the input but for about 50 bytes of identity per row.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

from jfbatch.errors import InputError
from jfbatch.rows import constraint, sources
from jfbatch.rows.digests import DigestTable
from jfbatch.rows.json_text import column_of_lone_surrogate, is_utf8, parse, printable
from jfbatch.rows.prompt import read_messages
from jfbatch.rows.row import Pattern, Row, RowProblem, digest
from jfbatch.rows.sources import Record
from jfbatch.rows.unheeded import FIELDS as UNHEEDED
from jfbatch.rows.unheeded import unheeded

MAXIMUM_TOKENS = 2**31 - 1
_LINE_BITS = 40
_FIELDS = ("prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "backend")


@dataclass(frozen=True)
class ReaderOptions:
    """How rows are read.

    `keep` names fields to carry to the output. `pattern` is for rows without their own.
    `prompt_column`, `schema_column` and `id_column` name the fields to use in place of prompt, schema and id.
    `duplicate_ids`: "refuse" makes later rows with the same id invalid_input, "keep" runs them too.
    `exclude`: files and directories that a glob or an input directory must not give, such as the output.
    `open_objects`: the run lets undeclared properties through.
    """

    keep: tuple[str, ...] = ()
    pattern: Pattern | None = None
    prompt_column: str | None = None
    schema_column: str | None = None
    id_column: str | None = None
    duplicate_ids: str = "refuse"
    exclude: tuple[str, ...] = field(default=())
    open_objects: bool = False


def check_inputs(inputs: Sequence[str], options: ReaderOptions | None = None) -> list[str]:
    """The files the inputs name. Raises UsageError for one that is missing or has no prompt column."""
    options = options or ReaderOptions()
    files = sources.expand(inputs, options.exclude)
    wanted = [options.prompt_column] if options.prompt_column else ["prompt", "messages", "body"]
    for name in files:
        if name != sources.STDIN:
            sources.check_file(name, wanted, _columns(options))
    return files


def read_rows(inputs: Sequence[str], options: ReaderOptions | None = None) -> Iterator[Row]:
    """The rows of all inputs, in order, streaming.

    A damaged file does not keep the others from being read: its InputError (the first, where there are
    several) is raised after the last row. Raises UsageError where an input does not exist.
    """
    options = options or ReaderOptions()
    files = sources.expand(inputs, options.exclude)
    reader = _RowReader(options, [sources.display_name(name) for name in files])
    damage: list[InputError] = []
    for number, name in enumerate(files):
        try:
            for record in sources.records(name, reader.columns):
                yield reader.row(record, number, sources.is_table(name))
        except InputError as error:
            damage.append(error)
    if len(damage) > 1:
        places = ", ".join(error.place for error in damage[1:])
        raise InputError(damage[0].place, f"{damage[0].reason}; also damaged: {places}")
    if damage:
        raise damage[0]


def rows_of_records(
    records: Iterable[Mapping[str, Any]], options: ReaderOptions, name: str = "row"
) -> Iterator[Row]:
    """Rows from records that are in memory already, as from a table's; `name` is what places call them."""
    reader = _RowReader(options, [name])
    for number, record in enumerate(records):
        yield reader.row(Record(number + 1, dict(record)), 0, tabular=True)


@lru_cache(maxsize=256)
def _shared(kind: Any, text: str) -> Pattern:
    """One object for equal patterns: a million rows with one schema keep one schema."""
    return Pattern(kind, text)


def _columns(options: ReaderOptions) -> list[str]:
    """The columns of a table that have a say in its rows."""
    renamed = (options.prompt_column, options.schema_column, options.id_column)
    fields = [*_FIELDS, "id", "custom_id", "body", *constraint.FIELDS, *UNHEEDED, *options.keep]
    return [*dict.fromkeys([*fields, *(name for name in renamed if name)])]


class _RowReader:
    """Turns records into rows and remembers which identities it has met."""

    def __init__(self, options: ReaderOptions, names: list[str]) -> None:
        self._options = options
        self._names = names
        self._index = 0
        self._ids = DigestTable()
        self._contents = DigestTable()
        self._repeats: dict[bytes, int] = {}
        self.columns = _columns(options)

    def row(self, record: Record, number: int, tabular: bool) -> Row:
        name = self._names[number]
        values: dict[str, Any] = {}
        error = None
        text = ""
        try:
            if isinstance(record.data, RowProblem):
                raise record.data
            if isinstance(record.data, bytes):
                text = _decoded(record.data)
                fields = parse(text)
                if not isinstance(fields, dict):
                    raise RowProblem(f"a row must be a JSON object, not {_json_type(fields)}", column=1)
            else:
                fields = record.data
            self._read(fields, values, tabular)
        except RowProblem as problem:
            error = _message(name, record, text, problem)
            values.update(prompt=None, messages=None, pattern=None, content=None)
        content = values.pop("content", None) or digest(b"\1" + self._raw(record))
        key, twin = self._identify(values.get("id"), content, number, record.line)
        if twin is not None and error is None and self._options.duplicate_ids != "keep":
            error = f"{name}:{record.line}: the id {_shown(values['id'])} was used before, at {twin}"
            content = digest(b"\2" + content)
        row = Row(
            index=self._index,
            place=f"{name}:{record.line}",
            line=record.line,
            key=key,
            content=content,
            error=error,
            **values,
        )
        self._index += 1
        return row

    def _raw(self, record: Record) -> bytes:
        if record.raw or isinstance(record.data, bytes | RowProblem):
            return record.raw
        return json.dumps(record.data, default=str).encode()

    def _identify(
        self, identity: str | None, content: bytes, number: int, line: int
    ) -> tuple[str, str | None]:
        """The row's key, and the place of the first row with its id if there was one."""
        if identity is None:
            return f"hash:{content.hex()}:{self._contents.increment(content)}", None
        name = digest(identity)
        first = self._ids.insert(name, number << _LINE_BITS | line)
        if first is None:
            return f"id:{identity}", None
        # The count stands before the colon, so that no id can look like the repeat of another.
        count = self._repeats.get(name, 1) + 1
        self._repeats[name] = count
        place = f"{self._names[first >> _LINE_BITS]}:{first & ((1 << _LINE_BITS) - 1)}"
        return f"id#{count}:{identity}", place

    def _read(self, fields: dict[str, Any], values: dict[str, Any], tabular: bool) -> None:
        """Fills `values` with the row's fields and content digest. On RowProblem the id may be set."""
        options = self._options
        values["id"] = _identity(fields, options.id_column)
        body = fields.get("body")
        cells = set(fields) if tabular else set()
        if tabular and isinstance(body, str):
            body = constraint.parse_field("body", body)
            cells -= set(body) if isinstance(body, dict) else set()
        elif tabular and isinstance(body, dict):
            cells |= set(body)
        inner: Mapping[str, Any] = fields
        if body is not None:
            if not isinstance(body, dict):
                raise RowProblem(f"body must be an object, not {_json_type(body)}", "body")
            url = fields.get("url")
            if isinstance(url, str) and not url.endswith("/completions"):
                raise RowProblem(f"url {url!r}: only (chat) completions can be had", "url")
            inner = {**fields, **body}
        values["extra"] = {
            name: inner[name] for name in options.keep if name in inner and inner[name] is not None
        }
        prompt_name = options.prompt_column or "prompt"
        prompt, messages = inner.get(prompt_name), inner.get("messages")
        if options.prompt_column:
            messages = None
        values["prompt"], values["messages"] = _prompt(prompt, messages, prompt_name, tabular)
        if options.schema_column:
            inner = {**inner, "schema": inner.get(options.schema_column)}
            if options.schema_column != "schema":
                inner.pop(options.schema_column, None)
                cells = cells - {"schema"} | ({"schema"} if options.schema_column in cells else set())
        own = constraint.read_pattern(inner, cells)
        values["pattern"] = options.pattern if own is None else _shared(own.kind, own.text)
        values["max_tokens"] = _max_tokens(inner)
        values["temperature"] = _temperature(inner.get("temperature"))
        values["seed"] = _whole("seed", inner.get("seed"), -(2**63), 2**63 - 1)
        values["backend"] = constraint.read_backend(inner, not options.open_objects)
        is_request = body is not None or messages is not None
        values["unheeded"] = unheeded(inner, options.keep, is_request, values["temperature"])
        values["content"] = _content(values)


def _content(values: Mapping[str, Any]) -> bytes:
    """The digest of everything that decides the row's result. Raises RowProblem on text that is not UTF-8."""
    pattern = values["pattern"]
    told = [
        values["prompt"],
        values["messages"],
        pattern.fingerprint if pattern else None,
        values["max_tokens"],
        values["temperature"],
        values["seed"],
    ]
    if values["backend"] is not None:
        told.append(values["backend"])
    try:
        deciding = json.dumps(told, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        name = "messages" if values["prompt"] is None else "prompt"
        raise RowProblem(f"{name} contains a lone surrogate", name) from None
    kept = json.dumps(values["extra"], ensure_ascii=True, default=str).encode() if values["extra"] else b""
    return hashlib.blake2b(deciding + b"\0" + kept, digest_size=16).digest()


def _decoded(data: bytes) -> str:
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        column = len(data[: error.start].decode("utf-8", "replace")) + 1
        raise RowProblem(f"not UTF-8: byte 0x{data[error.start]:02x}", column=column) from None


def _message(name: str, record: Record, text: str, problem: RowProblem) -> str:
    """file:line:column: reason. The column is the problem's own, else where the field at fault is named."""
    column = problem.column
    if column is None and text:
        surrogate = column_of_lone_surrogate(text) if "surrogate" in problem.reason else None
        found = text.find(json.dumps(problem.field)) if problem.field else -1
        column = surrogate or max(found, 0) + 1
    place = f"{name}:{record.line}" if column is None else f"{name}:{record.line}:{column}"
    return printable(f"{place}: {problem.reason}")


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number", bytes: "bytes that are no UTF-8"}
    return names.get(type(value), f"a value of type {type(value).__name__}")  # in cells of tables


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:36]}..."


def _identity(fields: Mapping[str, Any], column: str | None) -> str | None:
    for name in (column,) if column else ("id", "custom_id"):
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, date | Decimal | UUID):  # in cells of tables
            value = str(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise RowProblem(f"{name} must be text or a number, not {_json_type(value)}", name)
        identity = value if isinstance(value, str) else repr(value)
        if not is_utf8(identity):
            raise RowProblem(f"{name} contains a lone surrogate", name)
        return identity
    return None


def _prompt(
    prompt: Any, messages: Any, name: str, tabular: bool
) -> tuple[str | None, list[dict[str, str]] | None]:
    if prompt is not None and messages is not None:
        raise RowProblem(f"both {name} and messages; keep one of them", "messages")
    if messages is not None:
        if tabular and isinstance(messages, str):
            messages = constraint.parse_field("messages", messages)
        return None, read_messages(messages)
    if prompt is None:
        raise RowProblem(f"no {name} and no messages" if name == "prompt" else f"no {name}")
    if not isinstance(prompt, str):
        raise RowProblem(f"{name} must be text, not {_json_type(prompt)}", name)
    return prompt, None


def _number(name: str, value: Any) -> int | float | None:
    """The value as a number; a table's text cell is read as one. Raises RowProblem on anything else."""
    if isinstance(value, str):
        try:
            value = parse(value)
        except RowProblem:
            raise RowProblem(f"{name} must be a number, not {_shown(value)}", name) from None
    if value is None:
        return None
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowProblem(f"{name} must be a number, not {_json_type(value)}", name)
    if not math.isfinite(value) if isinstance(value, float) else False:
        raise RowProblem(f"{name} must be a finite number", name)
    return value


def _whole(name: str, value: Any, low: int, high: int) -> int | None:
    number = _number(name, value)
    if number is None:
        return None
    if number != int(number) or not low <= number <= high:
        raise RowProblem(f"{name} must be a whole number from {low} to {high}, not {_shown(number)}", name)
    return int(number)


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    values = [
        _whole(name, fields.get(name), 1, MAXIMUM_TOKENS) for name in ("max_tokens", "max_completion_tokens")
    ]
    given = {value for value in values if value is not None}
    if len(given) > 1:
        raise RowProblem("max_tokens and max_completion_tokens differ; keep one of them", "max_tokens")
    return next(iter(given), None)


def _temperature(value: Any) -> float | None:
    number = _number("temperature", value)
    if number is None:
        return None
    if not 0 <= number <= 1000:
        raise RowProblem(f"temperature must be from 0 to 1000, not {_shown(number)}", "temperature")
    return float(number)
