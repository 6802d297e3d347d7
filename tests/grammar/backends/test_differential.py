"""What one backend writes the others accept, but for the disagreements that are known and judged."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from importlib.metadata import version
from typing import Any

import jsonschema_rs
import pytest

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.backends import BACKENDS, BackendName, CompiledGrammar, is_installed, why_missing
from jfbatch.grammar.backends.disagreements import DISAGREEMENTS, Disagreement
from tests.grammar.backends.engines import ALL, INSTALLED, compiled, param, random_tokens, takes, text_of

TREE = {
    "type": "object",
    "properties": {
        "leaf": {"type": "boolean"},
        "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["leaf"],
    "additionalProperties": False,
}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "kind": {"enum": ["open", "closed", None, 3]},
        "count": {"type": "integer"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "other": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
# Patterns that every backend reads alike, apart from the spellings below; of each kind that it takes.
SHARED: list[tuple[str, Any]] = [
    ("regex", "[a-z]{2,5}-[0-9]+"),
    ("regex", "(ab|abc)(c|d)?x"),
    ("regex", "a{0,3}b*"),
    ("regex", "(yes|no|maybe) ?[!.]?"),
    ("regex", "[à-ü]{2}"),
    ("regex", r"([0-9]{1,3}\.){3}[0-9]{1,3}"),
    ("choice", ["red", "green", "blue"]),
    ("choice", ["é", 'a"b', "x\ny", " ", "/"]),
    ("schema", {"type": "boolean"}),
    ("schema", {"enum": ["a", 1, None, True, {"x": [1, 2]}]}),
    ("schema", {"const": {"a": [1, "b"]}}),
    ("schema", {"type": "array", "items": {"type": "integer"}}),
    ("schema", {"type": "string", "minLength": 2, "maxLength": 4}),
    ("schema", {"type": "string", "pattern": "^[a-z]{2,4}$"}),
    ("schema", {"type": ["string", "null"], "maxLength": 2}),
    ("schema", {"oneOf": [{"type": "integer"}, {"type": "null"}]}),
    (
        "schema",
        {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"type": "null"}],
            "minItems": 2,
            "items": False,
        },
    ),
    ("schema", RECORD),
    ("schema", {**TREE, "$defs": {"tree": TREE}}),
    ("grammar", 'root ::= "a" root "b" | "c"\n'),
    ("grammar", 'root ::= item (" " item)*\nitem ::= [0-9]+ | "(" root ")"\n'),
    ("grammar", 'start: WORD ("," WORD)*\nWORD: /[a-z]+/\n'),
]
SEEDS = range(12)

# Spellings on which they differ although all texts are right (see the known disagreements).
_SPELLINGS = re.compile(rb"-0(?![0-9.])")
# A recursive schema is three levels deep for outlines-core, whatever the text.
_THREE_LEVELS = b"[{" * 3


@cache
def grammar_of(name: BackendName, number: int) -> CompiledGrammar | None:
    try:
        return compiled(name, *SHARED[number])
    except InvalidGrammar:
        return None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("number", range(len(SHARED)))
def test_what_a_backend_writes_the_others_accept(name: BackendName, number: int) -> None:
    kind, pattern = SHARED[number]
    if kind not in BACKENDS[name].kinds:
        return
    grammar = grammar_of(name, number)
    assert grammar is not None, "the shared patterns are those that all of them take"
    for seed in SEEDS:
        text = text_of(random_tokens(grammar, random.Random(seed), plain=True))
        if _SPELLINGS.search(text):
            continue
        if kind == "schema":
            assert jsonschema_rs.validator_for(pattern).is_valid(json.loads(text)), text
        for other in INSTALLED:
            if kind not in BACKENDS[other].kinds or (other == "outlines" and _THREE_LEVELS in text):
                continue
            reader = grammar_of(other, number)
            assert reader is not None and takes(reader, text), (name, other, text)


def known(name: BackendName) -> list[Disagreement]:
    return [entry for entry in DISAGREEMENTS if name in entry.accepted + entry.refused]


@pytest.mark.parametrize(
    "entry", DISAGREEMENTS, ids=lambda entry: f"{entry.kind} {entry.pattern} {entry.text!r}"
)
def test_a_known_disagreement_is_as_it_is_told(entry: Disagreement) -> None:
    assert not set(entry.accepted) & set(entry.refused)
    asked = 0
    for name in BACKENDS:
        if not is_installed(name) or not is_tested_version(name):
            continue
        asked += 1
        try:
            verdict: bool | None = takes(compiled(name, entry.kind, entry.pattern), entry.text)
        except InvalidGrammar:
            verdict = None
        expected = True if name in entry.accepted else False if name in entry.refused else None
        assert verdict is expected, name
    assert asked
    if "fsm" in entry.accepted + entry.refused:  # ours may choose a spelling, but is never wrong
        assert entry.right == "either" or (entry.right == "accept") == ("fsm" in entry.accepted)


@pytest.mark.parametrize(
    "entry", [entry for entry in DISAGREEMENTS if entry.kind == "schema"], ids=lambda entry: repr(entry.text)
)
def test_the_validator_judges_as_the_disagreements_say(entry: Disagreement) -> None:
    validator = jsonschema_rs.validator_for(json.loads(entry.pattern), validate_formats=True)
    try:
        valid = validator.is_valid(json.loads(entry.text))
    except ValueError:  # no JSON, or no text at all
        valid = False
    assert valid == (entry.right != "refuse")


def is_tested_version(name: BackendName) -> bool:
    """Whether what was found out about a backend was found out about the version that is installed."""
    packages = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines-core"}
    return name == "fsm" or version(packages[name]) == BACKENDS[name].tested_version


@pytest.mark.parametrize("name", [param(name) for name in BACKENDS if name != "fsm"])
def test_the_installed_version_is_the_one_that_was_looked_at(name: BackendName) -> None:
    if not is_tested_version(name):
        pytest.skip(f"{name}: the known disagreements are those of version {BACKENDS[name].tested_version}")
    assert known(name)


def test_a_backend_that_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jfbatch.grammar.backends.find_spec", lambda name: None)
    assert why_missing("fsm") is None
    for name in ("llguidance", "xgrammar", "outlines"):
        reason = why_missing(name)
        assert reason is not None and f"pip install 'jfbatch[{name}]'" in reason and "\n" not in reason
