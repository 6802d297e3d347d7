"""What is no pattern at all is refused at the door, in words that say what would be one."""

from __future__ import annotations

from typing import Any

import pytest

from jfbatch.errors import InvalidGrammar, JfbatchError, UnsupportedSchema, UsageError
from jfbatch.grammar import Grammar, Vocabulary

BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])
ODD: list[Any] = [b"a+", None, 7, 1.5, ["a"], {"a": 1}, object()]


@pytest.mark.parametrize("value", ODD)
def test_a_regular_expression_and_a_grammar_are_text(value: Any) -> None:
    with pytest.raises(InvalidGrammar, match=rf"a regular expression must be text .*{type(value).__name__}"):
        Grammar.from_regex(value, BYTES)
    with pytest.raises(InvalidGrammar, match="a grammar must be text"):
        Grammar.from_grammar(value, BYTES)
    with pytest.raises(InvalidGrammar, match="a pattern of kind schema must be text"):
        Grammar.from_pattern("schema", value, BYTES)


@pytest.mark.parametrize("value", [b"ab", None, 7, "ab", [], [1], [None], object()])
def test_a_choice_is_a_list_of_texts(value: Any) -> None:
    with pytest.raises(InvalidGrammar, match="a choice needs a list of at least one text"):
        Grammar.from_choice(value, BYTES)


@pytest.mark.parametrize("value", [b"{}", None, 7, 1.5, "{}", ["a"], object(), int, float("nan")])
def test_a_schema_is_an_object_or_a_boolean(value: Any) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        Grammar.from_json_schema(value, BYTES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, 7, "tokens", ["a"]])
def test_a_vocabulary_is_one(value: Any) -> None:
    with pytest.raises(TypeError, match="a Vocabulary is needed"):
        Grammar.from_regex("a", value)
    with pytest.raises(TypeError, match="a Vocabulary is needed"):
        Grammar.from_json_schema({}, value)
    with pytest.raises(TypeError, match="a Vocabulary is needed"):
        Grammar.from_choice(["a"], value)


@pytest.mark.parametrize("value", [-1, 0, 2.5, True, "9", float("inf")])
def test_a_longest_string_is_a_whole_number_from_one(value: Any) -> None:
    with pytest.raises(UsageError, match="max_string must be a whole number of at least 1"):
        Grammar.from_json_schema({"type": "string"}, BYTES, max_string=value)


@pytest.mark.parametrize("option", [{"style": "loose"}, {"objects": None}, {"integers": "int32"}])
def test_options_that_there_are_not_are_named(option: Any) -> None:
    with pytest.raises(JfbatchError, match=str(next(iter(option.values())))):
        Grammar.from_json_schema({}, BYTES, **option)


@pytest.mark.parametrize(
    ("schema", "path"), [({"type": []}, "/"), ({"properties": {"a": {"type": []}}}, "/properties/a")]
)
def test_an_empty_list_of_types_is_named(schema: Any, path: str) -> None:
    with pytest.raises(UnsupportedSchema, match="must name at least one type") as caught:
        Grammar.from_json_schema(schema, BYTES)
    assert caught.value.keyword == "type" and (caught.value.path or "/") == path
