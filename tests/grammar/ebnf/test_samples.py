"""The sample grammars: what they write is read by parsers that know nothing of them; and hand-made lists."""

from __future__ import annotations

import ast
import csv
import io
import os
import re
from collections.abc import Callable
from datetime import date, datetime
from functools import cache
from pathlib import Path

import pytest
import sqlglot
import sqlglot.expressions

from jfbatch.grammar import Grammar, Vocabulary
from tests.grammar.ebnf.acceptance import BYTES, accepts, random_texts

SAMPLES = Path(__file__).parents[3] / "data" / "grammars"
FILES = ("arithmetic.gbnf", "csv.gbnf", "iso8601-interval.lark", "san.gbnf", "select.lark")


@cache
def over_bytes(name: str) -> Grammar:
    return Grammar.from_grammar((SAMPLES / name).read_text(encoding="utf-8"), BYTES)


@cache
def real_vocabulary() -> Vocabulary:
    path = Path(os.environ.get("JFBATCH_TEST_DATA", "")) / "tokenizers" / "qwen3" / "tokenizer.json.gz"
    if not path.is_file():
        pytest.skip("JFBATCH_TEST_DATA does not hold tokenizers/qwen3/tokenizer.json.gz")
    return Vocabulary.from_file(path)


def read_as_arithmetic(text: str) -> None:
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        assert isinstance(
            node, ast.Expression | ast.BinOp | ast.UnaryOp | ast.Constant | ast.Name | ast.operator
            | ast.unaryop | ast.expr_context
        ), ast.dump(node)  # fmt: skip


def read_as_csv(text: str) -> None:
    header, *records = csv.reader(io.StringIO(text, newline=""), strict=True, lineterminator="\n")
    assert header == ["name", "quantity", "note"]
    assert records
    for record in records:
        assert len(record) == 3
        float(record[1])


def read_as_sql(text: str) -> None:
    (statement,) = sqlglot.parse(text)
    assert isinstance(statement, sqlglot.expressions.Select)
    tables = {table.name for table in statement.find_all(sqlglot.expressions.Table)}
    assert tables <= {"customers", "orders", "products"}


def read_as_interval(text: str) -> None:
    parts = text.split("/")
    if parts[0].startswith("R"):
        assert parts.pop(0)[1:].isdigit() or text.startswith("R/")
    assert len(parts) == 2
    assert sum(part.startswith("P") for part in parts) < 2
    for part in parts:
        if part.startswith("P"):
            whole, _, clock = part[1:].partition("T")
            units = re.findall(r"[0-9]+(?:\.[0-9]+)?([A-Z])", whole)
            clock_units = re.findall(r"[0-9]+(?:\.[0-9]+)?([A-Z])", clock)
            assert units in (["W"], [unit for unit in "YMD" if unit in units])
            assert clock_units == [unit for unit in "HMS" if unit in clock_units]
            assert units or clock_units
        elif "T" in part:
            datetime.fromisoformat(part)
        else:
            date.fromisoformat(part)


def read_as_moves(text: str) -> None:
    for move in text.split(" "):
        move = move.rstrip("+#")
        if not move.startswith("O"):
            promotes = "=" in move
            square = move.split("=")[0][-2:]
            assert square[0] in "abcdefgh"
            assert square[1] in "12345678"
            assert promotes == (move[0].islower() and square[1] in "18")


READERS: dict[str, Callable[[str], None]] = {
    "arithmetic.gbnf": read_as_arithmetic,
    "csv.gbnf": read_as_csv,
    "iso8601-interval.lark": read_as_interval,
    "san.gbnf": read_as_moves,
    "select.lark": read_as_sql,
}


def test_every_sample_is_looked_at() -> None:
    assert sorted(path.name for path in SAMPLES.iterdir()) == sorted(FILES) == sorted(READERS)


@pytest.mark.parametrize("name", FILES)
def test_random_texts_are_read_by_an_independent_parser(name: str) -> None:
    texts = list(random_texts(over_bytes(name), count=150, longest=60))
    assert len(set(texts)) > 50
    for text in texts:
        READERS[name](text)


@pytest.mark.parametrize("name", FILES)
def test_random_tokens_of_a_real_vocabulary_are_read_by_it_too(name: str) -> None:
    text = (SAMPLES / name).read_text(encoding="utf-8")
    texts = list(random_texts(Grammar.from_grammar(text, real_vocabulary()), count=25, longest=30))
    assert len(set(texts)) > 15
    for text in texts:
        READERS[name](text)


