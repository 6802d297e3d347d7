"""Tools in a row, in OpenAI's form, and how a model family writes a call of one.

A "tools" pattern says which tools there are and which must be called; together with a `ToolFormat`, known
once the model is, it becomes a "tags" pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jfbatch.errors import UsageError
from jfbatch.rows.json_text import is_utf8
from jfbatch.rows.row import Pattern, RowProblem
from jfbatch.rows.tags import Tag, tags_pattern

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


@dataclass(frozen=True)
class ToolFormat:
    """How a call is written: `text`, with NAME where the tool's name stands and ARGS for its arguments."""

    name: str
    text: str

    @property
    def _parts(self) -> tuple[str, str, str]:
        """The texts before the name, between name and arguments, and after them."""
        before, _, rest = self.text.partition("NAME")
        between, _, after = rest.rpartition("ARGS")
        return before, between, after

    @property
    def trigger(self) -> str:
        """What no text beside calls holds: the marker that a call begins with, else all before the name."""
        before = self._parts[0]
        marker = _MARKER.match(before)
        return marker.group() if marker else before

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that a vocabulary may have as tokens of their own."""
        return tuple(dict.fromkeys(_MARKER.findall(self.text)))

    def tag(self, place: str, name: str, schema: Any) -> Tag:
        """A call of one tool."""
        before, between, after = self._parts
        return Tag(place, f"{before}{name}{between}", schema, after, name)


PRESETS = {
    preset.name: preset
    for preset in (
        ToolFormat("hermes", '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'),
        ToolFormat("function", "<function=NAME>ARGS</function>"),
        ToolFormat("llama", '{"name": "NAME", "parameters": ARGS}'),
    )
}
"""hermes: Qwen, Hermes, SmolLM; function: Llama 3.1's custom tools; llama: Llama 3.1 and later, as JSON."""


def tool_format(setting: str) -> ToolFormat | None:
    """The format that --tool-format names or writes out (\\n is a line end); None for auto.

    Raises UsageError.
    """
    if setting == "auto":
        return None
    if setting in PRESETS:
        return PRESETS[setting]
    if not is_utf8(setting):
        raise UsageError("--tool-format: not UTF-8 text")
    chosen = ToolFormat("own", setting.replace("\\n", "\n"))
    before, rest = setting.partition("NAME")[::2]
    if not before or "ARGS" not in rest:
        raise UsageError(
            f"--tool-format: {setting!r} is none of auto, {', '.join(PRESETS)}, nor a text that begins with "
            "a trigger and has NAME and then ARGS, such as '<call:NAME>ARGS</call>'"
        )
    return chosen


def format_in(template: str) -> ToolFormat | None:
    """The format that a chat template shows; hermes where it knows no tools, None where it is another one."""
    if "<parameter=" in template:
        return None
    if "<tool_call>" in template:
        return PRESETS["hermes"]
    if "<function=" in template:
        return PRESETS["function"]
    if re.search(r'"name"\s*:.*"parameters"\s*:', template, re.DOTALL):
        return PRESETS["llama"]
    return None if takes_tools(template) else PRESETS["hermes"]


def takes_tools(template: str) -> bool:
    """Whether a chat template puts tools into its prompt."""
    return re.search(r"\btools\b", template) is not None


