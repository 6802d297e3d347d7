"""What a backend is, and what it says of itself.

A backend belongs to one vocabulary and makes grammars of patterns; a grammar gives matchers. Its
capabilities are values: the documentation's table, the refusals and the tests are made from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from jfbatch.grammar.grammar import JsonStyle, Objects
from jfbatch.grammar.matcher import Matcher

BackendName = Literal["fsm", "llguidance", "xgrammar", "outlines"]

KINDS = ("schema", "regex", "choice", "grammar", "tags")
STYLES: tuple[JsonStyle, ...] = ("spaced", "compact", "pretty")

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.

    kinds: the kinds of patterns it takes -> what is special about them ("" if nothing). styles: the JSON
    layouts it writes. vouches: whether it names every keyword of a schema that it does not hold; where it
    does not, outputs may be wrong and are checked. The texts are for the documentation.
    """

    name: BackendName
    title: str
    tested_version: str  # "" for our own
    kinds: Mapping[str, str]
    styles: tuple[JsonStyle, ...]
    vouches: bool
    recursion: str
    undeclared_properties: str
    forced_bytes: str
    endings: str
    rollback: str
    notes: tuple[str, ...] = field(default=())


class CompiledGrammar(Protocol):
    """A pattern made ready by some backend; shared by all rows of the pattern."""

    @property
    def backend(self) -> BackendName:
        """Which backend made it."""
        ...

    @property
    def unenforced(self) -> tuple[str, ...]:
        """What its matchers may let through although the pattern forbids it; () if nothing."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """For people."""
        ...

    def matcher(self) -> Matcher:
        """A new position at the start of an output."""
        ...

    def fault(self, text: bytes) -> str | None:
        """What is wrong with a complete output of a pattern that is no schema; None if nothing is known."""
        ...


@runtime_checkable
class ForeignGrammar(CompiledGrammar, Protocol):
    """A grammar of another engine."""

    def prepare(self) -> None:
        """Make ahead what endings need. Raises InvalidGrammar."""
        ...


class Backend(Protocol):
    """A grammar engine, ready for one vocabulary. Used from several threads."""

    def compile(self, kind: str, text: str, style: JsonStyle, objects: Objects) -> ForeignGrammar:
        """The grammar of a pattern as rows carry it. Raises InvalidGrammar with the backend's reason."""
        ...


def is_gbnf(text: str) -> bool:
    """Whether a grammar file has GBNF's syntax (`root ::= ...`); else it is taken for Lark's."""
    return _GBNF_RULE.search(text) is not None


def one_line(text: str, most: int = 300) -> str:
    """A foreign error message as one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def literal_regex(text: str) -> str:
    """A text as a regular expression of Rust's syntax that matches it alone."""
    return "".join(
        character if character.isalnum() or ord(character) >= 0x80 else f"\\x{ord(character):02x}"
        for character in text
    )
