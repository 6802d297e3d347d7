"""From a row to the prompt's token ids: the model's chat template, or the raw text.

The tokenizer does the work; here is only what goes in, and that a fault of one row stays with that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from jfbatch.errors import UsageError
from jfbatch.rows.row import Row, RowProblem

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
    with just the tokens that the tokenizer itself adds (such as a begin-of-text token).
    Raises UsageError where the tokenizer has no chat template and `raw` is off, or `raw` meets `system`.
    """

    def __init__(self, tokenizer: Any, system: str | None = None, raw: bool = False) -> None:
        if raw and system is not None:
            raise UsageError("a system text needs the chat template: give either --system or --raw")
        if not raw and not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                "this model's tokenizer has no chat template: give --raw to send prompts as they are"
            )
        self._tokenizer = tokenizer
        self._system = system
        self._raw = raw

    def text(self, row: Row) -> str:
        """The prompt's text. Raises RowProblem where the row does not fit the template or the raw mode."""
        if self._raw:
            if row.prompt is None:
                raise RowProblem(
                    "messages need the chat template: give a prompt, or leave out --raw", "messages"
                )
            return row.prompt
        messages = row.messages or [{"role": "user", "content": row.prompt or ""}]
        if self._system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            reason = f"the model's chat template refuses the messages: {' '.join(str(error).split())}"
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


def read_messages(value: Any) -> list[dict[str, str]]:
    """Chat messages as [{"role", "content"}], all text. Raises RowProblem naming the message at fault.

    A content given as parts is joined by newlines; parts other than text are refused.
    """
    if not isinstance(value, list) or not value:
        raise RowProblem("messages must be a list of at least one message", "messages")
    return [_message(number, message) for number, message in enumerate(value)]


def _message(number: int, message: Any) -> dict[str, str]:
    name = f"messages[{number}]"
    if not isinstance(message, dict):
        raise RowProblem(f'{name} must be an object with "role" and "content"', "messages")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        shown = repr(role)[:40] if isinstance(role, str) else "a value that is not text"
        raise RowProblem(f"{name}.role must be one of {', '.join(ROLES)}, not {shown}", "messages")
    if isinstance(content, list):
        content = "\n".join(_part(f"{name}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise RowProblem(f"{name}.content must be text or a list of text parts", "messages")
    return {"role": role, "content": content}


def _part(name: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowProblem(f"{name} is not text but {kind!r}; only text parts are understood", "messages")