ALLOWED = {
    "arithmetic.gbnf": ["1", "-x", "2*(3 + x1)/-4.5e2", "1 - 2 - 3", "((a))", "--1", "0.50e-07"],
    "csv.gbnf": [
        "name,quantity,note\nbolt,12,\n",
        'name,quantity,note\n"a ""b"", c",-0.5,two\n"x\ny",0,"z"\n',
        "name,quantity,note\nGröße 東京,7, spaces kept \n",
    ],
    "iso8601-interval.lark": [
        "2024-02-29/P1M2DT3H",
        "R5/2024-01-01T08:00Z/PT30M",
        "R/P1Y/2000-02-29",
        "2007-03-01T13:00:00.25+05:30/2008-05-11",
        "P0W/0004-02-29",
    ],
    "san.gbnf": [
        "e4",
        "e4 e5 Nf3 Nc6 Bb5 O-O",
        "exd8=Q+",
        "Raxd1",
        "R1e2",
        "Qh4e1#",
        "O-O-O+",
        "axb3",
        "Kxe2",
    ],
    "select.lark": [
        "SELECT * FROM orders;",
        "SELECT DISTINCT customers.name AS total, COUNT(*) FROM customers JOIN orders ON "
        "customers.id = orders.customer_id WHERE customers.city LIKE 'O''Hare%' AND (orders.quantity > 2 OR "
        "NOT orders.quantity IS NOT NULL) GROUP BY customers.name HAVING SUM(orders.quantity) >= 10.5 "
        "ORDER BY COUNT(*) DESC, customers.name LIMIT 10;",
        "SELECT products.price * 2 + 1 FROM products WHERE products.id NOT IN (1, 2) AND products.price "
        "BETWEEN 1 AND 2;",
    ],
}
REFUSED = {
    "arithmetic.gbnf": ["", "1+", "01", "(1", "1 1", "1**2", "+1", "x12", "1.", "()"],
    "csv.gbnf": [
        "",
        "name,quantity,note\n",
        "name,quantity,note\nbolt,12\n",
        "name,quantity,note\nbolt,many,\n",
        'name,quantity,note\na"b,1,\n',
        'name,quantity,note\n"a"b",1,\n',
        "name,quantity,note\nbolt,12,",
        "name,quantity,note\n,12,\n",
    ],
    "iso8601-interval.lark": [
        "2024-02-30/P1D",
        "2023-02-29/P1D",
        "1900-02-29/P1D",
        "2024-04-31/P1D",
        "2024-13-01/P1D",
        "0000-01-01/P1D",
        "2024-01-01",
        "P1D/P1D",
        "2024-01-01/P",
        "2024-01-01/P1DT",
        "2024-01-01/P1D1M",
        "2024-01-01T24:00/P1D",
        "2024-01-01/P1W2D",
    ],
    "san.gbnf": [
        "",
        "e9",
        "i4",
        "e8",
        "e4=Q",
        "axc3",
        "Nf",
        "OO",
        "O-O-O-O",
        "e4  e5",
        "Kab1",
        "e4++",
        "xd4",
    ],
    "select.lark": [
        "SELECT * FROM orders",
        "SELECT FROM orders;",
        "SELECT * FROM users;",
        "SELECT orders.price FROM orders;",
        "SELECT * FROM orders WHERE;",
        "SELECT * FROM orders WHERE orders.id = 'a'b';",
        "DROP TABLE orders;",
        "SELECT * FROM orders LIMIT 0;",
    ],
}


@pytest.mark.parametrize("name", FILES)
def test_known_texts_are_allowed_and_known_mistakes_are_not(name: str) -> None:
    grammar = over_bytes(name)
    assert [text for text in ALLOWED[name] if not accepts(grammar, text)] == []
    assert [text for text in REFUSED[name] if accepts(grammar, text)] == []
    for text in ALLOWED[name]:
        READERS[name](text)


def test_the_days_of_common_and_leap_years_are_allowed_and_no_others() -> None:
    grammar = over_bytes("iso8601-interval.lark")
    for year in (4, 1900, 1999, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    known = date.fromisoformat(text) is not None
                except ValueError:
                    known = False
                assert accepts(grammar, f"{text}/P1D") == known, text