def described(tools: list[Any], chosen: ToolFormat) -> str:
    """Tools told in plain words, for chat templates that know none."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    sample = chosen.text.replace("NAME", "the function's name", 1)
    before, _, after = sample.rpartition("ARGS")
    return (
        "You may call these functions, described as JSON, one a line:\n"
        f"{listed}\n"
        "To call a function, write\n"
        f"{before}its arguments as a JSON object{after}"
    )


def read_tools(fields: Mapping[str, Any], parsed: Mapping[str, Any]) -> Pattern | None:
    """A row's "tools" pattern; None where it has no tools or may call none. Raises RowProblem.

    `parsed` holds the values of `fields` that may have been given as JSON text.
    """
    tools, choice = parsed.get("tools"), parsed.get("tool_choice")
    parallel = fields.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise RowProblem("parallel_tool_calls must be true or false", "parallel_tool_calls")
    names = _tool_names(tools) if tools is not None else []
    wanted = _choice(choice, names)
    if wanted == "none" or not names:
        return None
    spec = {"tools": tools, "choice": wanted, "parallel": parallel is not False}
    return Pattern("tools", json.dumps(spec, ensure_ascii=False, separators=(",", ":")))


def _tool_names(tools: Any) -> list[str]:
    if not isinstance(tools, list):
        raise RowProblem("tools must be a list", "tools")
    names: list[str] = []
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise RowProblem(
                f'{place} must be {{"type": "function", "function": {{"name", "parameters"}}}}', "tools"
            )
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RowProblem(
                f"{place}.function.name must be 1 to 128 letters, digits or any of _ . : / -", "tools"
            )
        if name in names:
            raise RowProblem(f"{place}.function.name: a tool {name!r} was listed before", "tools")
        parameters = function.get("parameters")
        if parameters is not None and (
            not isinstance(parameters, dict) or parameters.get("type", "object") != "object"
        ):
            raise RowProblem(f"{place}.function.parameters must be the JSON Schema of an object", "tools")
        names.append(name)
    return names


def _choice(choice: Any, names: list[str]) -> str | dict[str, str]:
    """auto, none, required, or {"name": ...}. Raises RowProblem on others and on tools that are not there."""
    if choice is None or choice in ("auto", "none"):
        return str(choice or "auto")
    if choice == "required":
        if not names:
            raise RowProblem("tool_choice is required, but there are no tools", "tool_choice")
        return "required"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise RowProblem(
            'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if name not in names:
        known = ", ".join(names) or "none"
        raise RowProblem(f"tool_choice names {name!r}, which is not among the tools ({known})", "tool_choice")
    return {"name": name}


@lru_cache(maxsize=1024)
def tools_of(pattern: Pattern) -> tuple[Any, ...]:
    """The tools of a "tools" pattern, as they were given."""
    return tuple(json.loads(pattern.text)["tools"])


def names_left_to_the_model(pattern: Pattern) -> list[str]:
    """The tools of a "tools" pattern that the model chooses from; none where the row names one to call."""
    spec = json.loads(pattern.text)
    named = isinstance(spec["choice"], dict)
    return [] if named else [tool["function"]["name"] for tool in spec["tools"]]


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Parameters that say no type are an object's. Up to draft 7, nothing beside a $ref is read."""
    if "type" in schema:
        return schema
    if "$ref" not in schema or "json-schema.org/draft-0" not in str(schema.get("$schema")):
        return {"type": "object", **schema}
    outer: dict[str, Any] = {
        name: schema[name] for name in ("$schema", "definitions", "$defs") if name in schema
    }
    return {**outer, "type": "object", "allOf": [{"$ref": schema["$ref"]}]}


@lru_cache(maxsize=1024)
def as_tags(pattern: Pattern, chosen: ToolFormat) -> Pattern:
    """A "tools" pattern as a "tags" pattern for models that write calls in this format.

    With the choice auto, calls stand in free text; where calls are required there is nothing but calls, one
    a line, and a tool that is named is called once.
    """
    spec = json.loads(pattern.text)
    choice, tags = spec["choice"], []
    for number, tool in enumerate(spec["tools"]):
        function = tool["function"]
        if isinstance(choice, dict) and choice["name"] != function["name"]:
            continue
        schema = function.get("parameters")
        schema = {"additionalProperties": False} if schema is None else schema
        schema = _of_an_object(schema)
        place = f"tools[{number}].function.parameters"
        tags.append(chosen.tag(place, function["name"], schema))
    once = isinstance(choice, dict) or not spec["parallel"]
    return tags_pattern(
        tags,
        [chosen.trigger],
        text=choice == "auto",
        between="\n",
        least=0 if choice == "auto" else 1,
        most=1 if once else None,
    )
