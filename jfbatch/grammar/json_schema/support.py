"""What becomes of each keyword, as data: enforced by the grammar, checked afterwards, or refused.

Kept beside the code that does it; `python -m jfbatch.grammar.json_schema.support > docs/json-schema.md`
makes the page for users from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jfbatch.grammar.json_schema import arrays, compiler, digits, exclusive, merge, multiples, numbers
from jfbatch.grammar.json_schema import objects as object_rules
from jfbatch.grammar.json_schema.formats import KNOWN_FORMATS
from jfbatch.grammar.json_schema.resolve import DRAFTS
from jfbatch.grammar.json_schema.unevaluated import MOST_ALTERNATIVES


@dataclass(frozen=True)
class Support:
    """One keyword, or several that are read together.

    `meaning`: a remark on what is enforced. `checked`: where the grammar lets more through and outputs are
    checked. `refused`: where the schema's rows become unsupported_schema. Empty: nowhere.
    """

    keywords: tuple[str, ...]
    meaning: str = ""
    checked: str = ""
    refused: str = ""


_SPLITS = f"more than {merge.BRANCH_LIMIT} combinations of alternatives in one place"

SUPPORT: dict[str, tuple[Support, ...]] = {
    "Any value": (
        Support(("type",), "1.0 is no integer here: integers are written without a point"),
        Support(("enum", "const"), "written as the JSON style prints them"),
        Support(
            ("$ref",),
            "anywhere in the document: JSON pointers, `$anchor`, embedded `$id`; recursion; siblings count",
            refused="a target outside the document (nothing is fetched) or none at all",
        ),
        Support(
            ("$dynamicRef", "$recursiveRef"),
            "where the target is the same on every path",
            refused="several resources have the anchor and the root has not",
        ),
        Support(("allOf",), "merged, also with siblings and through `$ref`"),
        Support(("anyOf",), checked=_SPLITS),
        Support(
            ("oneOf",),
            "as anyOf where the branches exclude each other (by type, constant, key, range or pattern), "
            "otherwise by subtraction",
            checked=f"more than {exclusive.PAIR_LIMIT:,} pairs of branches that nothing tells apart at once; "
            + _SPLITS,
        ),
        Support(
            ("not",),
            "by de Morgan's laws",
            checked="of uniqueItems, of unevaluatedProperties and unevaluatedItems, of items beyond a "
            "prefix, of single arrays and objects as in `{not: {const: [1]}}`",
        ),
        Support(("if", "then", "else"), checked=_SPLITS),
    ),
    "Numbers": (
        Support(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
            "digit by digit, without rounding; draft 4's boolean exclusiveMinimum too",
        ),
        Support(
            ("multipleOf",),
            f"listed where bounds leave at most {numbers.MAX_LISTED:,}, told by the last digits or by "
            "remainders otherwise",
            refused=f"more than {multiples.MAX_STATES:,} remainders and places to follow: 0.025, 9999 and "
            "1000000 are fine, 10001 without narrow bounds is not",
        ),
    ),
    "Strings": (
        Support(
            ("minLength", "maxLength"),
            "in characters (code points)",
            checked="beside a pattern or format with which they would need too large an automaton",
        ),
        Support(
            ("pattern",),
            "as ECMA-262 searches; several at once; look-arounds where they are regular",
            checked="together with others, where that would need too large an automaton",
            refused="back-references, look-arounds beyond that, malformed patterns",
        ),
        Support(("format",), "the names below; others are annotations, and a warning says so"),
    ),
    "Arrays": (
        Support(("items", "prefixItems", "additionalItems"), "positions do not imply minItems"),
        Support(("minItems", "maxItems")),
        Support(
            ("uniqueItems",),
            f"where items have at most {arrays.VALUE_LIMIT} values, or maxItems is at most 3, and there are "
            f"at most {arrays.STATE_LIMIT:,} sets of used values to tell apart: 11 values without maxItems",
            checked="otherwise",
        ),
        Support(
            ("contains", "minContains", "maxContains"),
            "by counting answers",
            checked=f"more than {arrays.STATE_LIMIT:,} counts to tell apart, or what is contained is itself "
            "checked only",
        ),
        Support(
            ("unevaluatedItems",),
            "by what each combination of alternatives has looked at",
            checked=f"beside an anyOf of more than {MOST_ALTERNATIVES}, or beside contains in 2020-12",
        ),
    ),
    "Objects": (
        Support(
            ("properties", "patternProperties", "additionalProperties"),
            "a key that matches several satisfies all of them; no declared key comes twice",
            checked="that no undeclared key comes twice; keys that could match more than "
            f"{object_rules.CLASS_LIMIT} combinations of patterns",
        ),
        Support(("required",)),
        Support(
            ("minProperties", "maxProperties"),
            "by counting",
            checked=f"more than {object_rules.COUNT_LIMIT:,} counts to tell apart, or beside a `not` that "
            "asks for some undeclared property",
        ),
        Support(("propertyNames",)),
        Support(("dependentRequired", "dependentSchemas", "dependencies"), checked=_SPLITS),
        Support(
            ("unevaluatedProperties",),
            "by what each combination of alternatives has looked at",
            checked=f"beside an anyOf of more than {MOST_ALTERNATIVES}",
        ),
    ),
}

READ_WITH = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
}
"""Keywords that only say something beside another, which reads them."""


def listed_keywords() -> list[str]:
    """Every keyword of the tables, in their order."""
    return [keyword for rows in SUPPORT.values() for row in rows for keyword in row.keywords]


def page() -> str:
    """docs/json-schema.md."""
    tables = "\n".join(f"### {title}\n\n{_table(rows)}" for title, rows in SUPPORT.items())
    return f"{_INTRODUCTION}\n{tables}\n{_behind()}"


def _table(rows: Iterable[Support]) -> str:
    lines = ["| keyword | enforced by the grammar | checked afterwards | refused |", "|---|---|---|---|"]
    for row in rows:
        names = ", ".join(f"`{keyword}`" for keyword in row.keywords)
        enforced = row.meaning or "yes"
        lines.append(f"| {names} | {enforced} | {row.checked or '-'} | {row.refused or '-'} |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
# JSON Schema

<!-- made by: python -m jfbatch.grammar.json_schema.support -->

A schema becomes a grammar, and the model can only write what the grammar allows. What no grammar can hold
(`uniqueItems` over free texts, say) is enforced as far as it goes and **checked afterwards**: every output is
validated, one that fails is sampled again up to `--retries` times, and then its status is `invalid`, never
`ok`. `--strict` refuses such schemas instead. What cannot be read or would have no end is **refused**: the
row's status is `unsupported_schema`, and `error` has the JSON pointer, the keyword and the reason. So is a
schema that no value satisfies, and a keyword whose value is of the wrong kind.

`jfbatch check rows.jsonl` says for each schema which of the three it is, and where. From Python,
`Grammar.from_json_schema(...).unenforced` lists what is left to the check, as `#/pointer: keyword`.

## Keywords

A `-` means nowhere: the keyword is enforced whatever stands beside it.
"""


