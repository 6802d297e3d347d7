"""The many spellings of "the output must obey this", read from one row's fields into a Pattern.

Every spelling found is collected first; more than one, or one that is not known, is the row's fault.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jfbatch.rows.json_text import is_utf8, parse
from jfbatch.rows.row import BACKENDS, Pattern, PatternKind, RowProblem
from jfbatch.rows.tags import read_structural_tag
from jfbatch.rows.tools import FIELDS as TOOL_FIELDS
from jfbatch.rows.tools import read_tools

_VALUE = {"$ref": "#/$defs/value"}
FREE_OBJECT: dict[str, Any] = {
    "type": "object",
    "additionalProperties": _VALUE,
    "$defs": {
        "value": {
            "type": ["object", "array", "string", "number", "boolean", "null"],
            "additionalProperties": _VALUE,
            "items": _VALUE,
        }
    },
}
"""What response_format json_object asks for: any JSON object. It says so at every depth, because objects
have no undeclared keys (--objects closed) unless a schema describes them."""

_PLAIN: dict[str, PatternKind] = {
    "schema": "schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED: dict[str, PatternKind] = {
    "json": "schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "tags",
}
# These steer how an engine enforces a constraint; they are not constraints (`read_backend`).
_GUIDED_OPTIONS = {"guided_decoding_backend", "guided_whitespace_pattern"}
_STRUCTURED_OPTIONS = {
    "backend",
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
}
_VLLM_NAMES = {"guidance": "llguidance"}  # of backends that are called otherwise here
_RESPONSE_FORMAT_KEYS = {"type", "json_schema", "schema"}
_JSON_SCHEMA_KEYS = {"name", "description", "schema", "strict"}

FIELDS = frozenset(
    {
        *_PLAIN,
        *TOOL_FIELDS,
        *_GUIDED_OPTIONS,
        "guided_json_object",
        "response_format",
        "structured_outputs",
    }
)
"""The row fields that this module reads (any other guided_* field is refused as unknown)."""


def read_pattern(fields: Mapping[str, Any], cells: Collection[str] = ()) -> Pattern | None:
    """The row's own pattern, or None. Raises RowProblem naming the field or both fields at fault.

    A schema may be given as a value or as JSON text; the fields in `cells`, which a table holds, only as
    text, because a table's struct column adds nulls for the keys that other rows have.
    """
    found = list(_constraints(fields, cells))
    if fields.get("tools") is None:
        _tools(fields, cells)  # a tool_choice without tools may be wrong
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise RowProblem(f"more than one constraint: {names}; keep one of them", field=_top(found[1][0]))
    name, kind, value = found[0]
    top = _top(name)
    is_struct = top in cells and not isinstance(fields.get(top), str)
    pattern = _pattern(name, kind, value, is_struct)
    if not is_utf8(pattern.text):
        raise RowProblem(f"{name} contains a lone surrogate", field=top)
    return pattern


def read_backend(fields: Mapping[str, Any], closed_objects: bool = True) -> str | None:
    """The backend that a row asks for, or None: its `backend`, or vLLM's options, which have a say in it.

    Raises RowProblem on a backend or an option that is not known, or that nobody here could fulfil.
    """
    outputs = fields.get("structured_outputs")
    if isinstance(outputs, str):
        outputs = parse_field("structured_outputs", outputs)
    options = outputs if isinstance(outputs, dict) else {}
    asked = {
        "backend": fields.get("backend"),
        "guided_decoding_backend": fields.get("guided_decoding_backend"),
        "structured_outputs.backend": options.get("backend"),
    }
    named = {name: _backend(name, value) for name, value in asked.items() if value is not None}
    if len(set(named.values())) > 1:
        raise RowProblem(f"{' and '.join(named)} differ; keep one of them", field=_top([*named][-1]))
    for name in ("structured_outputs.whitespace_pattern", "guided_whitespace_pattern"):
        top, _, inner = name.partition(".")
        if (options.get(inner) if inner else fields.get(top)) is not None:
            raise RowProblem(f"{name} cannot be had: JSON is laid out as --json-style says", field=top)
    switches = {name: _switch(name, options.get(name)) for name in _STRUCTURED_OPTIONS if "disable" in name}
    if switches["disable_additional_properties"] and not closed_objects:
        raise RowProblem(
            "structured_outputs.disable_additional_properties cannot be had with --objects open",
            field="structured_outputs",
        )
    backend = next(iter(named.values()), None)
    return "fsm" if switches["disable_fallback"] and backend in (None, "auto") else backend


def _backend(name: str, value: Any) -> str:
    if name != "backend" and isinstance(value, str):
        value = _VLLM_NAMES.get(value, value)
    if isinstance(value, str) and value in BACKENDS:
        return value
    shown = repr(value) if isinstance(value, str) else "that"
    raise RowProblem(f"{name} must be one of {', '.join(BACKENDS)}, not {shown[:40]}", field=_top(name))


def _switch(name: str, value: Any) -> bool:
    """One of vLLM's options that are true or false. There is never free white space here."""
    if value is not None and not isinstance(value, bool):
        raise RowProblem(f"structured_outputs.{name} must be true or false", field="structured_outputs")
    return bool(value)


