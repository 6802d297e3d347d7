"""Structural tags as rules: free text in which a trigger stands only where a whole tag follows.

The free text is an automaton (Aho and Corasick, 1975) that knows how much of a trigger has been written.
The first trigger that is completed ends it; from there on only the tags that begin so are open.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from jfbatch.errors import GrammarTooLarge, InvalidGrammar, UnsupportedSchema
from jfbatch.grammar.analysis import Analysis
from jfbatch.grammar.counted import leaf_of
from jfbatch.grammar.deadline import check_deadline
from jfbatch.grammar.expression import (
    ByteSet,
    ExplicitAutomaton,
    Expression,
    Intersection,
    RuleSet,
    choice,
    literal,
    repeat,
    sequence,
)
from jfbatch.grammar.json_schema import CompiledSchema, Integers, schema_to_rules
from jfbatch.grammar.json_schema.layout import Style
from jfbatch.grammar.regex import RAW_UTF8
from jfbatch.grammar.regex.characters import ANY_CHARACTER, character_expression

MAX_TRIGGERS = 10_000  # bytes
ANY_TEXT = repeat(character_expression(ANY_CHARACTER, RAW_UTF8))


@dataclass(frozen=True)
class _Tag:
    """`begin`, then a JSON value of a schema (`value`), then `end`. `place` names it for people."""

    place: str
    begin: bytes
    value: Expression
    end: bytes


def tags_to_rules(
    text: str,
    style: Style,
    objects: Literal["open", "closed"],
    strict: bool,
    absent_bytes: frozenset[int] = frozenset(),
    max_string: int | None = None,
    integers: Integers = "any",
) -> CompiledSchema:
    """The rules of a "tags" pattern.

    It is a JSON object: `tags` is a list of {"begin", "schema", "end", "place"}, where place names the tag in
    errors; `triggers` the texts that free text cannot hold but at the start of a tag, none inside another;
    every begin starts with a trigger. `text` says whether free text may stand around the tags: if not,
    they follow each other with `between` in between. `least` and `most` (null: any) bound their number.
    `absent_bytes` cannot be written; the other options are a schema's. Raises UnsupportedSchema, whose path
    begins with a tag's place, and InvalidGrammar.
    """
    spec = json.loads(text)
    rules: dict[str, Expression] = {}
    tags: list[_Tag] = []
    unenforced: dict[str, None] = {}
    warnings: dict[str, None] = {}
    for number, tag in enumerate(spec["tags"]):
        place = tag["place"]
        try:
            compiled = schema_to_rules(
                tag["schema"],
                style=style,
                objects=objects,
                strict=strict,
                max_string=max_string,
                integers=integers,
                prefix=f"{number}.",
            )
        except UnsupportedSchema as error:
            raise UnsupportedSchema(f"{place}{error.path}", error.keyword, error.reason) from None
        if not _is_productive(compiled.rules, absent_bytes):
            raise UnsupportedSchema(place, "schema", "no value can satisfy it")
        rules.update(compiled.rules.rules)
        tags.append(_Tag(place, tag["begin"].encode(), compiled.rules.start, tag["end"].encode()))
        unenforced.update(dict.fromkeys(f"{place}{label.removeprefix('#')}" for label in compiled.unenforced))
        warnings.update(dict.fromkeys(f"{place}: {warning}" for warning in compiled.warnings))
    if spec["text"]:
        start = _among_text(tags, [trigger.encode() for trigger in spec["triggers"]], spec)
    else:
        whole = choice(*(sequence(literal(tag.begin), tag.value, literal(tag.end)) for tag in tags))
        start = _repeated(whole, literal(spec["between"]), spec["least"], spec["most"])
    return CompiledSchema(RuleSet(start, rules), tuple(unenforced), tuple(warnings))


def reasoning_to_rules(text: str) -> RuleSet:
    """Free text up to and with the first `end`, then `after`: the JSON object of a "reasoning" pattern."""
    spec = json.loads(text)
    end = spec["end"].encode()
    return RuleSet(sequence(text_up_to(end, (end,)), literal(spec["after"])))


def _is_productive(rules: RuleSet, absent_bytes: frozenset[int]) -> bool:
    """Whether any text matches."""
    analysis = Analysis(rules, leaf_of, None, ByteSet.of(absent_bytes).bits, None)
    return analysis.of(rules.start).productive


def _among_text(tags: list[_Tag], triggers: list[bytes], spec: Any) -> Expression:
    """Free text with tags in it."""
    segments = []
    for trigger in triggers:
        rests = [
            sequence(literal(tag.begin.removeprefix(trigger)), tag.value, literal(tag.end))
            for tag in tags
            if tag.begin.startswith(trigger)
        ]
        if rests:
            segments.append(sequence(text_up_to(trigger, triggers), choice(*rests)))
    return sequence(
        _repeated(choice(*segments), literal(""), spec["least"], spec["most"]), text_without(triggers)
    )


def _repeated(item: Expression, between: Expression, least: int, most: int | None) -> Expression:
    """`item` from `least` (0 or 1) to `most` times, with `between` in between."""
    if least not in (0, 1) or most == 0:
        raise InvalidGrammar("tags: least is 0 or 1, most at least 1")
    more = repeat(sequence(between, item), 0, None if most is None else most - 1)
    several = sequence(item, more)
    return several if least else repeat(several, 0, 1)


def text_without(triggers: list[bytes] | tuple[bytes, ...]) -> Expression:
    """Any text in which no trigger stands."""
    return Intersection((ANY_TEXT, _automaton(triggers, None))) if triggers else ANY_TEXT


def text_up_to(trigger: bytes, triggers: list[bytes] | tuple[bytes, ...]) -> Expression:
    """Any text that ends with `trigger` and in which no trigger is completed before."""
    return Intersection((ANY_TEXT, _automaton(triggers, trigger)))


def _automaton(triggers: list[bytes] | tuple[bytes, ...], last: bytes | None) -> ExplicitAutomaton:
    """Over bytes: how much of a trigger has been written. No trigger may stand inside another.

    Accepts the texts without any trigger, or (`last`) those in which `last` is the first and ends the text.
    """
    states: list[dict[int, int]] = [{}]  # a trie of the triggers; its leaves are whole triggers
    leaf: dict[int, bytes] = {}
    if sum(map(len, triggers)) > MAX_TRIGGERS:
        raise GrammarTooLarge(f"triggers of more than {MAX_TRIGGERS:,} bytes together")
    for trigger in triggers:
        state = 0
        for byte in trigger:
            if byte not in states[state]:
                states[state][byte] = len(states)
                states.append({})
            state = states[state][byte]
        leaf[state] = trigger
    full: list[list[int]] = [[states[0].get(byte, 0) for byte in range(256)]]
    full += [[] for _ in states[1:]]
    fallback = [0] * len(states)
    queue = deque(states[0].values())
    while queue:
        check_deadline()
        state = queue.popleft()
        known = full[fallback[state]]
        full[state] = [states[state].get(byte, known[byte]) for byte in range(256)]
        for byte, child in states[state].items():
            fallback[child] = known[byte]
            queue.append(child)
    inner = [state for state in range(len(states)) if state not in leaf]
    number = {state: place for place, state in enumerate(inner)}
    if last is not None:
        number[next(state for state, trigger in leaf.items() if trigger == last)] = len(inner)
    rows = []
    for state in inner:
        bits: dict[int, int] = {}
        for byte, target in enumerate(full[state]):
            if target in number:
                bits[number[target]] = bits.get(number[target], 0) | 1 << byte
        rows.append(tuple((members, target) for target, members in bits.items()))
    if last is None:
        return ExplicitAutomaton(tuple(rows), (True,) * len(rows))
    return ExplicitAutomaton((*rows, ()), (*(False for _ in rows), True))
