"""Inputs distilled from public bug reports of other engines: each has its right value here.

They are read from the directory that JFBATCH_TEST_DATA names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.grammar.json_schema.schema_language import SchemaLanguage

DATA = os.environ.get("JFBATCH_TEST_DATA")
CASES = sorted((Path(DATA) / "cases").glob("case-*.json")) if DATA else []

pytestmark = pytest.mark.skipif(not CASES, reason="JFBATCH_TEST_DATA names no directory with cases/")


def _with_schema() -> list[Any]:
    loaded = [(path.stem, json.loads(path.read_text("utf-8"))) for path in CASES]
    return [pytest.param(case, id=name) for name, case in loaded if case["kind"] == "schema"]


@pytest.mark.parametrize("case", _with_schema())
def test_reported_case(case: dict[str, Any]) -> None:
    languages = [SchemaLanguage(case["schema"], style, "closed") for style in ("compact", "spaced")]
    checked = any(language.unenforced for language in languages)
    validator = jsonschema_rs.validator_for(case["schema"], validate_formats=True)
    for text in case.get("valid_examples", []):
        assert any(language.takes_text(text) for language in languages), text
    for kind in ("invalid_examples", "spec_invalid_examples", "policy_invalid_examples"):
        for text in case.get(kind, []):
            for language in languages:
                if language.takes_text(text):
                    assert checked and not validator.is_valid(json.loads(text)), text
