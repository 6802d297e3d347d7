"""JSON Schema -> rules: drafts 4, 6, 7, 2019-09 and 2020-12.

What the rules cannot hold is listed as `unenforced`: they then accept a superset of the valid texts,
and whoever uses them checks the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jfbatch.errors import UnsupportedSchema, UsageError
from jfbatch.grammar.expression import RuleSet
from jfbatch.grammar.json_schema.compiler import Integers, SchemaCompiler
from jfbatch.grammar.json_schema.layout import STYLES, Layout, Style
from jfbatch.grammar.json_schema.resolve import Resolver


@dataclass(frozen=True)
class CompiledSchema:
    """The rules of a schema, what they leave to a check ("#/pointer: keyword"), remarks for its author."""

    rules: RuleSet
    unenforced: tuple[str, ...]
    warnings: tuple[str, ...]


def schema_to_rules(
    schema: Any,
    *,
    style: Style = "spaced",
    objects: Literal["open", "closed"] = "open",
    strict: bool = False,
    max_string: int | None = None,
    integers: Integers = "any",
    prefix: str = "",
) -> CompiledSchema:
    """Rules for the JSON texts, laid out in `style`, that satisfy a schema.

    `objects`: "open" lets undeclared properties through where the schema does, "closed" only where the
    schema describes them. `strict` refuses a schema that would leave anything unenforced.
    `max_string`: most characters of a string value that has no maxLength, enum, pattern or known format.
    `integers`: "int64" holds an integer that lacks a bound to what its table column can hold: int64, or 38
    digits or more where its other bound is beyond int64.
    `prefix` begins the name of every rule, so that several schemas can go into one grammar.
    Parts without any text are left in: whether a value is possible at all is known once the rules are
    compiled (`compile_program`). Raises UnsupportedSchema (with pointer and keyword) and GrammarTooLarge.
    """
    if style not in STYLES:
        raise UsageError(f"unknown JSON style {style!r}: one of {', '.join(STYLES)}")
    if objects not in ("open", "closed"):
        raise UsageError(f"objects must be open or closed, not {objects!r}")
    if integers not in ("int64", "any"):
        raise UsageError(f"integers must be int64 or any, not {integers!r}")
    if max_string is not None and (type(max_string) is not int or max_string < 1):
        raise UsageError(f"max_string must be a whole number of at least 1, not {max_string!r}")
    warnings: list[str] = []
    compiler = SchemaCompiler(
        Resolver(schema, warnings), Layout(style), objects, max_string, integers, prefix
    )
    rules = RuleSet(compiler.compile(), compiler.rules)
    unenforced = tuple(compiler.unenforced)
    if strict and unenforced:
        pointer, _, keyword = unenforced[0].rpartition(": ")
        raise UnsupportedSchema(pointer.lstrip("#"), keyword, "cannot be enforced by the grammar alone")
    return CompiledSchema(rules, unenforced, (*warnings, *compiler.warnings))


__all__ = ["CompiledSchema", "Integers", "schema_to_rules"]