def _behind() -> str:
    formats = ", ".join(f"`{name}`" for name in sorted(KNOWN_FORMATS))
    drafts = "\n".join(f"    {address}" for address in DRAFTS if "draft-03" not in address)
    most = digits.MAX_INTEGER_DIGITS
    return f"""
Not read, as the specification says of annotations: `title`, `description`, `default`, `examples`,
`deprecated`, `readOnly`, `writeOnly`, `$comment`, `contentEncoding`, `contentMediaType`, `contentSchema`; and
every keyword that is not JSON Schema's own, such as OpenAPI's `nullable` and `discriminator`.

## Objects and the order of keys

Without `--objects open`, objects are **closed**: beside the declared properties there are only those that a
schema-valued `additionalProperties`, `unevaluatedProperties` or `patternProperties` describes (`{{}}` is such
a schema, `true` is not). That is a part of what is valid, and the part that a table has columns for. With
**open**, undeclared properties may come wherever the schema lets them. Their keys never equal a declared one.

Keys come in one order, which is part of the grammar:

1. declared properties, in the order in which the schema first mentions them under `properties` (through
   `$ref` and `allOf` too), then names that only `required` mentions; optional ones may be left out;
2. then undeclared ones, in any order.

Where an open object may have undeclared properties, a second order is let through as well: the required
properties as `required` lists them, then the others (up to {object_rules.TWO_ORDERS_LIMIT} properties).

So a property that the model should write first, such as its reasoning, stands first under `properties`.

## Layout and spelling

White space is never a choice. `--json-style spaced` (the default) is what Python's `json.dumps` prints,
`compact` has none, `pretty` indents by two. A recursive part of a schema nests at most
{compiler.PRETTY_DEPTHS} levels deep in `pretty`.

Each text has one spelling: characters stand for themselves, and those that JSON must escape have their
shortest escape. A string with half of a surrogate pair cannot be written.

**Integers** have no leading zero, fraction or exponent, and there is no `-0`. **Numbers** are written
plainly, or with one digit before the point, at most {numbers.MAX_MANTISSA_DIGITS} after it and an exponent
from -{numbers.MAX_EXPONENT} to {numbers.MAX_EXPONENT}. Plain ones have at most {most} digits before the point
and {numbers.MAX_FRACTION_DIGITS} after it, more where a bound has more. Multiples of a step, and numbers that
must not be one, have no exponent. An exclusive bound keeps the distance of one double, so that no reader
rounds onto it.

## Formats

Enforced, after the specifications that they name: {formats}.

Every other name is an annotation: it changes nothing, and `jfbatch check` mentions it. A `format` combines
with lengths and patterns; beside a length some are narrowed (no IP address as the host of an identifier).

## Drafts

`$schema` picks one of

{drafts}

and keywords of other drafts are then ignored, with a warning; siblings of `$ref` count from 2019-09 on.
Without `$schema`, or with an unknown one, keywords mean what they mean in 2020-12. Without it the older
spellings are understood as well: `definitions`, `dependencies`, `items` as an array with `additionalItems`,
`exclusiveMinimum: true`, `id`.

## Limits

| what | limit |
|---|---|
| time to compile one schema | `--compile-timeout`, 10 s |
| rules that one schema becomes | {compiler.RULE_LIMIT:,} |
| subschemas that apply to one value at once | {merge.NODE_LIMIT:,} |
| alternatives of one anyOf or oneOf that are all followed | {merge.WIDEST_SPLIT:,} |

A schema past the first three is refused, past the last one it is checked.
"""


if __name__ == "__main__":
    print(page(), end="")
