"""From a row to the prompt's token ids: the model's chat template, or the raw text.

The tokenizer does the work; here is only what goes in, and that a fault of one row stays with that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from jfbatch.errors import UsageError
from jfbatch.rows.json_text import parse
from jfbatch.rows.row import Row, RowProblem
from jfbatch.rows.tools import (
    ToolFormat,
    described,
    format_in,
    names_left_to_the_model,
    takes_tools,
    tools_of,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a chat. A template would write any other name into the prompt, a misspelt one too."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the model reads it: the text, and its token ids."""

    text: str
    token_ids: list[int]


class PromptRenderer:
    """Renders rows for one tokenizer (a transformers tokenizer) and one set of prompt settings.

    `system` is put before rows that have no system message of their own. `raw` takes a prompt as it is,
    with just the tokens that the tokenizer itself adds (such as a begin-of-text token). `tool_format` is how
    calls of tools are written, by default as the chat template shows them (a raw prompt's too).
    Raises UsageError where the tokenizer has no chat template and `raw` is off, or `raw` meets `system`.
    """

    def __init__(
        self,
        tokenizer: Any,
        system: str | None = None,
        raw: bool = False,
        tool_format: ToolFormat | None = None,
    ) -> None:
        if raw and system is not None:
            raise UsageError("a system text needs the chat template: give either --system or --raw")
        if not raw and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                "this model's tokenizer has no chat template: give --raw to send prompts as they are"
            )
        self._tokenizer = tokenizer
        self._system = system
        self._raw = raw
        self._template = chat_template(tokenizer)
        self.tool_format = tool_format or format_in(self._template)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts around tool calls that a vocabulary may hold as special tokens."""
        return tuple(self.tool_format.markers) if self.tool_format else ()

    def text(self, row: Row) -> str:
        """The prompt's text. Raises RowProblem where the row does not fit the template or the raw mode."""
        tools = list(tools_of(row.pattern)) if row.pattern is not None and row.pattern.kind == "tools" else []
        if tools and self.tool_format is None:
            raise RowProblem(
                "the model's chat template shows tools in an unknown form: give it with --tool-format",
                "tools",
            )
        if self._raw:
            return _raw_prompt(row)
        messages: list[dict[str, Any]] = row.messages or [{"role": "user", "content": row.prompt or ""}]
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        if tools and self.tool_format is not None and not takes_tools(self._template):
            messages = _with_system(messages, described(tools, self.tool_format))
            tools = []
        if "tool_calls" not in self._template and any("tool_calls" in message for message in messages):
            raise RowProblem(
                "the model's chat template has no place for messages with tool_calls", "messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program: it may raise whatever Python does
            told = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            reason = f"the model's chat template refuses the messages: {' '.join(told.split())}"
            raise RowProblem(reason, "messages") from None
        return str(text)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts made by `text`, in one call of the tokenizer."""
        if not texts:
            return []
        # A chat template writes the begin-of-text token itself; adding it again would double it.
        encoded = self._tokenizer(list(texts), add_special_tokens=self._raw, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has that is an output, so without what a tokenizer adds around one."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def render(self, rows: Sequence[Row]) -> list[Rendered | RowProblem]:
        """One result per row, in order: the rendered prompt, or what is wrong with that row."""
        texts: list[str | RowProblem] = []
        for row in rows:
            try:
                texts.append(self.text(row))
            except RowProblem as problem:
                texts.append(problem)
        ids = iter(self.token_ids([text for text in texts if isinstance(text, str)]))
        results: list[Rendered | RowProblem] = []
        for text in texts:
            if isinstance(text, RowProblem):
                results.append(text)
                continue
            token_ids = next(ids)
            empty = RowProblem("the prompt is empty: it has no tokens", "prompt")
            results.append(Rendered(text, token_ids) if token_ids else empty)
        return results


def chat_template(tokenizer: Any) -> str:
    """The text of a tokenizer's chat templates, "" where it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))


def _raw_prompt(row: Row) -> str:
    """The prompt as it is. Raises RowProblem where the model would not see all that the row says."""
    if row.prompt is None:
        raise RowProblem("messages need the chat template: give a prompt, or leave out --raw", "messages")
    if row.pattern is not None and row.pattern.kind == "tools":
        names = names_left_to_the_model(row.pattern)
        if names and not any(name in row.prompt for name in names):
            raise RowProblem(
                "with --raw the model sees the prompt alone, which names none of the tools "
                f"({', '.join(names)[:100]}): tell of them there, name one as tool_choice, or drop --raw",
                "tools",
            )
    return row.prompt


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with `text` at the end of their system message."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Chat messages as [{"role", "content"}], both text. Raises RowProblem naming the message at fault.

    A content given as parts is joined by newlines; parts other than text are refused. What belongs to tools
    stays: `tool_calls` (whose arguments, JSON text in OpenAI's form, are read: chat templates want values),
    `tool_call_id` and `name`.
    """
    if not isinstance(value, list) or not value:
        raise RowProblem("messages must be a list of at least one message", "messages")
    return [_message(number, message) for number, message in enumerate(value)]


def _message(number: int, message: Any) -> dict[str, Any]:
    name = f"messages[{number}]"
    if not isinstance(message, dict):
        raise RowProblem(f'{name} must be an object with "role" and "content"', "messages")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        shown = repr(role)[:40] if isinstance(role, str) else "a value that is not text"
        raise RowProblem(f"{name}.role must be one of {', '.join(ROLES)}, not {shown}", "messages")
    calls = message.get("tool_calls")
    if calls and content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(f"{name}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise RowProblem(f"{name}.content must be text or a list of text parts", "messages")
    read: dict[str, Any] = {"role": role, "content": content}
    if calls:
        if not isinstance(calls, list):
            raise RowProblem(f"{name}.tool_calls must be a list", "messages")
        read["tool_calls"] = [_call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    for field in ("tool_call_id", "name"):
        if isinstance(message.get(field), str):
            read[field] = message[field]
    return read


def _call(name: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(f'{name} must have a "function" with "name" and "arguments"', "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments)
        except RowProblem as problem:
            raise RowProblem(f"{name}.function.arguments: {problem.reason}", "messages") from None
    if not isinstance(arguments, dict):
        raise RowProblem(f"{name}.function.arguments must be an object", "messages")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _part(name: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowProblem(f"{name} is not text but {kind!r}; only text parts are understood", "messages")
