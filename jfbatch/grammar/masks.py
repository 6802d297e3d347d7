"""(automaton state, token trie) -> allowed-token bitmask, memoised and shared by all rows.

One walk visits only the trie's live part. States that differ only in counts too far from their
bounds to matter to any token have the same mask, so a string of up to 5000 characters costs one
walk, not 5000. Inside a free JSON string most tokens are plain text: those are allowed together, by
how many characters they have, and only the rest of the vocabulary is walked (the idea of
llguidance's "slices").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.opcodes import OK
from jfbatch.grammar.vocabulary import TokenTrie, Vocabulary, build_trie
from jfbatch.grammar.walk import (
    clamped_state,
    letters_to_free_text,
    only_free_text,
    subtree_heights,
    walk_plain,
    walk_trie,
)

MASK_BUDGET = 256 * 1024 * 1024  # bytes of memoised masks of one grammar


@dataclass(frozen=True, eq=False)
class PlainText:
    """The tokens that are whole characters needing no escape in JSON, and the others.

    up_to     uint32[N + 1, words]   row n: plain tokens of at most n characters (N = the longest)
    trie      the plain tokens
    longest   int32[nodes]           most bytes, hence at least the characters, below a node of `trie`
    others    the trie of all other tokens
    """

    up_to: NDArray[np.uint32]
    trie: TokenTrie
    longest: NDArray[np.int32]
    others: TokenTrie

    @staticmethod
    @lru_cache(maxsize=4)
    def of(vocabulary: Vocabulary) -> PlainText:
        lengths = np.full(vocabulary.size, -1, np.int64)
        others = list(vocabulary.token_bytes)
        plain: list[bytes | None] = [None] * vocabulary.size
        for token, data in enumerate(vocabulary.token_bytes):
            if data and (count := _plain_characters(data)) > 0:
                lengths[token] = count
                others[token], plain[token] = None, data
        longest = int(lengths.max(initial=0))
        bits = np.zeros((longest + 1, vocabulary.words * 32), np.uint8)
        for count in range(1, longest + 1):
            bits[count, : vocabulary.size] = (lengths > 0) & (lengths <= count)
        up_to = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        trie = build_trie(plain)
        return PlainText(up_to, trie, subtree_heights(trie.depth, trie.subtree_end), build_trie(others))


PLAIN_BYTES = np.array([byte >= 0x20 and byte not in b'"\\' for byte in range(256)], np.uint8)


def _plain_characters(data: bytes) -> int:
    """Characters of a text that JSON strings hold as it is, 0 if it is not such a text."""
    if any(not PLAIN_BYTES[byte] for byte in data):
        return 0
    try:
        return len(data.decode("utf-8"))
    except UnicodeDecodeError:
        return 0


class MaskTable:
    """The masks of one automaton over one vocabulary, made on demand."""

    def __init__(self, automaton: Automaton, vocabulary: Vocabulary, budget: int = MASK_BUDGET) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.horizon = vocabulary.trie.max_depth + 1
        self.most = max(16, budget // (4 * vocabulary.words))
        self.masks: dict[int, NDArray[np.uint32]] = {}  # representative state -> mask
        self.representatives: dict[int, int] = {}
        self.walks = 0

    def mask(self, state: int) -> NDArray[np.uint32]:
        """uint32[ceil(V/32)], read-only: bit t = token t may come next from `state`."""
        representative = self.representatives.get(state)
        if representative is None:
            representative = self.automaton.retry(clamped_state, state, self.horizon)
            self.representatives[state] = representative
        mask = self.masks.get(representative)
        if mask is None:
            mask = self.walk(representative)
            if len(self.masks) >= self.most:  # oldest first: long past for the rows in flight
                self.masks.pop(next(iter(self.masks)), None)
            self.masks[representative] = mask
        return mask

    def walk(self, state: int) -> NDArray[np.uint32]:
        """A fresh mask by one walk over the trie."""
        self.walks += 1
        automaton = self.automaton
        if automaton.code.free.any():
            mask = self.plain_mask(state)
            trie = PlainText.of(self.vocabulary).others
        else:
            mask = np.zeros(self.vocabulary.words, np.uint32)
            trie = self.vocabulary.trie
        self.run(walk_trie, state, mask, trie)
        if automaton.is_accepting(state):
            for token in self.vocabulary.end_ids:
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        mask.flags.writeable = False
        return mask

    def plain_mask(self, state: int) -> NDArray[np.uint32]:
        """uint32[words]: the plain tokens that may come next from `state`."""
        plain = PlainText.of(self.vocabulary)
        automaton = self.automaton
        most = len(plain.up_to) - 1
        free = int(automaton.store.free_count[state])
        if free >= most or (free and automaton.retry(only_free_text, state, PLAIN_BYTES)):
            mask: NDArray[np.uint32] = plain.up_to[min(free, most)].copy()
            return mask
        clearing = automaton.retry(letters_to_free_text, state) > 26
        mask = plain.up_to[most].copy() if clearing else np.zeros(self.vocabulary.words, np.uint32)
        self.run(walk_plain, state, mask, plain.trie, plain.longest, clearing=clearing)
        return mask

    def run(
        self,
        kernel: Callable[..., int],
        state: int,
        mask: NDArray[np.uint32],
        trie: TokenTrie,
        longest: NDArray[np.int32] | None = None,
        clearing: bool = False,
    ) -> None:
        """One walk over `trie` from `state`, again from where it stopped while it needs more room."""
        path = np.empty(trie.max_depth + 2, np.int32)
        path[0] = state
        resume = np.zeros(1, np.int64)
        arrays = (trie.byte, trie.depth, trie.subtree_end, trie.token_start, trie.token_ids)
        extra = () if longest is None else (longest,)
        last = () if longest is None else (int(clearing),)
        automaton = self.automaton
        with automaton.lock:
            while True:
                answer = kernel(automaton.code, automaton.store, *arrays, *extra, path, resume, mask, *last)
                if answer == OK:
                    return
                automaton.grow(answer)
