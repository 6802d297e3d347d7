"""The Matcher protocol over a foreign engine: what all of them need around a bare position.

A `Position` moves by tokens and knows the engine's mask. Which ids are content, when an end token may
come and what is undone is decided here, by our vocabulary alone, so that it is the same for all engines.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarError
from jfbatch.grammar.vocabulary import Vocabulary


class Position(Protocol):
    """A place in a grammar, as an engine keeps it. It never sees end tokens."""

    def mask(self) -> NDArray[np.uint32]:
        """uint32[ceil(V/32)], a new array: the tokens that the engine allows here; other bits may be set."""
        ...

    def key(self) -> Hashable | None:
        """What the position is, if the engine says so (see `Matcher.state_key`)."""
        ...

    def advance(self, token_id: int) -> bool:
        """Move past a content token; False, and not moved, if the engine refuses it."""
        ...

    def undo(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        ...

    def forced(self) -> bytes:
        """The bytes that every continuation starts with, where the text is not complete."""
        ...

    def ending(self, text: bytes) -> bytes:
        """A short text that completes the output `text`. Raises GrammarError if none is found."""
        ...

    def copy(self) -> Position:
        """A position of its own at the same place."""
        ...


class PositionMatcher:
    """One row's position: an engine's, and the tokens that led there (see `Matcher`)."""

    def __init__(self, position: Position, vocabulary: Vocabulary) -> None:
        self._position = position
        self._vocabulary = vocabulary
        self._pieces: list[bytes] = []  # of the accepted content tokens
        self._ended = False
        self._mask: NDArray[np.uint32] | None = None

    def fork(self) -> PositionMatcher:
        """A matcher of its own at the same position."""
        other = PositionMatcher(self._position.copy(), self._vocabulary)
        other._pieces, other._ended, other._mask = self._pieces.copy(), self._ended, self._mask
        return other

    def token_mask(self) -> NDArray[np.uint32]:
        if self._mask is None:
            content, ends = _bits(self._vocabulary)
            if self._ended:
                mask = np.zeros_like(content)
            else:
                mask = self._position.mask()
                mask &= content
                if self._position.accepting():
                    mask |= ends
            mask.setflags(write=False)
            self._mask = mask
        return self._mask

    def state_key(self) -> Hashable | None:
        key = self._position.key()
        return None if key is None else (key, self._ended)

    def accept_token(self, token_id: int) -> None:
        vocabulary = self._vocabulary
        if self._ended:
            raise GrammarError("no token may follow an end token")
        if token_id in vocabulary.end_ids:
            if not self._position.accepting():
                raise GrammarError(f"end token {token_id} where the output is not complete")
            self._ended = True
        else:
            data = vocabulary.token_bytes[token_id] if 0 <= token_id < vocabulary.size else None
            if not data or not self._position.advance(token_id):
                raise GrammarError(f"token {token_id} ({data!r}) is not allowed here")
            self._pieces.append(data)
        self._mask = None

    def rollback(self, count: int) -> None:
        accepted = len(self._pieces) + self._ended
        if not 0 <= count <= accepted:
            raise GrammarError(f"cannot undo {count} tokens of {accepted}")
        if not count:
            return
        content = count - self._ended
        self._ended = False
        if content:
            self._position.undo(content)
            del self._pieces[-content:]
        self._mask = None

    def forced_bytes(self) -> bytes:
        return b"" if self._ended or self._position.accepting() else self._position.forced()

    def is_accepting(self) -> bool:
        return self._position.accepting()

    def is_finished(self) -> bool:
        if self._ended:
            return True
        if not self._position.accepting():
            return False
        content, _ = _bits(self._vocabulary)
        return not bool((self.token_mask() & content).any())

    def shortest_ending(self) -> bytes:
        if self._ended or self._position.accepting():
            return b""
        return self._position.ending(b"".join(self._pieces))


def bitmask(token_ids: NDArray[np.int64], words: int) -> NDArray[np.uint32]:
    """uint32[words] with the bits of these ids set."""
    bits = np.zeros(words * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@lru_cache(maxsize=8)
def _bits(vocabulary: Vocabulary) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The bits of the ids that are content, and of those that end an output. uint32[words] each."""
    content = np.sort(vocabulary.trie.token_ids.astype(np.int64))
    ends = np.array(sorted(vocabulary.end_ids), np.int64)
    return bitmask(content, vocabulary.words), bitmask(ends, vocabulary.words)
