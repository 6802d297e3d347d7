"""Structural tags in a row: what a "tags" pattern says, and an output taken apart into text and tags.

A "tags" pattern is JSON: {"tags": [{"place", "name", "begin", "schema", "end"}, ...], "triggers": [...],
"text", "between", "least", "most"}. `place` names a tag for people, `name` the tool it calls, if it is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jfbatch.rows.json_text import BRACKETS, STRING
from jfbatch.rows.row import Pattern, RowProblem
from jfbatch.rows.validate import SchemaValidator, validator

# The keys that each object may have; `...` stands for any value, others for the one that changes nothing.
_STRUCTURES_KEYS = {"type": ..., "structures": ..., "triggers": ...}
_STRUCTURE_KEYS = {"type": ..., "begin": ..., "schema": ..., "end": ...}
_FORMATTED_KEYS = {"type": ..., "format": ...}
_FORMAT_KEYS = {
    **{"type": ..., "triggers": ..., "tags": ..., "at_least_one": ..., "stop_after_first": ...},
    "excludes": [],
}
_TAG_KEYS = {"type": ..., "begin": ..., "content": ..., "end": ...}
_CONTENT_KEYS = {"type": ..., "json_schema": ..., "style": "json"}
_NUMERIC = "0123456789.eE+-"
_SELF_DELIMITING = frozenset({"object", "array", "string", "boolean", "null"})
_SCALAR = re.compile(STRING + r"|true|false|null|-?[0-9][0-9.eE+-]*", re.DOTALL)


@dataclass(frozen=True)
class Tag:
    """`begin`, a JSON value of `schema`, `end`. `name` is the tool that it calls, None in other tags."""

    place: str
    begin: str
    schema: Any
    end: str
    name: str | None = None

    def validator(self) -> SchemaValidator:
        """What checks its value. Raises InvalidGrammar where the schema is not valid."""
        return validator(Pattern.of_schema(self.schema))


@dataclass(frozen=True)
class Call:
    """A tag that stands in an output, and its JSON value as text."""

    tag: Tag
    arguments: str


@dataclass(frozen=True)
class Tagged:
    """An output taken apart: the text around the tags, and the tags in order."""

    text: str
    calls: tuple[Call, ...]

    @property
    def told(self) -> tuple[str, str]:
        """The text without the white space at its ends, and the calls as JSON.

        [{"name", "arguments"}, ...], arguments being JSON text.
        """
        called = [{"name": call.tag.name, "arguments": call.arguments} for call in self.calls]
        return self.text.strip() if called else self.text, json.dumps(called, ensure_ascii=False)


@dataclass(frozen=True)
class TagSet:
    """The tags of a pattern, and the texts that begin nothing else."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]

    @property
    def calls_tools(self) -> bool:
        return any(tag.name is not None for tag in self.tags)

    def split(self, text: str) -> Tagged:
        """Take an output apart. Raises ValueError saying where it is none of the pattern's."""
        pieces, calls, place = [], [], 0
        while found := self._next_trigger(text, place):
            at, trigger = found
            pieces.append(text[place:at])
            readings = list(self._readings(text, at))
            if not readings:
                raise ValueError(f"{trigger!r} (character {at + 1}) begins no whole call")
            faults = [(call.tag.validator().check(call.arguments), call, stop) for call, stop in readings]
            fault, call, place = next((entry for entry in faults if entry[0] is None), faults[0])
            if fault is not None:
                raise ValueError(f"{call.tag.name or call.tag.place}: {fault}")
            calls.append(call)
        return Tagged("".join([*pieces, text[place:]]), tuple(calls))

    def _next_trigger(self, text: str, place: int) -> tuple[int, str] | None:
        found = [(text.find(trigger, place), trigger) for trigger in self.triggers]
        return min((entry for entry in found if entry[0] >= 0), default=None)

    def _readings(self, text: str, at: int) -> Iterator[tuple[Call, int]]:
        """The whole tags that stand at a place, and where each ends."""
        for tag in self.tags:
            if text.startswith(tag.begin, at):
                start = at + len(tag.begin)
                stop = value_end(text, start)
                if stop is not None and text.startswith(tag.end, stop):
                    yield Call(tag, text[start:stop]), stop + len(tag.end)


@lru_cache(maxsize=1024)
def tag_set(pattern: Pattern) -> TagSet:
    """What a "tags" pattern says."""
    spec = json.loads(pattern.text)
    tags = [Tag(tag["place"], tag["begin"], tag["schema"], tag["end"], tag["name"]) for tag in spec["tags"]]
    return TagSet(tuple(tags), tuple(spec["triggers"]))


