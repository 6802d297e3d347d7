"""The Matcher protocol over llguidance (a lexer of derivatives under an Earley parser, in Rust).

Every pattern goes in as a Lark grammar with `no_forcing`, without which masks hold only the tokens that
llguidance's own tokenization would take in forced text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar.backends.endings import Endings, RowEndings
from jfbatch.grammar.backends.oracle import Oracle, byte_vocabulary
from jfbatch.grammar.backends.position import PositionMatcher
from jfbatch.grammar.backends.protocol import BackendName, Capabilities, is_gbnf, literal_regex, one_line
from jfbatch.grammar.grammar import JsonStyle, Objects
from jfbatch.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CAPABILITIES = Capabilities(
    name="llguidance",
    title="llguidance",
    tested_version="1.9.1",
    kinds={
        "schema": "refuses keywords it does not implement",
        "regex": "Rust's syntax: no look-around, no back-references, no \\b",
        "choice": "",
        "grammar": "GBNF, and its own dialect of Lark's syntax, with a greedy lexer",
    },
    styles=("spaced", "compact"),
    vouches=False,
    recursion="yes",
    undeclared_properties="closed, unless the schema joins subschemas (allOf, if, ...)",
    forced_bytes="its own call (compute_ff_bytes)",
    endings="searched for",
    rollback="its own call; any number of tokens",
)

_OURS = {"no_forcing": True}
_OPTION_LINE = "%llguidance {}\n"
_OPTIONS = re.compile(r"^[ \t]*%llguidance[ \t]*(.*)(?:\n|$)", re.MULTILINE)
_HEADER = _OPTION_LINE.format(json.dumps(_OURS))
_SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":")}
# Where these stand, a subschema may be a part of a conjunction, and closing it could leave nothing.
_JOINING = frozenset(
    {"allOf", "if", "not", "dependentSchemas", "dependencies", "unevaluatedProperties", "extends"}
)
_ALTERNATIVES = frozenset({"anyOf", "oneOf", "$ref", "$dynamicRef"})


class LlguidanceBackend:
    """llguidance with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = make_tokenizer(vocabulary)

    @cached_property
    def _byte_tokenizer(self) -> LLTokenizer:
        return make_tokenizer(byte_vocabulary())

    def compile(self, kind: str, text: str, style: JsonStyle, objects: Objects) -> LlguidanceGrammar:
        """See `protocol.Backend`."""
        source = grammar_text(kind, text, style, objects)
        start = _start(self._tokenizer, source)
        endings = Endings(
            lambda: _Bytes(_start(self._byte_tokenizer, source), byte_vocabulary().size),
            Oracle(kind, text, style, objects),
        )
        return LlguidanceGrammar(start, self.vocabulary, endings, tuple(start.get_grammar_warnings()))


@dataclass(frozen=True, eq=False)
class LlguidanceGrammar:
    """A pattern compiled by llguidance."""

    start: LLMatcher  # never moved
    vocabulary: Vocabulary
    endings: Endings
    warnings: tuple[str, ...]

    @property
    def backend(self) -> BackendName:
        return "llguidance"

    @property
    def unenforced(self) -> tuple[str, ...]:
        return (f"what {CAPABILITIES.title} leaves out",)

    def matcher(self) -> PositionMatcher:
        """A new position at the start of an output."""
        position = _Position(self.start.deep_copy(), self.vocabulary, RowEndings(self.endings))
        return PositionMatcher(position, self.vocabulary)

    def prepare(self) -> None:
        """Make ahead what endings need."""
        self.endings.prepare()

    def fault(self, text: bytes) -> str | None:
        """See `protocol.CompiledGrammar`."""
        return self.endings.oracle.fault(text)


