"""What a row is: the prompt to run, the pattern its output must obey, and who it is.

A row is known by its id, else by a digest of its content and how many equal rows came before it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

PatternKind = Literal["schema", "regex", "choice", "grammar", "tags", "tools"]
BACKENDS = ("auto", "fsm", "llguidance", "xgrammar", "outlines")
"""What a row's `backend` may be: who makes its grammar."""


class RowProblem(ValueError):
    """What is wrong with one row, for its `error` column; `field` is the field at fault, if one is."""

    def __init__(self, reason: str, field: str | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field
        self.column = column


@dataclass(frozen=True)
class Pattern:
    """What an output must obey.

    `text` is the regular expression or grammar as given; for a schema and a choice it is compact JSON
    with the keys in the order in which they were written, because that order is the output's order. "tags"
    (tags.py) and "tools" (tools.py, which become tags once the model is known) are JSON as well.
    """

    kind: PatternKind
    text: str

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of kind and text."""
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def schema(self) -> Any:
        """The parsed JSON Schema of a "schema" pattern. Raises ValueError on another kind."""
        if self.kind != "schema":
            raise ValueError(f"a {self.kind} pattern has no schema")
        return json.loads(self.text)

    @property
    def choices(self) -> list[str]:
        """The texts of a "choice" pattern. Raises ValueError on another kind."""
        if self.kind != "choice":
            raise ValueError(f"a {self.kind} pattern has no choices")
        choices: list[str] = json.loads(self.text)
        return choices

    @staticmethod
    def of_schema(schema: Any) -> Pattern:
        """A "schema" pattern from a parsed JSON Schema (an object, or true/false)."""
        return Pattern("schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))

    @staticmethod
    def of_choices(choices: list[str]) -> Pattern:
        """A "choice" pattern from the texts to choose between."""
        return Pattern("choice", json.dumps(choices, ensure_ascii=False, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input.

    `index` counts rows from 0 over all inputs; `place` is "file:line"; `line` counts from 1 in its file.
    `key` is the row's identity and `content` (16 bytes) the digest of everything that decides its result:
    the same key with another content is a changed row. `extra` has the fields that `keep` names and the
    row has. `backend` is one of BACKENDS where the row chooses. Where `error` is set the row is
    invalid_input, and prompt, messages and pattern mean nothing. `unheeded` names fields that ask for what
    has no effect here (unheeded.py). Otherwise exactly one of `prompt` and
    `messages` ([{"role", "content"}, ...]; see prompt.read_messages) is set.
    """

    index: int
    place: str
    line: int
    key: str
    content: bytes
    id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    pattern: Pattern | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    backend: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    unheeded: tuple[str, ...] = ()


def digest(data: str | bytes) -> bytes:
    """16 bytes of blake2b; text is taken as UTF-8, lone surrogates included."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return hashlib.blake2b(raw, digest_size=16).digest()
