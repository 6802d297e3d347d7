"""The Matcher protocol over XGrammar (a pushdown automaton with masks made ahead per rule, in C++)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar.backends.endings import Endings, RowEndings
from jfbatch.grammar.backends.oracle import Oracle, byte_vocabulary
from jfbatch.grammar.backends.position import PositionMatcher
from jfbatch.grammar.backends.protocol import BackendName, Capabilities, is_gbnf, one_line
from jfbatch.grammar.grammar import JsonStyle, Objects
from jfbatch.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

CAPABILITIES = Capabilities(
    name="xgrammar",
    title="XGrammar",
    tested_version="0.2.9",
    kinds={
        "schema": "passes over keywords it does not implement",
        "regex": "ECMA's syntax: no look-around, no back-references, no \\b, no inline flags; "
        "\\d and \\w are ASCII",
        "choice": "",
        "grammar": "GBNF, and its own dialect of Lark's syntax",
    },
    styles=("spaced", "compact", "pretty"),
    vouches=False,
    recursion="yes",
    undeclared_properties="as --objects says",
    forced_bytes="its own call (find_jump_forward_string), in whole characters",
    endings="searched for",
    rollback="its own call; any number of tokens",
    notes=("In the pretty style, values without a schema stay on one line.",),
)

_INDENT = {"spaced": None, "compact": None, "pretty": 2}
_SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":"), "pretty": (",", ": ")}
_PLACE = re.compile(r"^\[[0-9:]+\] [^ ]+:\d+: ")  # [02:57:54] /project/cpp/regex_converter.cc:94:


class XgrammarBackend:
    """XGrammar with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiler = make_compiler(vocabulary)

    @cached_property
    def _byte_compiler(self) -> xgrammar.GrammarCompiler:
        return make_compiler(byte_vocabulary())

    def compile(self, kind: str, text: str, style: JsonStyle, objects: Objects) -> XgrammarGrammar:
        """See `protocol.Backend`."""
        import xgrammar

        compiled = _compile(self._compiler, kind, text, style, objects)
        endings = Endings(
            lambda: _Bytes(
                xgrammar.GrammarMatcher(_compile(self._byte_compiler, kind, text, style, objects)),
                byte_vocabulary(),
            ),
            Oracle(kind, text, style, objects),
        )
        return XgrammarGrammar(compiled, self.vocabulary, endings)


@dataclass(frozen=True, eq=False)
class XgrammarGrammar:
    """A pattern compiled by XGrammar."""

    compiled: xgrammar.CompiledGrammar
    vocabulary: Vocabulary
    endings: Endings
    warnings: tuple[str, ...] = ()

    @property
    def backend(self) -> BackendName:
        return "xgrammar"

    @property
    def unenforced(self) -> tuple[str, ...]:
        return (f"what {CAPABILITIES.title} leaves out",)

    def matcher(self) -> PositionMatcher:
        """A new position at the start of an output."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self.compiled)
        return PositionMatcher(_Position(matcher, self.vocabulary, RowEndings(self.endings)), self.vocabulary)

    def prepare(self) -> None:
        """Make ahead what endings need."""
        self.endings.prepare()

    def fault(self, text: bytes) -> str | None:
        """See `protocol.CompiledGrammar`."""
        return self.endings.oracle.fault(text)


class _Position:
    """See `position.Position`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary, endings: RowEndings) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._endings = endings

    def mask(self) -> NDArray[np.uint32]:
        return _mask(self._matcher, self._vocabulary)[: self._vocabulary.words]

    def key(self) -> None:
        """XGrammar's positions cannot be compared."""

    def advance(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def undo(self, count: int) -> None:
        self._matcher.rollback(count)

    def accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced(self) -> bytes:
        return str(self._matcher.find_jump_forward_string()).encode()

    def ending(self, text: bytes) -> bytes:
        return self._endings.ending(text)

    def copy(self) -> _Position:
        return _Position(self._matcher.fork(), self._vocabulary, self._endings.copy())


class _Bytes:
    """See `endings.ByteWalk`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> bytes:
        bits = _mask(self._matcher, self._vocabulary).view(np.uint8)[:32]
        return bytes(np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.uint8))

    def step(self, byte: int) -> bool:
        return bool(self._matcher.accept_token(byte))

    def undo(self, count: int) -> None:
        self._matcher.rollback(count)

    def accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def completes(self, text: bytes) -> bool:
        ahead = self._matcher.fork()
        return bool(not text or ahead.accept_string(text)) and bool(ahead.is_completed())

    def copy(self) -> _Bytes:
        return _Bytes(self._matcher.fork(), self._vocabulary)


def _mask(matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary) -> NDArray[np.uint32]:
    mask = np.zeros((1, (vocabulary.size + 1 + 31) // 32), np.int32)  # one more: see make_compiler
    try:
        if not matcher.fill_next_token_bitmask(mask, 0):
            mask.fill(-1)
    except RuntimeError as error:
        raise GrammarError(f"xgrammar: {_reason(error)}") from None
    row: NDArray[np.uint32] = mask[0].view(np.uint32)
    return row


def make_compiler(vocabulary: Vocabulary) -> xgrammar.GrammarCompiler:
    """XGrammar's compiler for our vocabulary.

    It has one id more, which ends an output: `position.py` deals with the real end tokens, of which a
    vocabulary may have none or several.
    """
    import xgrammar

    end = vocabulary.size
    tokens = [*(text or b"" for text in vocabulary.token_bytes), b"<end of the output>"]
    information = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=end + 1, stop_token_ids=[end]
    )
    return xgrammar.GrammarCompiler(information, max_threads=1, cache_enabled=False)


def _compile(
    compiler: xgrammar.GrammarCompiler, kind: str, text: str, style: JsonStyle, objects: Objects
) -> xgrammar.CompiledGrammar:
    from xgrammar import Grammar as XgrammarSource

    try:
        if kind == "schema":
            return compiler.compile_json_schema(
                text,
                any_whitespace=False,
                indent=_INDENT[style],
                separators=_SEPARATORS[style],
                strict_mode=objects == "closed",
            )
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "choice":
            texts = " | ".join(map(_literal, json.loads(text)))
            return compiler.compile_grammar(XgrammarSource.from_ebnf(f"root ::= {texts}\n"))
        if is_gbnf(text):
            return compiler.compile_grammar(XgrammarSource.from_ebnf(text))
        return compiler.compile_lark(text)
    except (RuntimeError, ValueError) as error:
        raise InvalidGrammar(f"xgrammar: {_reason(error)}") from None


def _literal(text: str) -> str:
    """A text as a literal of XGrammar's EBNF."""
    characters = (
        character if character.isalnum() or character == " " else f"\\U{ord(character):08x}"
        for character in text
    )
    return f'"{"".join(characters)}"'


def _reason(error: Exception) -> str:
    return one_line(_PLACE.sub("", str(error)))