class _Position:
    """See `position.Position`."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, endings: RowEndings) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._endings = endings

    def mask(self) -> NDArray[np.uint32]:
        mask = np.zeros((self._vocabulary.size + 1 + 31) // 32, np.uint32)  # one more: see make_tokenizer
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask[: self._vocabulary.words]

    def key(self) -> None:
        """llguidance's positions cannot be compared."""

    def advance(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def undo(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def forced(self) -> bytes:
        forced: bytes = self._matcher.compute_ff_bytes()
        self._check()
        return forced

    def ending(self, text: bytes) -> bytes:
        return self._endings.ending(text)

    def copy(self) -> _Position:
        return _Position(self._matcher.deep_copy(), self._vocabulary, self._endings.copy())

    def _check(self) -> None:
        """llguidance keeps errors (such as a parser that grew too complex) instead of raising them."""
        if self._matcher.is_error():
            raise GrammarError(f"llguidance: {_reason(self._matcher)}")


class _Bytes:
    """See `endings.ByteWalk`. `end` is the id of the token that ends an output."""

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self._matcher = matcher
        self._end = end

    def allowed(self) -> bytes:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[:32]
        return bytes(np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.uint8))

    def step(self, byte: int) -> bool:
        return bool(self._matcher.try_consume_tokens([byte]) == 1)

    def undo(self, count: int) -> None:
        self._matcher.rollback(count)

    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def completes(self, text: bytes) -> bool:
        return bool(self._matcher.validate_tokens([*text, self._end]) == len(text) + 1)

    def copy(self) -> _Bytes:
        return _Bytes(self._matcher.deep_copy(), self._end)


class _Tokens:
    """A vocabulary as llguidance's TokenizerWrapper wants a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*(text or b"" for text in vocabulary.token_bytes), b""]
        self.eos_token_id = vocabulary.size
        self.bos_token_id = None
        self.special_token_ids = [token_id for token_id, text in enumerate(self.tokens) if not text]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("no grammar of ours lets llguidance tokenize")


def make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Our vocabulary as llguidance's.

    It has one id more, which ends an output: `position.py` deals with the real end tokens, of which a
    vocabulary may have none or several.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    end = vocabulary.size
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), n_vocab=end + 1, eos_token=end)


def grammar_text(kind: str, text: str, style: JsonStyle, objects: Objects) -> str:
    """A pattern as a Lark grammar of llguidance's dialect. Raises InvalidGrammar."""
    if kind == "schema":
        schema = json.loads(text)
        if schema is False:
            raise InvalidGrammar("llguidance: no value can satisfy the schema")
        schema = {} if schema is True else schema
        if objects == "closed":
            schema = closed(schema)
        item, key = _SEPARATORS[style]
        layout = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
        return f"{_HEADER}start: %json {json.dumps({**schema, 'x-guidance': layout})}\n"
    if kind == "regex":
        return f"{_HEADER}start: /{_lark_regex(text)}/\n"
    if kind == "choice":
        return f"{_HEADER}start: /{_lark_regex('|'.join(map(literal_regex, json.loads(text))))}/\n"
    from llguidance import grammar_from

    try:
        lark = grammar_from("gbnf", text) if is_gbnf(text) else text
    except ValueError as error:
        raise InvalidGrammar(f"llguidance: {one_line(str(error))}") from None
    return _with_options(lark)


def _with_options(lark: str) -> str:
    """A Lark grammar whose options (a line "%llguidance {...}") have ours among them."""
    given = _OPTIONS.search(lark)
    if given is None:
        return _HEADER + lark
    try:
        options = json.loads(given[1])
    except ValueError:
        raise InvalidGrammar("llguidance: what follows %llguidance is not JSON on one line") from None
    return lark[: given.start()] + _OPTION_LINE.format(json.dumps({**options, **_OURS})) + lark[given.end() :]


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever nothing is said of undeclared properties.

    llguidance has no setting for it. A schema in which subschemas are joined stays as it is: closing one of
    two that must both hold forbids what the other declares.
    """
    return _closed(schema) if all(_stands_alone(node) for node in _subschemas(schema)) else schema


def _subschemas(schema: Any) -> Iterable[dict[str, Any]]:
    """Every object in the schema; those that are no schemas do no harm."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _subschemas(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _subschemas(value)


def _stands_alone(node: dict[str, Any]) -> bool:
    return not (node.keys() & _JOINING or ("properties" in node and node.keys() & _ALTERNATIVES))


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(value) for value in node]
    if not isinstance(node, dict):
        return node
    result = {}
    for name, value in node.items():
        if name in ("enum", "const", "default", "examples"):
            result[name] = value
        elif name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            result[name] = {key: _closed(inner) for key, inner in value.items()}
        else:
            result[name] = _closed(value)
    if "properties" in node and not node.keys() & {"additionalProperties", "patternProperties"}:
        result["additionalProperties"] = False
    return result


def _start(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        raise InvalidGrammar(f"llguidance: {_reason(matcher)}")
    return matcher


def _reason(matcher: LLMatcher) -> str:
    """llguidance's error without the grammar and the parser's state that it prints below."""
    text = re.split(r"\n\s*(?:\d+ \||<state>|<grammar>)", matcher.get_error())[0]
    return one_line(re.sub(r"^at \d+\(\d+\): ", "", text))


def _lark_regex(pattern: str) -> str:
    """A regular expression between Lark's slashes, its classes as Unicode has them."""
    from llguidance._lib import regex_to_lark

    lark: str = regex_to_lark(pattern, use_ascii="")
    return lark
