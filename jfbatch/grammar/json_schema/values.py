"""Scalars and finite lists of values: shapes' facts about them become expressions.

enum and const values are written exactly as the layout prints them, after those that break another
keyword have been dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jfbatch.errors import GrammarTooLarge, InvalidGrammar, UnsupportedSchema
from jfbatch.grammar.counted import leaf_of
from jfbatch.grammar.deadline import check_deadline, deadline
from jfbatch.grammar.expression import (
    NOTHING,
    Difference,
    Expression,
    Intersection,
    Literal,
    Sequence,
    choice,
    literal,
    repeat,
)
from jfbatch.grammar.json_schema import numbers, strings
from jfbatch.grammar.json_schema.formats import KNOWN_FORMATS
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
)
from jfbatch.grammar.json_schema.validation import holds

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.layout import Layout
    from jfbatch.grammar.json_schema.merge import Merger

WIDEST_LISTED_INTEGER = 10**16
"""Floats below this without a fraction are also written as integers; beyond, json.dumps has exponents."""


def is_known_format(name: str) -> bool:
    """Whether a format is enforced; others are annotations."""
    return name in KNOWN_FORMATS


def remaining_values(merger: Merger, shape: Shape, conjunction: Conjunction) -> list[Any]:
    """The candidates of a shape that satisfy the whole conjunction, in the order written."""
    found: list[Any] = []
    for value in shape.values or ():
        if not type_of(value) & shape.types:
            continue
        if all(holds(merger, atom, value) for atom in conjunction):
            found.append(value)
    return found


def value_texts(layout: Layout, value: Any, depth: int) -> list[Expression]:
    """The spellings of one JSON value: a float without a fraction is also written as an integer."""
    if isinstance(value, str):
        return [Literal(strings.json_string_literal(value))]
    texts = [layout.dumps(value, depth)]
    if isinstance(value, float) and value.is_integer() and abs(value) < WIDEST_LISTED_INTEGER:
        texts.append(str(int(value)))
    return [Literal(text.encode("utf-8", "backslashreplace")) for text in texts]


def values_expression(layout: Layout, values: list[Any], depth: int) -> Expression:
    """Any one of the values."""
    return choice(*(text for value in values for text in value_texts(layout, value, depth)))


def scalar_expressions(
    merger: Merger, shape: Shape, leave_to_check: Callable[[str], None]
) -> list[Expression]:
    """The texts of the null, boolean, number and string values of a shape."""
    found: list[Expression] = []
    if shape.types & STRING:
        found.append(_string_of_shape(merger, shape, leave_to_check))
    if shape.types & NUMBER:
        barred = [v for v, _ in shape.excluded if isinstance(v, (int, float)) and not isinstance(v, bool)]
        found.append(number_expression(shape.types, shape.number, barred))
    if shape.types & TRUE:
        found.append(literal("true"))
    if shape.types & FALSE:
        found.append(literal("false"))
    if shape.types & NULL:
        found.append(literal("null"))
    return found


def _string_of_shape(merger: Merger, shape: Shape, leave_to_check: Callable[[str], None]) -> Expression:
    """The strings of a shape, or more: where the automaton of a pattern or format becomes too large, first
    the length beside it is left to the check (the two multiply), then the pattern."""
    facts = shape.string
    excluded = tuple(value for value, _ in shape.excluded if isinstance(value, str))
    path = next(
        (merger.patterns[p] for p in (*facts.patterns, *facts.not_patterns) if p in merger.patterns), ""
    )
    try:
        expression = string_expression(facts, excluded)
        if not facts.conditions or _is_affordable(expression):
            return expression
        if facts.has_length:
            leave_to_check(facts.length_label)
            expression = string_expression(replace(facts, min_length=0, max_length=None), excluded)
            if _is_affordable(expression):
                return expression
    except GrammarTooLarge:
        pass
    except InvalidGrammar as error:
        raise UnsupportedSchema(path, "pattern", error.reason) from error
    leave_to_check(f"#{path}: pattern")
    return string_expression(StringFacts(facts.min_length, facts.max_length), excluded)


AFFORDABLE_SECONDS = 1.0
"""Time for the set operations of one string, after which part of it is left to the check."""


def _is_affordable(expression: Expression) -> bool:
    try:
        with deadline(AFFORDABLE_SECONDS):
            for part in _set_operations(expression):
                leaf_of(part, None, strings.JSON_CHARACTER)
    except GrammarTooLarge:
        check_deadline()  # the time that ran out may be that of the whole schema
        return False
    return True


def _set_operations(expression: Expression) -> list[Expression]:
    parts = expression.parts if isinstance(expression, Sequence) else (expression,)
    return [part for part in parts if isinstance(part, (Intersection, Difference))]


def string_expression(facts: StringFacts, excluded: tuple[str, ...] = ()) -> Expression:
    """A JSON string, quotes included."""
    return strings.string_expression(
        facts.min_length,
        facts.max_length,
        facts.patterns,
        facts.not_patterns,
        facts.formats,
        facts.not_formats,
        excluded,
    )


@lru_cache(maxsize=1024)
def strings_are_empty(facts: StringFacts, excluded: tuple[str, ...]) -> bool:
    """Whether no string provably satisfies the facts; False where that takes too much to find out."""
    if facts.conditions == 0 or (facts.conditions == 1 and not facts.has_length and not excluded):
        return False
    try:
        expression = string_expression(facts, excluded)
        leaves = [leaf_of(part, None, strings.JSON_CHARACTER) for part in _set_operations(expression)]
        return expression == NOTHING or any(leaf.is_empty for leaf in leaves)
    except InvalidGrammar:
        return False


def number_expression(types: int, facts: NumberFacts, excluded: list[int | float]) -> Expression:
    """A JSON number: integers only, any, or those that are not integers, as `types` says."""
    bounds: dict[str, Any] = {}
    if facts.lower is not None:
        bounds["exclusive_minimum" if facts.lower[1] else "minimum"] = facts.lower[0]
    if facts.upper is not None:
        bounds["exclusive_maximum" if facts.upper[1] else "maximum"] = facts.upper[0]
    if facts.multiple is not None:
        bounds["multiple_of"] = _decimal(facts.multiple)
    unwanted = [_decimal(step) for step in facts.not_multiples]
    if types & NUMBER == FRACTION:
        unwanted.append(Decimal(1))
    if types & NUMBER == INTEGER:
        expression = numbers.integer_expression(**bounds)
    else:
        # Multiples are recognised in plain decimals only, so those are all that may be written then.
        expression = numbers.number_expression(**bounds, exponents=not unwanted)
    barred = [numbers.number_expression(minimum=value, maximum=value) for value in excluded]
    barred += [numbers.number_expression(multiple_of=step, every_spelling=True) for step in unwanted]
    if expression == NOTHING:
        return expression
    if barred:
        expression = Difference(expression, choice(*barred))
    if facts.characters is not None:
        expression = Intersection((repeat(strings.JSON_CHARACTER, 1, facts.characters), expression))
    return expression


def _decimal(step: Fraction) -> Decimal:
    """The same number in decimal; its denominator divides a power of ten, as it was read from JSON."""
    places = 0
    while 10**places % step.denominator:
        places += 1
    return Decimal(step.numerator * 10**places // step.denominator).scaleb(-places)


def excluded_left_over(shape: Shape, mask: int) -> list[str]:
    """The labels of excluded arrays or objects of the types in `mask`, which no expression can leave out."""
    return [label for value, label in shape.excluded if type_of(value) & mask]
