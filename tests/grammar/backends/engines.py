"""What the tests of the backends share: a vocabulary with every oddity, grammars by name, random outputs."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from jfbatch.errors import GrammarError
from jfbatch.grammar import Grammar, Matcher, Vocabulary
from jfbatch.grammar.backends import (
    BACKENDS,
    Backend,
    check_supported,
    is_installed,
    open_backend,
    why_missing,
)
from jfbatch.grammar.backends.protocol import BackendName, CompiledGrammar, JsonStyle, Objects

# The 256 bytes, texts of several bytes (two ids with the same one), control tokens, then padding.
TEXTS = [
    *(bytes([byte]) for byte in range(256)),
    b'{"',
    b'": ',
    b'", "',
    b"ab",
    b"ab",
    b"12",
    "é".encode(),
    b'"}',
]
END_IDS = (len(TEXTS), len(TEXTS) + 1)
CONTROL_IDS = (len(TEXTS) + 2, len(TEXTS) + 3)
VOCABULARY = Vocabulary.from_tokens([*TEXTS, None, None, None, None], end_ids=END_IDS, size=301)


def param(name: BackendName) -> Any:
    """A test's parameter that is skipped, saying so, where the backend is not installed."""
    missing = pytest.mark.skipif(not is_installed(name), reason=why_missing(name) or "")
    return pytest.param(name, marks=missing)


ALL = [param(name) for name in BACKENDS]
FOREIGN = [param(name) for name in BACKENDS if name != "fsm"]
INSTALLED = [name for name in BACKENDS if is_installed(name)]


@cache
def backend_of(name: BackendName, vocabulary: Vocabulary = VOCABULARY) -> Backend:
    return open_backend(name, vocabulary)


def style_of(name: BackendName) -> JsonStyle:
    """The style that all tests use which do not care; not every backend has another."""
    return "compact" if "compact" in BACKENDS[name].styles else BACKENDS[name].styles[0]


def compiled(
    name: BackendName,
    kind: str,
    pattern: Any,
    style: JsonStyle = "compact",
    objects: Objects = "closed",
    vocabulary: Vocabulary = VOCABULARY,
) -> CompiledGrammar:
    """The grammar of a pattern. `pattern` is a text, or a value for a schema or choice."""
    text = pattern if isinstance(pattern, str) else json.dumps(pattern, ensure_ascii=False)
    check_supported(name, kind, style, objects, strict=False)
    if name == "fsm":
        return Grammar.from_pattern(kind, text, vocabulary, style, objects)
    return backend_of(name, vocabulary).compile(kind, text, style, objects)


def ids(mask: np.ndarray[Any, np.dtype[np.uint32]]) -> list[int]:
    """The token ids whose bits are set."""
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found


def content(mask: np.ndarray[Any, np.dtype[np.uint32]]) -> list[int]:
    return [token_id for token_id in ids(mask) if token_id not in END_IDS]


def feed(matcher: Matcher, text: bytes) -> None:
    """Accept a text byte by byte."""
    for byte in text:
        matcher.accept_token(byte)


def takes(grammar: CompiledGrammar, text: bytes) -> bool:
    """Whether the text is an output of the grammar."""
    matcher = grammar.matcher()
    try:
        feed(matcher, text)
    except GrammarError:
        return False
    return matcher.is_accepting()


def random_tokens(
    grammar: CompiledGrammar, chance: random.Random, most: int = 12, plain: bool = False
) -> list[int]:
    """The ids of a random output: any allowed tokens, from `most` on the ending.

    `plain`: printable ASCII but the backslash where there is a choice, so that what texts say differs and
    not how they spell it.
    """
    matcher = grammar.matcher()
    taken: list[int] = []
    while not matcher.is_finished():
        if len(taken) >= most:
            ending = list(matcher.shortest_ending())
            feed(matcher, bytes(ending))
            return taken + ending
        allowed = ids(matcher.token_mask())
        if plain:
            allowed = [one for one in allowed if one in END_IDS or is_plain(TEXTS[one])] or allowed
        token_id = chance.choice(allowed)
        if token_id in END_IDS:
            break
        matcher.accept_token(token_id)
        taken.append(token_id)
    return taken


def is_plain(text: bytes) -> bool:
    return all(0x20 <= byte < 0x7F and byte != 0x5C for byte in text)


def text_of(token_ids: list[int]) -> bytes:
    return b"".join(TEXTS[token_id] for token_id in token_ids)