def tags_pattern(
    tags: list[Tag],
    triggers: list[str],
    *,
    text: bool = True,
    between: str = "",
    least: int = 0,
    most: int | None = None,
) -> Pattern:
    """The "tags" pattern of these. Raises RowProblem where the output could not be taken apart again."""
    kept = plain_triggers(triggers)
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in kept):
            raise RowProblem(f"{tag.place}: begin {tag.begin!r} starts with none of the triggers")
        if not tag.end or tag.end[0] in _NUMERIC:
            kinds = tag.schema.get("type") if isinstance(tag.schema, dict) else None
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if not all(isinstance(kind, str) and kind in _SELF_DELIMITING for kind in kinds):
                raise RowProblem(
                    f"{tag.place}: the end {tag.end!r} could be part of a number; give another end, or a "
                    "schema whose type is not a number"
                )
    listed = [
        {"place": tag.place, "name": tag.name, "begin": tag.begin, "schema": tag.schema, "end": tag.end}
        for tag in tags
    ]
    spec = {"tags": listed, "triggers": kept, "text": text, "between": between, "least": least, "most": most}
    return Pattern("tags", json.dumps(spec, ensure_ascii=False, separators=(",", ":")))


def plain_triggers(triggers: list[str]) -> list[str]:
    """The triggers without those that begin with another, which would be met first.

    Raises RowProblem where one stands inside another elsewhere: it could never be written.
    """
    kept: list[str] = []
    for trigger in sorted(set(triggers), key=lambda trigger: (len(trigger), trigger)):
        if any(trigger.startswith(shorter) for shorter in kept):
            continue
        for shorter in kept:
            if shorter in trigger:
                raise RowProblem(f"the trigger {shorter!r} stands inside the trigger {trigger!r}")
        kept.append(trigger)
    return kept


def value_end(text: str, start: int) -> int | None:
    """Where the JSON value that begins at `start` ends; None if none does. Brackets are only counted."""
    if text[start : start + 1] not in ("{", "["):
        found = _SCALAR.match(text, start)
        return found.end() if found else None
    depth = 0
    for found in BRACKETS.finditer(text, start):
        if found.group(1):
            depth += 1
        elif found.group(2):
            depth -= 1
            if depth == 0:
                return found.end()
    return None


def read_structural_tag(name: str, value: Any) -> Pattern:
    """A "tags" pattern from vLLM's and XGrammar's structural tags. Raises RowProblem.

    {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}, or {"format": {"type":
    "triggered_tags", "triggers", "tags": [{"begin", "content": {"type": "json_schema", "json_schema"},
    "end"}, ...], "at_least_one", "stop_after_first"}}.
    """
    if not isinstance(value, dict):
        raise RowProblem(f"{name} must be an object")
    least, most = 0, None
    if isinstance(form := value.get("format"), dict):
        _refuse_unknown(name, value, _FORMATTED_KEYS)
        if form.get("type") != "triggered_tags":
            raise RowProblem(f"{name}.format: only the type triggered_tags is understood")
        _refuse_unknown(f"{name}.format", form, _FORMAT_KEYS)
        least = int(_flag(f"{name}.format.at_least_one", form.get("at_least_one")))
        most = 1 if _flag(f"{name}.format.stop_after_first", form.get("stop_after_first")) else None
        entries, place, value = form.get("tags"), f"{name}.format.tags", form
    else:
        _refuse_unknown(name, value, _STRUCTURES_KEYS)
        entries, place = value.get("structures"), f"{name}.structures"
    triggers = value.get("triggers")
    if not _texts(triggers):
        raise RowProblem(f"{name}: triggers must be a list of texts that are not empty")
    if not isinstance(entries, list) or not entries:
        raise RowProblem(f"{place} must be a list of at least one tag")
    tags = [_tag(f"{place}[{number}]", entry) for number, entry in enumerate(entries)]
    return tags_pattern(tags, triggers, least=least, most=most)


def _tag(place: str, entry: Any) -> Tag:
    if not isinstance(entry, dict):
        raise RowProblem(f"{place} must be an object")
    begin, end = entry.get("begin"), entry.get("end")
    end = end[0] if isinstance(end, list) and len(end) == 1 else end
    if not isinstance(begin, str) or not begin or not isinstance(end, str):
        raise RowProblem(f"{place}: begin and end must be texts")
    schema = entry.get("schema")
    _refuse_unknown(place, entry, _TAG_KEYS if "content" in entry else _STRUCTURE_KEYS)
    if "content" in entry:
        content = entry["content"]
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise RowProblem(f"{place}.content: only the type json_schema is understood")
        _refuse_unknown(f"{place}.content", content, _CONTENT_KEYS)
        schema = content.get("json_schema")
    if not isinstance(schema, dict | bool):
        raise RowProblem(f"{place}: its schema is missing or no JSON Schema: an object, true or false")
    return Tag(place, begin, schema, end)


def _refuse_unknown(name: str, value: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key, inner in value.items():
        if inner is not None and known.get(key) is not ... and (key not in known or inner != known[key]):
            raise RowProblem(f"unknown key {name}.{key}")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise RowProblem(f"{name} must be true or false")
    return bool(value)