def _top(name: str) -> str:
    return name.split(".", 1)[0]


def _constraints(fields: Mapping[str, Any], cells: Collection[str]) -> Iterator[tuple[str, PatternKind, Any]]:
    """(name as written, kind, value) of every constraint that is present and not null."""
    for name, value in fields.items():
        if value is None:
            continue
        kind = _PLAIN.get(name)
        if kind is not None:
            yield name, kind, value
        elif name == "tools":
            if (tools := _tools(fields, cells)) is not None:
                yield name, "tools", tools
        elif name == "response_format":
            yield from _response_format(value)
        elif name == "structured_outputs":
            yield from _structured_outputs(value)
        elif name == "guided_json_object":
            if value is True:
                yield name, "schema", FREE_OBJECT
            elif value is not False:
                raise RowProblem("guided_json_object must be true or false", field=name)
        elif name.startswith("guided_") and name not in _GUIDED_OPTIONS:
            raise RowProblem(f"unknown constraint {name}", field=name)


def _tools(fields: Mapping[str, Any], cells: Collection[str]) -> Pattern | None:
    """The tools of a row, JSON texts read; None where none may be called."""
    parsed = {}
    for name in ("tools", "tool_choice"):
        value = fields.get(name)
        if isinstance(value, str) and value[:1] in ("[", "{", '"'):
            value = parse_field(name, value)
        elif name in cells and isinstance(value, list | dict):
            raise RowProblem(f"{name} from a table must be JSON text", field=name)
        parsed[name] = value
    return read_tools(fields, parsed)


def _response_format(value: Any) -> Iterator[tuple[str, PatternKind, Any]]:
    field = "response_format"
    if isinstance(value, str):
        value = parse_field(field, value)
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise RowProblem('response_format must be an object with a "type"', field=field)
    form = value["type"]
    if form == "structural_tag":  # its keys are read with the tags
        yield "response_format.structural_tag", "tags", value
        return
    _refuse_unknown(field, value, _RESPONSE_FORMAT_KEYS)
    if form == "text":
        return
    if form == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or inner.get("schema") is None:
            raise RowProblem("response_format json_schema has no json_schema.schema", field=field)
        _refuse_unknown(f"{field}.json_schema", inner, _JSON_SCHEMA_KEYS)
        yield "response_format.json_schema", "schema", inner["schema"]
    elif form == "json_object":
        schema = value.get("schema")
        yield "response_format.json_object", "schema", FREE_OBJECT if schema is None else schema
    else:
        raise RowProblem(f"unknown constraint response_format.{form}", field=field)


def _refuse_unknown(name: str, value: Mapping[str, Any], known: set[str]) -> None:
    for key, inner in value.items():
        if key not in known and inner is not None:
            raise RowProblem(f"unknown key {name}.{key}", field=_top(name))


def _structured_outputs(value: Any) -> Iterator[tuple[str, PatternKind, Any]]:
    field = "structured_outputs"
    if isinstance(value, str):
        value = parse_field(field, value)
    if not isinstance(value, dict):
        raise RowProblem("structured_outputs must be an object", field=field)
    for name, inner in value.items():
        if inner is None or name in _STRUCTURED_OPTIONS:
            continue
        kind = _STRUCTURED.get(name)
        if kind is not None:
            yield f"structured_outputs.{name}", kind, inner
        elif name == "json_object" and isinstance(inner, bool):
            if inner:
                yield "structured_outputs.json_object", "schema", FREE_OBJECT
        else:
            raise RowProblem(f"unknown constraint structured_outputs.{name}", field=field)


def _pattern(name: str, kind: PatternKind, value: Any, is_struct: bool) -> Pattern:
    field = _top(name)
    if isinstance(value, Pattern):
        return value
    if kind == "tags":
        try:
            return read_structural_tag(name, parse_field(name, value) if isinstance(value, str) else value)
        except RowProblem as problem:
            raise RowProblem(problem.reason, field, problem.column) from None
    if kind == "schema":
        if isinstance(value, str):
            value = parse_field(name, value)
        elif is_struct and value is not FREE_OBJECT:
            raise RowProblem(f"{name} from a table must be JSON text", field=field)
        if not isinstance(value, dict | bool):
            raise RowProblem(f"{name} must be a JSON Schema: an object, true or false", field=field)
        return Pattern.of_schema(value)
    if kind == "choice":
        if isinstance(value, str):
            value = parse_field(name, value)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise RowProblem(f"{name} must be a list of at least one text", field=field)
        return Pattern.of_choices(list(dict.fromkeys(value)))
    if not isinstance(value, str):
        raise RowProblem(f"{name} must be text", field=field)
    return Pattern(kind, value)


def parse_field(name: str, text: str) -> Any:
    """The value of a field that holds JSON as text. Raises RowProblem naming the field."""
    try:
        return parse(text)
    except RowProblem as problem:
        reason = f"{name} (column {problem.column} of its text): {problem.reason}"
        raise RowProblem(reason, field=_top(name)) from None
