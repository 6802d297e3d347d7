"""The shipped samples: enough rows, well formed, with schemas that are schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jfbatch.grammar.backends import BACKENDS
from jfbatch.grammar.backends.protocol import KINDS, is_gbnf
from jfbatch.rows.constraint import read_pattern

SAMPLES = Path(__file__).parent.parent / "data" / "samples"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["emails", "invoices", "reviews"])
def test_rows_have_distinct_ids_and_prompts(name: str) -> None:
    rows = rows_of(f"{name}.jsonl")
    assert len(rows) >= 20
    assert all(set(row) == {"id", "prompt"} for row in rows)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)


@pytest.mark.parametrize("name", ["email", "invoice", "review"])
def test_schemas_are_valid_and_bounded(name: str) -> None:
    schema = json.loads((SAMPLES / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)

    def check(part: Any) -> None:
        if isinstance(part, dict):
            types = part.get("type", [])
            if "string" in types and part.get("format") != "date":
                assert "maxLength" in part
            if "array" in types:
                assert "maxItems" in part
            for inner in part.values():
                check(inner)

    check(schema)


def test_mixed_rows_bring_their_own_patterns() -> None:
    rows = rows_of("mixed.jsonl")
    kinds = [kind for row in rows for kind in ("schema", "regex", "choice") if kind in row]
    assert len(kinds) == len(rows)
    assert set(kinds) == {"schema", "regex", "choice"}
    for row in rows:
        assert ("prompt" in row) != ("messages" in row)
        if "schema" in row:
            jsonschema.Draft202012Validator.check_schema(row["schema"])
        if "regex" in row:
            re.compile(row["regex"])


def test_twelve_rows_use_every_kind_and_every_backend() -> None:
    rows = rows_of("every-kind.jsonl")
    assert len(rows) == 12
    assert {row.get("backend") for row in rows} == {None, *BACKENDS}
    fields = {name for row in rows for name in row}
    assert {
        "schema",
        "regex",
        "choice",
        "grammar",
        "tools",
        "response_format",
        "structured_outputs",
    } <= fields
    assert any(name.startswith("guided_") for name in fields)
    structured = {name for row in rows for name in row.get("structured_outputs", {})}
    assert "structural_tag" in structured
    assert {json.dumps(row.get("tool_choice")) for row in rows if "tools" in row} >= {"null", '"required"'}
    assert {is_gbnf(row["grammar"]) for row in rows if "grammar" in row} == {True, False}
    patterns = [read_pattern(row) for row in rows]
    assert {pattern.kind for pattern in patterns if pattern} == {*KINDS, "tools"}
