"""Small matchers and tokenizations for the engine's tests; independent of jfbatch.grammar."""

from __future__ import annotations

import gzip
import json
import os
import string
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jfbatch.errors import GrammarError

LETTERS = frozenset(string.ascii_letters.encode())
DIGITS = frozenset(string.digits.encode())
TEXT = frozenset(range(0x20, 0x7F)) - {0x22, 0x5C}


@dataclass(frozen=True)
class Field:
    """low..high bytes out of a set."""

    members: frozenset[int]
    low: int
    high: int


class TemplateMatcher:
    """Literals and Fields one after the other, over a tokenization's vocabulary.

    Deterministic if no Field can take the first byte of what follows it. `finished_by_end`: the
    text is complete only when an end token was taken, as in a grammar that may go on.
    """

    def __init__(self, parts: list[bytes | Field], tokenization: HubTokenization) -> None:
        self.parts = parts
        self.tokenization = tokenization
        self.states = [(0, 0)]
        self.ended = False
        self.mask_calls = 0

    def _step(self, state: tuple[int, int], byte: int) -> tuple[int, int] | None:
        part, offset = state
        while part < len(self.parts):
            content = self.parts[part]
            if isinstance(content, bytes):
                if offset < len(content):
                    return (part, offset + 1) if content[offset] == byte else None
            else:
                if offset < content.high and byte in content.members:
                    return part, offset + 1
                if offset < content.low:
                    return None
            part, offset = part + 1, 0
        return None

    def _walk(self, state: tuple[int, int], data: bytes) -> tuple[int, int] | None:
        current: tuple[int, int] | None = state
        for byte in data:
            if current is None:
                return None
            current = self._step(current, byte)
        return current

    def token_mask(self) -> NDArray[np.uint32]:
        self.mask_calls += 1
        state = self.states[-1]
        key = (tuple(self.parts), state)
        masks = self.tokenization.masks
        if key not in masks:
            firsts = [byte for byte in range(256) if self._step(state, byte) is not None]
            bits = np.zeros(-(-self.tokenization.size // 32) * 32, np.uint8)
            for first in firsts:
                for token, data in self.tokenization.by_first_byte[first]:
                    bits[token] = self._walk(state, data) is not None
            if self.is_accepting():
                bits[list(self.tokenization.end_ids)] = 1
            masks[key] = np.packbits(bits, bitorder="little").view(np.uint32)
        return masks[key]

    def state_key(self) -> tuple[object, ...]:
        return tuple(self.parts), self.states[-1], self.ended

    def accept_token(self, token_id: int) -> None:
        if token_id in self.tokenization.end_ids:
            if not self.is_accepting():
                raise GrammarError("an end token, but the text is not complete")
            self.ended = True
            self.states.append(self.states[-1])
            return
        data = self.tokenization.token_bytes(token_id)
        state = self._walk(self.states[-1], data)
        if state is None or not data:
            raise GrammarError(f"{data!r} is not allowed here")
        self.states.append(state)

    def rollback(self, count: int) -> None:
        if count >= len(self.states):
            raise GrammarError("rollback past the start")
        if count:
            del self.states[-count:]
            self.ended = False

    def forced_bytes(self) -> bytes:
        state, forced = self.states[-1], bytearray()
        while not self._accepts(state):
            following = [byte for byte in range(256) if self._step(state, byte) is not None]
            if len(following) != 1:
                break
            forced.append(following[0])
            state = self._step(state, following[0])
        return bytes(forced)

    def _accepts(self, state: tuple[int, int]) -> bool:
        part, offset = state
        for content in self.parts[part:]:
            needed = len(content) if isinstance(content, bytes) else content.low
            if offset < needed:
                return False
            offset = 0
        return True

    def is_accepting(self) -> bool:
        return self._accepts(self.states[-1])

    def is_finished(self) -> bool:
        state = self.states[-1]
        more = any(self._step(state, byte) is not None for byte in range(256))
        return self.ended or (self._accepts(state) and not more)

    def shortest_ending(self) -> bytes:
        state, ending = self.states[-1], bytearray()
        part, offset = state
        for content in self.parts[part:]:
            if isinstance(content, bytes):
                ending += content[offset:]
            else:
                ending += bytes([min(content.members)]) * max(content.low - offset, 0)
            offset = 0
        return bytes(ending)


class FreeMatcher:
    """Every token is allowed; end tokens too if `may_end`."""

    def __init__(self, size: int, end_ids: frozenset[int] = frozenset(), may_end: bool = True) -> None:
        self.accepted: list[int] = []
        bits = np.ones(-(-size // 32) * 32, np.uint8)
        bits[size:] = 0
        if not may_end:
            bits[list(end_ids)] = 0
        self.mask = np.packbits(bits, bitorder="little").view(np.uint32)

    def token_mask(self) -> NDArray[np.uint32]:
        return self.mask

    def state_key(self) -> None:
        return None

    def accept_token(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def rollback(self, count: int) -> None:
        if count > len(self.accepted):
            raise GrammarError("rollback past the start")
        del self.accepted[len(self.accepted) - count :]

    def forced_bytes(self) -> bytes:
        return b""

    def is_accepting(self) -> bool:
        return True

    def is_finished(self) -> bool:
        return False

    def shortest_ending(self) -> bytes:
        return b""


@dataclass
class NumberTokenization:
    """Token t is one character; for models without a tokenizer."""

    size: int
    end_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 0x100 for character in text]

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id + 0x100).encode()


@dataclass
class HubTokenization:
    """A tokenizers.Tokenizer, byte-level or SentencePiece-like, as the engine sees it."""

    tokenizer: Tokenizer
    end_ids: frozenset[int]
    masks: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = self.tokenizer.get_vocab_size()
        byte_level = "ByteLevel" in self.tokenizer.to_str()[-2000:] or _uses_byte_level(self.tokenizer)
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes = [b""] * self.size
        for piece, token in self.tokenizer.get_vocab().items():
            if token not in special and token not in self.end_ids:
                self._bytes[token] = _byte_level(piece) if byte_level else _sentence_piece(piece)
        self.by_first_byte: list[list[tuple[int, bytes]]] = [[] for _ in range(256)]
        for token, data in enumerate(self._bytes):
            if data:
                self.by_first_byte[data[0]].append((token, data))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < self.size else b""


def _uses_byte_level(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


@cache
def _byte_of_character() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level(piece: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


@cache
def tiny_tokenization(vocabulary: int = 400) -> HubTokenization:
    """A byte-level BPE trained here, with GPT-2's pre-tokenizer; its last id ends an output."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        json.dumps({"name": name, "email": f"{name}@example.org", "count": 12, "city": "Graz", "ok": True})
        for name in ("anna", "brian", "carla", "nathan", "annabel", "carlos", "hannah")
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(corpus * 3, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return HubTokenization(tokenizer, frozenset({tokenizer.token_to_id("<|end|>")}))


@cache
def real_tokenization(name: str) -> HubTokenization:
    """One of the real tokenizers below JFBATCH_TEST_DATA; skips the test where it is not there."""
    folder = os.environ.get("JFBATCH_TEST_DATA")
    path = Path(folder or ".") / "tokenizers" / name / "tokenizer.json.gz"
    if not folder or not path.is_file():
        pytest.skip(f"set JFBATCH_TEST_DATA to the folder that holds tokenizers/{name}/tokenizer.json.gz")
    tokenizer = Tokenizer.from_str(gzip.decompress(path.read_bytes()).decode())
    return HubTokenization(tokenizer, frozenset())
