"""Random schemas against jsonschema-rs: what the rules take is valid, and what is valid they take."""

from __future__ import annotations

import random
from typing import Any

import jsonschema_rs
import pytest

from tests.grammar.json_schema.random_schemas import random_document, random_value
from tests.grammar.json_schema.schema_language import SchemaLanguage, loads

SCHEMAS_PER_SEED = 40


def _documents(seed: int) -> list[tuple[dict[str, Any], jsonschema_rs.Validator, random.Random]]:
    source = random.Random(seed)
    found = []
    for _ in range(SCHEMAS_PER_SEED):
        document = random_document(source)
        found.append((document, jsonschema_rs.Draft202012Validator(document), source))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("style", "objects"), [("compact", "open"), ("spaced", "closed")])
def test_whatever_the_rules_produce_is_valid(seed: int, style: str, objects: str) -> None:
    for document, validator, source in _documents(seed):
        language = SchemaLanguage(document, style, objects)
        if language.automaton is None:
            continue
        for _ in range(6):
            value = loads(text := language.sample(source))
            if not language.unenforced and value is not None:
                assert validator.is_valid(value), (document, text)


@pytest.mark.parametrize("seed", range(8, 16))
def test_every_valid_value_is_taken_in_some_order_of_its_keys(seed: int) -> None:
    for document, validator, source in _documents(seed):
        language = SchemaLanguage(document)
        for _ in range(20):
            value = random_value(source)
            if validator.is_valid(value):
                assert language.takes_in_some_order(value), (document, value)


@pytest.mark.parametrize("seed", range(16, 20))
def test_an_invalid_value_is_taken_only_where_something_is_left_to_the_check(seed: int) -> None:
    for document, validator, source in _documents(seed):
        language = SchemaLanguage(document)
        for _ in range(20):
            value = random_value(source)
            if language.takes(value) and not language.unenforced:
                assert validator.is_valid(value), (document, value)
