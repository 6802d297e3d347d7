"""Integers and their columns: what the grammar lets through is what the column holds, for any schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jfbatch.errors import GrammarError, GrammarTooLarge, UnsupportedSchema
from jfbatch.grammar import Vocabulary
from jfbatch.grammar.grammar import Grammar
from jfbatch.rows.column_types import column_type
from tests.run_command import Job, invoke

BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])
EDGES = [0, 2**53, 2**63, -(2**63), 2**64, 10**38, -(10**38), 10**40]
INTEGERS = st.builds(lambda edge, off: edge + off, st.sampled_from(EDGES), st.integers(-2, 2))
BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        "minimum": INTEGERS,
        "maximum": INTEGERS,
        "exclusiveMinimum": INTEGERS,
        "exclusiveMaximum": INTEGERS,
        "multipleOf": st.sampled_from([1, 2, 5, 0.5, 10**10, 10**20]),
    },
)
SCHEMAS = st.one_of(
    BOUNDS.map(lambda bounds: {"type": "integer", **bounds}),
    st.tuples(BOUNDS, BOUNDS).map(lambda pair: {"type": "integer", **pair[0], "allOf": [pair[1]]}),
    st.tuples(BOUNDS, BOUNDS).map(
        lambda pair: {"$ref": "#/$defs/n", **pair[0], "$defs": {"n": {"type": "integer", **pair[1]}}}
    ),
    BOUNDS.map(lambda bounds: {"type": "integer", "not": bounds}),
    st.sampled_from([1e18, 1e19, 1e37, 1e38, 1e40]).map(lambda most: {"type": "integer", "maximum": most}),
    BOUNDS.map(lambda bounds: {"type": ["integer", "null"], **bounds}),
    BOUNDS.map(lambda bounds: {"anyOf": [{"type": "integer"}, {"type": "null"}], **bounds}),
)


def allows(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    try:
        for byte in text.encode():
            matcher.accept_token(byte)
    except GrammarError:
        return False
    return matcher.is_accepting()


def grammar_of(schema: Any, integers: Any) -> Grammar | None:
    try:
        return Grammar.from_json_schema(schema, BYTES, integers=integers)
    except (UnsupportedSchema, GrammarTooLarge):  # nothing is within the bounds, or it is refused
        return None


@settings(deadline=None, max_examples=150)
@example({"type": "integer", "not": {"minimum": -(2**63), "exclusiveMinimum": 0}}, [-(2**63) - 1])
@given(SCHEMAS, st.lists(INTEGERS, min_size=1, max_size=12))
def test_every_integer_that_the_grammar_lets_through_fits_its_column(schema: Any, values: list[int]) -> None:
    for integers in ("int64", "any"):
        grammar = grammar_of(schema, integers)
        kind = column_type(schema, any_integers=integers == "any")
        for value in values:
            if grammar is None or not allows(grammar, str(value)):
                continue
            notes: list[str] = []
            converted = kind.convert(value, notes)
            assert notes == []
            assert int(pa.array([converted], kind.arrow).to_pylist()[0]) == value


@pytest.mark.parametrize("step", [7, 100, 997, 9973])
@pytest.mark.parametrize("bounds", [{}, {"minimum": 0}, {"not": {"const": 0}}])
def test_multiples_are_held_by_their_length(step: int, bounds: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": step, **bounds}}}
    held = Grammar.from_json_schema({**schema, "required": ["n"]}, BYTES, integers="int64")
    for factor in (1, 12, 10**13 - 1):
        assert allows(held, f'{{"n": {step * factor}}}')
        assert allows(held, f'{{"n": {-step * factor}}}') == ("minimum" not in bounds)
        assert not allows(held, f'{{"n": {step * factor + 1}}}')
    assert not allows(held, f'{{"n": {step * 10**18}}}')
    assert allows(held, '{"n": 0}') == ("not" not in bounds)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 10**18, "multipleOf": 4096}, 4096 * (10**18 // 4096 + 1), 2**63),
        ({"minimum": 9 * 10**17, "multipleOf": 7 * 10**17}, 14 * 10**17, 7 * 10**17),
        ({"maximum": -(10**17), "multipleOf": 10}, -(10**17) - 10, -(10**17) + 10),
        ({"minimum": 10**37, "multipleOf": 10}, 10**37 + 10, 10**38),
        ({"maximum": -(2**63), "multipleOf": 1}, -(2**63), -(2**63) - 1),
        ({"multipleOf": 1}, 2**63 - 1, 2**63),
    ],
)
def test_multiples_too_long_for_their_length_are_held_by_the_column(
    bounds: Any, inside: int, outside: int
) -> None:
    held = Grammar.from_json_schema({"type": "integer", **bounds}, BYTES, integers="int64")
    assert allows(held, str(inside)) and not allows(held, str(outside))
    notes: list[str] = []
    column_type({"type": "integer", **bounds}).convert(inside, notes)
    assert notes == []


@settings(deadline=None, max_examples=100)
@example({"multipleOf": 2, "minimum": 2**63 - 1}, [0])
@given(BOUNDS, st.lists(INTEGERS, min_size=1, max_size=12))
def test_no_integer_that_fits_the_column_is_kept_out(bounds: Any, values: list[int]) -> None:
    schema = {"type": "integer", **bounds}
    held, free = grammar_of(schema, "int64"), grammar_of(schema, "any")
    convert = column_type(schema).convert
    for value in values:
        notes: list[str] = []
        convert(value, notes)
        if free is not None and not notes and not ("multipleOf" in bounds and abs(value) >= 10**17):
            assert held is not None and allows(held, str(value)) == allows(free, str(value))


@pytest.mark.parametrize(
    ("schema", "largest"),
    [
        ({"type": "integer"}, 2**63 - 1),
        ({"type": "integer", "minimum": 0}, 2**63 - 1),
        ({"type": "integer", "minimum": 2**63}, 10**38 - 1),
        ({"type": "integer", "maximum": 5}, 5),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, 2**63 - 1),
    ],
)
def test_a_missing_bound_is_that_of_the_column(schema: Any, largest: int) -> None:
    held = Grammar.from_json_schema(schema, BYTES, integers="int64")
    inside = "[{}]" if schema["type"] == "array" else "{}"
    assert allows(held, inside.format(largest)) and not allows(held, inside.format(largest + 1))


def test_the_library_and_other_types_are_as_before() -> None:
    free = Grammar.from_json_schema({"type": "integer"}, BYTES)
    assert allows(free, str(2**64)) and allows(free, "1" * 40)
    for schema in ({"type": "number"}, {}, {"enum": [2**70]}):
        held = Grammar.from_json_schema(schema, BYTES, integers="int64")
        assert allows(held, str(2**70))


def test_integers_of_any_size_are_text_in_the_table_and_belong_to_the_settings(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, tiny_model, tmp_path / "cache")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 9}))
    rows = [{"id": f"r{number}", "prompt": f"Count to {number}"} for number in range(6)]
    flags = ("--schema", schema, "--max-tokens", "400", "-q")
    held = job.run(rows, *flags)
    assert job.table().schema.field("value").type == pa.list_(pa.int64())
    assert all(row["error"] is None and json.loads(row["text"]) == row["value"] for row in held)
    assert invoke(*job.arguments(*flags, "--integers", "any")) == 2
    assert "integers (was 'int64', now 'any')" in capsys.readouterr().err
    free = job.run(None, *flags, "--integers", "any", "--overwrite")
    assert job.table().schema.field("value").type == pa.list_(pa.string())
    assert all(row["error"] is None for row in free)
    assert any(len(number) > 20 for row in free for number in row["value"])
    assert all(list(map(int, row["value"])) == json.loads(row["text"]) for row in free)
