"""Nothing wrong is let through: random walks through the masks give texts that parse and validate."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar import Grammar, Vocabulary
from tests.grammar.json_schema.walks import random_text

DATA = os.environ.get("JFBATCH_TEST_DATA")
SAMPLES = Path(__file__).parents[3] / "data" / "samples"
WALKS = int(os.environ.get("JFBATCH_WALKS", "5"))  # per schema
SCHEMAS = int(os.environ.get("JFBATCH_WALKED_SCHEMAS", "60"))  # of the public set

LETTERS = Vocabulary.from_tokens(
    [
        *(bytes([byte]) for byte in range(256)),
        *(word.encode() for word in ('": ', '", "', "the ", "ing", "}}", "é")),
    ],
    end_ids=[262],
    size=263,
)


def check(grammar: Grammar, schema: Any, label: str) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for seed in range(WALKS):
        text = random_text(grammar, random.Random(f"{label}/{seed}"))
        value = json.loads(text)
        assert validator.is_valid(value), f"{label}: {text[:300]}"


@pytest.mark.parametrize("objects", ["open", "closed"])
@pytest.mark.parametrize("name", ["email", "invoice", "review"])
def test_walks_of_the_shipped_schemas_validate(name: str, objects: Any) -> None:
    schema = json.loads((SAMPLES / f"{name}.schema.json").read_text())
    check(Grammar.from_json_schema(schema, LETTERS, objects=objects), schema, name)


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="JFBATCH_TEST_DATA is not set: the public schemas are not here")
def test_walks_of_public_schemas_validate() -> None:
    assert DATA is not None
    vocabulary = Vocabulary.from_file(Path(DATA) / "tokenizers" / "llama3" / "tokenizer.json.gz")
    with gzip.open(Path(DATA) / "maskbench" / "dev.jsonl.gz", "rt") as lines:
        cases = [json.loads(line) for line in lines]
    walked = 0
    for case in random.Random(7).sample(cases, len(cases)):
        if walked >= SCHEMAS:
            break
        try:
            grammar = Grammar.from_json_schema(case["schema"], vocabulary, style="compact", objects="open")
        except InvalidGrammar:
            continue
        if grammar.unenforced:
            continue
        walked += 1
        check(grammar, case["schema"], case["id"])
    assert walked == SCHEMAS
