"""The columns of the finished table: types from the schema alone, values as they were, nothing silent."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.rows.column_types import MAXIMUM_LEAVES, column_type
from jfbatch.rows.columns import Columns
from jfbatch.rows.result import RowResult, part_table
from jfbatch.rows.row import Pattern
from jfbatch.rows.tables import TableSettings, open_writer

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


A = {"$defs": {"a": closed(a=INTEGER)}}


def results(*texts: str | None, status: str = "ok", is_json: bool = True) -> list[RowResult]:
    return [
        RowResult(
            key=f"id:{n}",
            content=bytes(16),
            index=n,
            line=n + 1,
            id=str(n),
            status=status,
            text=text,
            is_json=is_json,
        )
        for n, text in enumerate(texts)
    ]


def table_of(schema: Any, *values: Any, **options: Any) -> pa.Table:
    columns = Columns(Pattern.of_schema(schema), **options)
    table = columns.table(
        results(*(value if isinstance(value, str) else json.dumps(value) for value in values))
    )
    assert table.schema == columns.arrow_schema
    return table


def through_parquet(table: pa.Table) -> pa.Table:
    file = io.BytesIO()
    pq.write_table(table, file)
    return pq.read_table(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize(
    ("schema", "arrow"),
    [
        (STRING, pa.string()),
        (INTEGER, pa.int64()),
        (NUMBER, pa.float64()),
        (BOOLEAN, pa.bool_()),
        ({"type": "null"}, pa.null()),
        ({"type": ["integer", "null"]}, pa.int64()),
        ({"type": ["integer", "number"]}, pa.float64()),
        ({"type": ["integer", "string"]}, "json"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, pa.int64()),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, pa.decimal128(38, 0)),
        ({"type": "integer", "minimum": -(10**37)}, pa.decimal128(38, 0)),
        ({"type": "integer", "maximum": 10**40}, pa.string()),
        ({"type": "integer", "exclusiveMaximum": 2**63}, pa.int64()),
        ({"type": "integer", "exclusiveMinimum": 2**63 - 1}, pa.decimal128(38, 0)),
        ({"type": "integer", "maximum": 2**63, "exclusiveMaximum": True}, pa.int64()),
        ({"type": "integer", "multipleOf": 10**19}, pa.decimal128(38, 0)),
        ({"type": "integer", "multipleOf": 0.5}, pa.int64()),
        ({"type": "integer", "allOf": [{"minimum": 2**63}]}, pa.decimal128(38, 0)),
        ({"type": "integer", "allOf": [{"enum": [10**38, 1]}]}, pa.string()),
        ({"$ref": "#/$defs/n", "minimum": 2**63, "$defs": {"n": INTEGER}}, pa.decimal128(38, 0)),
        ({"type": "integer", "not": {"maximum": 2**63 - 1}}, pa.decimal128(38, 0)),
        ({"type": "integer", "not": {"maximum": 5}}, pa.int64()),
        ({"type": "integer", "maximum": 1e37}, pa.decimal128(38, 0)),
        ({"type": "integer", "maximum": 1e38}, pa.string()),
        ({"type": "integer", "allOf": [{"$ref": "#somewhere"}]}, pa.string()),
        ({"enum": [2**53 + 1, 1.5]}, "json"),
        ({"enum": [2**53, 1.5]}, pa.float64()),
        ({"enum": ["a", "b", None]}, pa.string()),
        ({"enum": [1, 2]}, pa.int64()),
        ({"enum": [1, 2.5]}, pa.float64()),
        ({"enum": [10**20]}, pa.decimal128(38, 0)),
        ({"enum": [True]}, pa.bool_()),
        ({"enum": [1, "a"]}, "json"),
        ({"enum": [True, 1]}, "json"),
        ({"const": "x"}, pa.string()),
        ({"const": None}, pa.null()),
        ({"const": {"a": 1}}, "json"),
        ({"anyOf": [STRING, {"type": "null"}]}, pa.string()),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, pa.string()),
        ({"anyOf": [INTEGER, NUMBER]}, pa.float64()),
        ({"anyOf": [INTEGER, STRING]}, "json"),
        ({"allOf": [INTEGER]}, pa.int64()),
        ({"allOf": [INTEGER, {"minimum": 2}]}, "json"),
        ({"type": "array", "items": INTEGER}, pa.list_(pa.int64())),
        ({"type": "array"}, "json"),
        ({"type": "array", "items": {}}, pa.list_(pa.string())),
        ({"type": "array", "prefixItems": [STRING, STRING], "items": False}, pa.list_(pa.string())),
        ({"type": "array", "prefixItems": [STRING, INTEGER], "items": False}, "json"),
        ({"type": "array", "prefixItems": [STRING]}, "json"),
        ({"type": "array", "items": [INTEGER, NUMBER], "additionalItems": False}, pa.list_(pa.float64())),
        (closed(b=STRING, a=INTEGER), pa.struct([("b", pa.string()), ("a", pa.int64())])),
        ({"type": "object", "properties": {"a": STRING}}, pa.struct([("a", pa.string())])),
        (closed(), "json"),
        ({"type": "object"}, "json"),
        ({"type": "object", "additionalProperties": STRING}, "json"),
        ({"type": "object", "properties": {"a": STRING}, "additionalProperties": True}, "json"),
        ({"type": "object", "properties": {"a": STRING}, "patternProperties": {"^x": STRING}}, "json"),
        ({"type": "object", "properties": {"a": STRING}, "required": ["a", "b"]}, "json"),
        ({**closed(a=STRING), "anyOf": [{"required": ["a"]}, {}]}, pa.struct([("a", pa.string())])),
        ({"type": "object", "properties": {"a": STRING}, "allOf": [closed(b=STRING)]}, "json"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}}, pa.int64()),
        ({"$ref": "http://elsewhere/x"}, "json"),
        ({"$ref": "#/nowhere"}, "json"),
        ({}, "json"),
        (True, "json"),
        ({"type": "string", "format": "date"}, pa.string()),
        ({"type": "array", "items": INTEGER, "contains": {"minimum": 2**63}}, "json"),
        ({"type": "array", "items": INTEGER, "allOf": [{"items": {"minimum": 2**63}}]}, "json"),
        ({"type": "array", "items": STRING, "contains": {"const": "x"}}, pa.list_(pa.string())),
        ({**closed(a=STRING), "dependentRequired": {"a": ["b"]}}, "json"),
        ({**closed(a=STRING), "dependencies": {"a": ["b"]}}, "json"),
        ({**closed(a=STRING), "dependencies": {"a": closed(b=STRING)}}, "json"),
        (
            {**closed(a=STRING, b=STRING), "dependentRequired": {"a": ["b"]}},
            pa.struct([("a", pa.string()), ("b", pa.string())]),
        ),
        ({**closed(a=STRING), "anyOf": [{"required": ["b"]}]}, "json"),
        ({"anyOf": [closed(a=STRING)], "required": ["b"]}, "json"),
        ({"$ref": "#/$defs/a", "properties": {"b": STRING}, "required": ["b"], **A}, "json"),
        ({"$ref": "#/$defs/a", "properties": {"a": {"minimum": 2**63}}, **A}, "json"),
        ({"$ref": "#/$defs/a", "required": ["b"], **A}, "json"),
        ({"$ref": "#/$defs/a", "allOf": [{"properties": {"b": STRING}}], **A}, "json"),
        ({"$ref": "#/$defs/a", "type": "object", "required": ["a"], **A}, pa.struct([("a", pa.int64())])),
        ({"$ref": "#/$defs/a", "description": "x", "x-order": 1, **A}, pa.struct([("a", pa.int64())])),
        ({"$ref": "#/$defs/n", "type": "integer", "$defs": {"n": NUMBER}}, "json"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else str(value),
)
def test_the_type_of_a_schema(schema: Any, arrow: Any) -> None:
    kind = column_type(schema)
    if arrow == "json":
        assert kind.is_json and kind.arrow == pa.string()
    else:
        assert not kind.is_json and kind.arrow.equals(arrow)


def test_open_objects_are_json_text_where_the_run_lets_them_be_open() -> None:
    schema = {"type": "object", "properties": {"a": STRING}}
    assert column_type(schema, open_objects=True).is_json
    assert not column_type(closed(a=STRING), open_objects=True).is_json


def test_recursion_becomes_json_text_where_it_comes_back() -> None:
    schema = {
        "$defs": {
            "node": closed(value=INTEGER, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
        },
        "$ref": "#/$defs/node",
    }
    node = pa.struct([("value", pa.int64()), ("children", pa.list_(pa.string()))])
    assert column_type(schema).arrow.equals(node)
    table = table_of(schema, {"value": 1, "children": [{"value": 2, "children": []}]})
    assert table.column("value").to_pylist() == [{"value": 1, "children": ['{"value": 2, "children": []}']}]
    assert column_type({"$ref": "#"}).is_json


def test_a_schema_that_fans_out_without_end_stays_small() -> None:
    definitions = {
        f"d{n}": closed(a={"$ref": f"#/$defs/d{n + 1}"}, b={"$ref": f"#/$defs/d{n + 1}"}) for n in range(40)
    }
    schema = {"$defs": {**definitions, "d40": INTEGER}, "$ref": "#/$defs/d0"}
    assert str(column_type(schema).arrow).count(":") < 2 * MAXIMUM_LEAVES


def test_the_fixed_columns_and_their_order() -> None:
    counters = ["prompt_tokens", "completion_tokens", "sampled_tokens", "jumped_tokens", "forward_passes"]
    names = ["id", "row", "status", "text", "value", "error", *counters, "backend"]
    assert Columns(None).arrow_schema.names == names


def test_lifted_and_kept_columns_have_names_of_their_own() -> None:
    names = dict.fromkeys(("id", "value.id", "value.value.id", "x"), INTEGER)
    columns = Columns(
        Pattern.of_schema(closed(**names)), flatten=True, keep=("id", "input.id", "x", "input.x", "y")
    )
    found = columns.arrow_schema.names
    assert len(set(found)) == len(found)
    assert [column for _, column, _ in columns.lifted] == [
        "value.value.value.id",
        "value.id",
        "value.value.id",
        "x",
    ]
    assert columns.kept_columns == ("input.input.id", "input.id", "input.input.x", "input.x", "y")
    value = {"id": 1, "value.id": 2, "value.value.id": 3, "x": 4}
    row = columns.table(results(json.dumps(value))).to_pylist()[0]
    assert (row["id"], row["value.value.value.id"], row["value.id"], row["x"]) == ("0", 1, 2, 4)


def test_an_all_null_column_keeps_its_type() -> None:
    columns = Columns(Pattern.of_schema(closed(a=INTEGER)))
    table = columns.table(results(None, None, status="failed"))
    assert table.schema == columns.arrow_schema
    assert table.column("value").to_pylist() == [None, None]


def test_values_of_rows_that_did_not_succeed_are_null() -> None:
    columns = Columns(Pattern.of_schema(closed(a=INTEGER)))
    table = columns.table(results('{"a": 1}', status="failed") + results('{"a": 1}', status="shortened"))
    assert table.column("value").to_pylist() == [None, {"a": 1}]
    assert table.column("text").to_pylist() == ['{"a": 1}'] * 2


def test_an_absent_property_is_null_and_key_order_is_the_schema_s() -> None:
    table = table_of(closed(z=STRING, a=INTEGER, m=NUMBER), {"a": 1, "z": "x"})
    assert list(table.column("value").to_pylist()[0].items()) == [("z", "x"), ("a", 1), ("m", None)]


def test_integers_beyond_their_column_are_null_and_said_so() -> None:
    table = table_of(closed(a=INTEGER, b=STRING), {"a": 2**63, "b": "x"}, {"a": 2**63 - 1, "b": "y"})
    assert table.column("value").to_pylist() == [{"a": None, "b": "x"}, {"a": 2**63 - 1, "b": "y"}]
    assert table.column("error").to_pylist() == [
        "value.a: 9223372036854775808 does not fit int64; the text column has it",
        None,
    ]


@pytest.mark.parametrize("text", ["1" * 400, "1" * 9000, "1e400", "-1e99999999999", "1e300"])
@pytest.mark.parametrize(
    "schema", [INTEGER, NUMBER, {"type": "integer", "maximum": 10**30}, {"type": "array"}, {}]
)
def test_no_number_makes_it_crash(text: str, schema: dict[str, Any]) -> None:
    table = table_of(closed(a=schema), f'{{"a": {text}}}')
    value = table.column("value").to_pylist()[0]["a"]
    assert value is not None or "does not fit" in table.column("error").to_pylist()[0]


@pytest.mark.parametrize("options", [{}, {"flatten": True}])
def test_a_number_beyond_decimals_makes_its_value_null_and_is_said(options: Any) -> None:
    columns = Columns(Pattern.of_schema(closed(a=NUMBER)), **options)
    rows = results('{"a": 1e99999999999999999999}', '{"a": 1.5}')
    table = columns.table(rows)
    name = "a" if options else "value"
    assert table.column(name).to_pylist() == ([None, 1.5] if options else [None, {"a": 1.5}])
    assert "too large to be read; the text column has it" in table.column("error").to_pylist()[0]
    file = io.BytesIO()
    open_writer("jsonl", file, TableSettings(columns, {}, "", 0)).write(part_table(rows))
    lines = file.getvalue().decode().splitlines()
    assert '"a": null' in lines[0] if options else "1e99999999999999999999" in lines[0]


def test_integers_beyond_int64_are_exact_where_the_schema_says_so() -> None:
    table = table_of(
        closed(a={"type": "integer", "maximum": 10**30}, b={"type": "integer", "maximum": 10**50}),
        {"a": 10**29 + 1, "b": 10**49 + 1},
    )
    assert table.column("value").to_pylist() == [{"a": Decimal(10**29 + 1), "b": str(10**49 + 1)}]


def test_numbers_written_the_other_way_fit() -> None:
    table = table_of(
        closed(a=INTEGER, b=NUMBER), '{"a": 3.0, "b": 4}', '{"a": 1e3, "b": 12345678901234567890}'
    )
    assert table.column("value").to_pylist() == [{"a": 3, "b": 4.0}, {"a": 1000, "b": 12345678901234567890.0}]
    assert table.column("error").to_pylist() == [None, None]


@pytest.mark.parametrize(
    "text", ['{"a": "\\ud800"}', '{"a": "\\ud800", "c": 1}', "[]", '{"a": 5}', '"x"', "null"]
)
def test_values_that_do_not_fit_never_crash(text: str) -> None:
    table = table_of(closed(a=STRING), text)
    assert table.column("value").to_pylist()[0] in (None, {"a": None})
    assert text == "null" or "text column" in table.column("error").to_pylist()[0]


def test_rows_with_several_patterns_have_json_text() -> None:
    columns = Columns(None)
    table = columns.table(results('{"a": 1}') + results('say "hi"', is_json=False))
    assert table.column("value").to_pylist() == ['{"a": 1}', '"say \\"hi\\""']


def test_a_shared_regex_gives_plain_text() -> None:
    table = Columns(Pattern("regex", ".*")).table(results("plain", is_json=False))
    assert table.column("value").to_pylist() == ["plain"]


def test_flatten_lifts_properties_in_place_of_value() -> None:
    schema = closed(status=STRING, city=STRING, n=INTEGER)
    table = table_of(schema, {"status": "s", "city": "c", "n": 1}, flatten=True)
    assert table.schema.names[:8] == ["id", "row", "status", "text", "value.status", "city", "n", "error"]
    assert table.select(["value.status", "city", "n"]).to_pylist() == [
        {"value.status": "s", "city": "c", "n": 1}
    ]
    scalar = table_of(STRING, '"x"', flatten=True)
    assert scalar.column("value").to_pylist() == ["x"]


def test_kept_fields_are_text_and_never_clash() -> None:
    columns = Columns(Pattern.of_schema(closed(city=STRING)), flatten=True, keep=["text", "city", "tag", "n"])
    extra = {"text": "in", "city": ["a"], "tag": "\ud800", "n": 5}
    (row,) = columns.table(
        [RowResult("k", bytes(16), 0, 1, None, "ok", '{"city":"x"}', True, extra=extra)]
    ).to_pylist()
    assert (row["text"], row["input.text"]) == ('{"city":"x"}', "in")
    assert (row["city"], row["input.city"]) == ("x", '["a"]')
    assert (row["tag"], row["n"]) == ('"\\ud800"', "5")


def test_dates_are_typed_on_request() -> None:
    schema = closed(
        d={"type": "string", "format": "date"},
        t={"type": "string", "format": "time"},
        i={"type": "string", "format": "date-time"},
    )
    table = table_of(
        schema,
        {"d": "2024-02-29", "t": "23:30:00-01:00", "i": "2024-01-01T00:30:00.5+01:00"},
        arrow_dates=True,
    )
    assert table.column("value").to_pylist() == [
        {
            "d": datetime.date(2024, 2, 29),
            "t": datetime.time(0, 30),
            "i": datetime.datetime(2023, 12, 31, 23, 30, 0, 500000, datetime.UTC),
        }
    ]
    odd = table_of(
        schema, {"d": "0000-01-01", "t": "23:59:60Z", "i": "9999-12-31T23:59:59-23:59"}, arrow_dates=True
    )
    assert odd.column("value").to_pylist() == [{"d": None, "t": None, "i": None}]
    assert odd.column("error").to_pylist()[0].count("does not fit") == 3


Pair = tuple[dict[str, Any], st.SearchStrategy[Any]]

LEAVES: list[Pair] = [
    (STRING, st.text()),
    (INTEGER, st.integers(-(2**63), 2**63 - 1)),
    (NUMBER, st.floats(allow_nan=False, allow_infinity=False)),
    (BOOLEAN, st.booleans()),
    ({"type": ["string", "null"]}, st.none() | st.text()),
    ({"enum": ["a", "b"]}, st.sampled_from(["a", "b"])),
    ({"anyOf": [{"type": "null"}, INTEGER]}, st.none() | st.integers(0, 9)),
]


def schemas_and_values() -> st.SearchStrategy[Pair]:
    """Pairs of a schema that has a full Arrow type and a strategy of its values."""

    def arrays(pair: Pair) -> Pair:
        return {"type": "array", "items": pair[0]}, st.lists(pair[1], max_size=3)

    def objects(pairs: dict[str, Pair]) -> Pair:
        values = st.fixed_dictionaries({name: pair[1] for name, pair in pairs.items()})
        return closed(**{name: pair[0] for name, pair in pairs.items()}), values

    return st.recursive(
        st.sampled_from(LEAVES),
        lambda inner: (
            st.builds(arrays, inner)
            | st.builds(
                objects, st.dictionaries(st.text("abcß .", min_size=1), inner, min_size=1, max_size=3)
            )
        ),
        max_leaves=6,
    )


@settings(deadline=None, max_examples=60)
@given(st.data(), schemas_and_values())
def test_values_come_back_through_parquet_as_they_were(data: st.DataObject, pair: Any) -> None:
    schema, strategy = pair
    values = data.draw(st.lists(strategy, min_size=1, max_size=4))
    table = through_parquet(table_of(schema, *[json.dumps(value) for value in values]))
    assert table.column("value").to_pylist() == values
    assert table.column("error").to_pylist() == [None] * len(values)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(schemas_and_values(), st.lists(ANY_JSON, min_size=1, max_size=3))
def test_any_json_fits_any_schema_s_table_without_a_crash(pair: Any, values: list[Any]) -> None:
    table_of(pair[0], *[json.dumps(value) for value in values])


RICH = closed(
    name=STRING,
    nothing={"type": "null"},
    count={"type": ["integer", "null"]},
    big={"type": "integer", "maximum": 10**30},
    tags={"type": "array", "items": STRING},
    place=closed(city=STRING, at={"type": "array", "items": NUMBER}),
    free={"type": "object"},
)


@pytest.fixture
def rich_file(tmp_path: Path) -> Path:
    value = {
        "name": "ü",
        "nothing": None,
        "count": 2**62,
        "big": 10**29,
        "tags": ["a", "b"],
        "place": {"city": "x", "at": [1.5, 2.0]},
        "free": {"k": [1]},
    }
    path = tmp_path / "rich.parquet"
    pq.write_table(table_of(RICH, value, {**value, "count": None, "tags": []}), path)
    return path


def test_pandas_reads_the_table(rich_file: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(rich_file)
    assert frame["value"][0]["count"] == 2**62
    assert frame["value"][0]["place"]["city"] == "x"


def test_polars_reads_the_table(rich_file: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(rich_file)
    assert frame["value"].struct.field("count").to_list() == [2**62, None]
    assert frame["value"].struct.field("tags").to_list() == [["a", "b"], []]


def test_duckdb_reads_the_table(rich_file: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql(f"select value.count, value.place.at[1], value.free from '{rich_file}'").fetchall()
    assert rows == [(2**62, 1.5, '{"k": [1]}'), (None, 1.5, '{"k": [1]}')]
