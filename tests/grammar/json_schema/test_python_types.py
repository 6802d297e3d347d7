"""pydantic models and dataclasses stand wherever a schema does, and mean what pydantic validates."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic
import pytest

from jfbatch.errors import UnsupportedSchema
from jfbatch.grammar import Grammar
from tests.grammar.ebnf.acceptance import BYTES, accepts, random_texts


class Mood(enum.Enum):
    CALM = "calm"
    CROSS = "cross"


class Line(pydantic.BaseModel):
    product: Annotated[str, pydantic.Field(pattern="^[A-Z]{2}-[0-9]{3}$", serialization_alias="item")]
    quantity: Annotated[int, pydantic.Field(ge=1, le=99, alias="count")]


class Order(pydantic.BaseModel):
    kind: Literal["order"]
    lines: Annotated[list[Line], pydantic.Field(min_length=1, max_length=3)]
    mood: Mood | None = None


@dataclasses.dataclass
class Point:
    x: int
    y: float
    label: str = ""
    order: Order | None = None


@pydantic.dataclasses.dataclass
class Person:
    name: Annotated[str, pydantic.StringConstraints(min_length=1, max_length=8)]
    friends: list[Person]


@pytest.mark.parametrize("kind", [Line, Order, Point, Person])
def test_random_outputs_are_validated_by_pydantic(kind: type) -> None:
    grammar = Grammar.from_json_schema(kind, BYTES)
    adapter = pydantic.TypeAdapter(kind)
    texts = list(random_texts(grammar, count=60, longest=120))
    assert len(set(texts)) > 20
    for text in texts:
        adapter.validate_json(text)


def test_a_model_is_its_schema() -> None:
    text = json.dumps({"kind": "order", "lines": [{"product": "AB-123", "count": 2}], "mood": "calm"})
    for source in (Order, Order.model_json_schema()):
        grammar = Grammar.from_json_schema(source, BYTES)
        assert accepts(grammar, text)
        assert not accepts(grammar, text.replace("count", "quantity"))
        assert not accepts(grammar, text.replace("AB-123", "AB-12"))


@dataclasses.dataclass
class Impossible:
    call: Callable[[], None]


class Unfinished(pydantic.BaseModel):
    items: list[Nowhere]  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Impossible, "Impossible: Cannot generate a JsonSchema"),
        (Unfinished, "Unfinished: .* not fully defined"),
        (int, "int: a class is taken as a schema if it is a pydantic model or a dataclass"),
        (Mood, "Mood: a class is taken as a schema if"),
    ],
)
def test_what_has_no_schema_is_refused_by_name(source: Any, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=re.compile(reason)):
        Grammar.from_json_schema(source, BYTES)
