"""Scalars and finite lists of values: shapes' facts about them become expressions.

enum and const values are written exactly as the layout prints them, after those that break another
keyword have been dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jfbatch.errors import UnsupportedSchema
from jfbatch.grammar.expression import NOTHING, Difference, Expression, Literal, choice, literal
from jfbatch.grammar.json_schema import numbers, strings
from jfbatch.grammar.json_schema.formats import format_expression
from jfbatch.grammar.json_schema.shape import (
    FALSE,
    FRACTION,
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    TRUE,
    Conjunction,
    NumberFacts,
    Shape,
    StringFacts,
    type_of,
    value_key,
)
from jfbatch.grammar.json_schema.validation import holds

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.layout import Layout
    from jfbatch.grammar.json_schema.merge import Merger


def is_known_format(name: str) -> bool:
    return format_expression(name) is not None


def remaining_values(merger: Merger, shape: Shape, conjunction: Conjunction) -> list[Any]:
    """The candidates of a shape that satisfy the whole conjunction, in the order written."""
    found: list[Any] = []
    for value in shape.values or ():
        if not type_of(value) & shape.types:
            continue
        if all(_holds_or_unknown(merger, shape, atom, value) for atom in conjunction):
            found.append(value)
    return found


def _holds_or_unknown(merger: Merger, shape: Shape, atom: Any, value: Any) -> bool:
    try:
        return holds(merger, atom, value)
    except UnsupportedSchema as error:
        shape.unenforce(type_of(value), f"#{error.path}: {error.keyword}")
        return True


def value_texts(layout: Layout, value: Any, depth: int) -> list[Expression]:
    """The spellings of one JSON value: a float without a fraction is also written as an integer."""
    if isinstance(value, str):
        return [Literal(strings.json_string_literal(value))]
    texts = [layout.dumps(value, depth)]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        texts.append(str(int(value)))
    return [Literal(text.encode("utf-8", "backslashreplace")) for text in texts]


def values_expression(layout: Layout, values: list[Any], depth: int) -> Expression:
    """Any one of the values."""
    return choice(*(text for value in values for text in value_texts(layout, value, depth)))


def scalar_expressions(shape: Shape) -> list[Expression]:
    """The texts of the null, boolean, number and string values of a shape."""
    found: list[Expression] = []
    if shape.types & STRING:
        excluded = [value for value, _ in shape.excluded if isinstance(value, str)]
        found.append(string_expression(shape.string, excluded))
    if shape.types & NUMBER:
        excluded = [v for v, _ in shape.excluded if isinstance(v, (int, float)) and not isinstance(v, bool)]
        found.append(number_expression(shape.types, shape.number, excluded))
    if shape.types & TRUE:
        found.append(literal("true"))
    if shape.types & FALSE:
        found.append(literal("false"))
    if shape.types & NULL:
        found.append(literal("null"))
    return found


def string_expression(facts: StringFacts, excluded: list[Any]) -> Expression:
    """A JSON string, quotes included."""
    expression = strings.string_expression(
        min_length=facts.min_length,
        max_length=facts.max_length,
        patterns=facts.patterns,
        not_patterns=facts.not_patterns,
        formats=tuple(name for name in facts.formats if is_known_format(name)),
        not_formats=facts.not_formats,
    )
    if not excluded or expression == NOTHING:
        return expression
    return Difference(expression, choice(*(Literal(strings.json_string_literal(text)) for text in excluded)))


def number_expression(types: int, facts: NumberFacts, excluded: list[int | float]) -> Expression:
    """A JSON number: integers only, any, or those that are not integers, as `types` says."""
    if types & NUMBER == INTEGER:
        expression = _bounded(facts, integer=True)
    else:
        expression = _bounded(facts, integer=False)
        if not types & INTEGER:
            expression = _without(expression, [numbers.number_expression(multiple_of=1)])
    barred = [numbers.number_expression(minimum=value, maximum=value) for value in excluded]
    barred += [numbers.number_expression(multiple_of=step) for step in facts.not_multiples]
    return _without(expression, barred)


def _without(expression: Expression, barred: list[Expression]) -> Expression:
    if not barred or expression == NOTHING:
        return expression
    return Difference(expression, choice(*barred))


def _bounded(facts: NumberFacts, integer: bool) -> Expression:
    lower, upper = facts.lower, facts.upper
    make = numbers.integer_expression if integer else numbers.number_expression
    return make(
        minimum=lower[0] if lower and not lower[1] else None,
        maximum=upper[0] if upper and not upper[1] else None,
        exclusive_minimum=lower[0] if lower and lower[1] else None,
        exclusive_maximum=upper[0] if upper and upper[1] else None,
        multiple_of=facts.multiple,
    )


def excluded_left_over(merger: Merger, shape: Shape, mask: int) -> list[str]:
    """The labels of excluded arrays or objects of the types in `mask`, which no expression can leave out."""
    return [label for value, label in shape.excluded if type_of(value) & mask]


__all__ = [
    "FRACTION",
    "excluded_left_over",
    "is_known_format",
    "number_expression",
    "remaining_values",
    "scalar_expressions",
    "string_expression",
    "value_key",
    "value_texts",
    "values_expression",
]
