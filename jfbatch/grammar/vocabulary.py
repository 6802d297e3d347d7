"""A tokenizer as bytes: token id <-> bytes, and the token trie that the mask walk reads.

Everything is built once from the tokenizer and never changes; two vocabularies with the same
fingerprint give the same masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import ModelError
from jfbatch.grammar.spelling import (
    TokenizerDescription,
    describe_file,
    describe_tokenizer,
    spell,
    usual_end_ids,
)


@dataclass(frozen=True, eq=False)
class TokenTrie:
    """All token texts as a trie in depth-first order, siblings in byte order, the root left out.

    Node n stands for the text read from the root down to it. A walk starts at node 0; after node n it
    goes on at n + 1 (its first child, if it has one) or at `subtree_end[n]` to skip what lies below.
    The tokens that end at n are `token_ids[token_start[n]:token_start[n + 1]]`, and those in its whole
    subtree `token_ids[token_start[n]:token_start[subtree_end[n]]]`. All arrays are read-only.
    """

    byte: NDArray[np.uint8]  # [nodes] the last byte of the node's text
    depth: NDArray[np.uint16]  # [nodes] the length of the node's text, from 1
    subtree_end: NDArray[np.int32]  # [nodes] the first node after the subtree
    token_start: NDArray[np.int32]  # [nodes + 1] offsets into token_ids
    token_ids: NDArray[np.int32]  # [content tokens] in depth-first order, equal texts by id

    def __len__(self) -> int:
        return len(self.byte)

    @cached_property
    def max_depth(self) -> int:
        """The length of the longest token in bytes (0 for an empty trie)."""
        return int(self.depth.max(initial=0))


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer as the grammar sees it.

    `size` is V, the width of the model's logits; `token_bytes[id]` is what the id adds to the text, None
    for ids that are never content (control, padded, unused); `end_ids` finish an output. Where
    `adds_prefix_space` is true, tokenizing a text gives ids whose joined bytes start with one space more
    than the text.
    """

    size: int
    token_bytes: tuple[bytes | None, ...]
    end_ids: frozenset[int]
    adds_prefix_space: bool
    trie: TokenTrie
    fingerprint: str

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        size: int | None = None,
        end_ids: Iterable[int] | None = None,
        control_ids: Iterable[int] = (),
        markers: Iterable[str] = (),
    ) -> Vocabulary:
        """The vocabulary of a transformers fast tokenizer (or a `tokenizers.Tokenizer`).

        `size` is the logits' width (config.vocab_size), by default the tokenizer's own; `end_ids` the ids of
        generation_config.eos_token_id, by default the tokenizer's eos; `control_ids` further ids that are
        never content. `markers` are texts, such as <tool_call>, that outputs may hold: a token that is
        written so is content, special or not. Raises ModelError on a tokenizer whose ids have no bytes of
        their own.
        """
        return cls._from_description(describe_tokenizer(tokenizer), size, end_ids, control_ids, markers)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        size: int | None = None,
        end_ids: Iterable[int] | None = None,
        control_ids: Iterable[int] = (),
    ) -> Vocabulary:
        """The vocabulary of a tokenizer.json or tokenizer.json.gz; the arguments are from_tokenizer's.

        Without `end_ids`, tokenizer_config.json and generation_config.json beside the file name them, else
        the special tokens with a usual end name (<|im_end|>, </s>, ...) are taken.
        """
        return cls._from_description(describe_file(path), size, end_ids, control_ids)

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequence[bytes | None],
        end_ids: Iterable[int] = (),
        *,
        size: int | None = None,
        adds_prefix_space: bool = False,
    ) -> Vocabulary:
        """A vocabulary of the given texts, indexed by id. Empty texts and end ids become None."""
        ends = frozenset(int(token_id) for token_id in end_ids)
        width = len(tokens) if size is None else size
        if ends and not 0 <= min(ends) <= max(ends) < width:
            raise ModelError(f"end token {max(ends)} lies outside the model's {width} logits")
        table = list(tokens[:width]) + [None] * (width - len(tokens))
        for token_id in ends:
            table[token_id] = None
        texts = tuple(text or None for text in table)
        return cls(
            size=width,
            token_bytes=texts,
            end_ids=ends,
            adds_prefix_space=adds_prefix_space,
            trie=build_trie(texts),
            fingerprint=_fingerprint(texts, ends, adds_prefix_space),
        )

    @classmethod
    def _from_description(
        cls,
        description: TokenizerDescription,
        size: int | None,
        end_ids: Iterable[int] | None,
        control_ids: Iterable[int],
        markers: Iterable[str] = (),
    ) -> Vocabulary:
        table = spell(description, frozenset(markers))
        for token_id in control_ids:
            if 0 <= token_id < len(table):
                table[token_id] = None
        if end_ids is None:
            end_ids = description.end_ids or usual_end_ids(description)
        return cls.from_tokens(table, end_ids, size=size, adds_prefix_space=description.adds_prefix_space)

    @property
    def words(self) -> int:
        """The length of a token mask in uint32 words: ceil(V/32)."""
        return (self.size + 31) // 32

    @cached_property
    def absent_bytes(self) -> frozenset[int]:
        """The bytes that no token spells alone.

        A text that holds one may be beyond the tokenizer: it drops or replaces what it cannot spell.
        """
        return frozenset(range(256)) - {text[0] for text in self.token_bytes if text and len(text) == 1}

    @cached_property
    def unwritten_bytes(self) -> frozenset[int]:
        """The bytes that no token holds at all: no output can ever have them."""
        return frozenset(range(256)) - frozenset(b"".join(text for text in self.token_bytes if text))

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """The joined bytes of the ids; ids that are never content add nothing."""
        return b"".join(self.token_bytes[token_id] or b"" for token_id in token_ids)


def build_trie(token_bytes: Sequence[bytes | None]) -> TokenTrie:
    """The trie of all texts that are not None; index = token id. Takes O(total bytes * log) time.

    Sorted texts are the depth-first order: each text adds the nodes past the prefix it shares with the
    text before it, and only its last node can end a token.
    """
    content = [token_id for token_id, text in enumerate(token_bytes) if text]
    ids = sorted(content, key=token_bytes.__getitem__)  # type: ignore[arg-type]
    texts = [token_bytes[token_id] or b"" for token_id in ids]
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    data = np.frombuffer(b"".join(texts), dtype=np.uint8)
    starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]

    shared = _shared_prefixes(data, starts, lengths)
    new_nodes = lengths - shared  # 0 where the text equals the one before
    node_end = np.cumsum(new_nodes)
    count = int(node_end[-1]) if len(node_end) else 0
    # Node k of a text is its byte shared + k, so positions run on within each text.
    position = np.arange(count) + np.repeat(starts + shared - (node_end - new_nodes), new_nodes)
    depth = position - np.repeat(starts, new_nodes) + 1

    ending = np.bincount(node_end - 1, minlength=count) if count else np.zeros(0, dtype=np.int64)
    arrays = (
        data[position],
        depth.astype(np.uint16),
        _subtree_ends(depth).astype(np.int32),
        np.concatenate(([0], np.cumsum(ending))).astype(np.int32),
        np.array(ids, dtype=np.int32),
    )
    for array in arrays:
        array.setflags(write=False)
    return TokenTrie(*arrays)


def _shared_prefixes(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many first bytes each sorted text has in common with the text before it. int64[texts]"""
    shared = np.zeros(len(starts), dtype=np.int64)
    alike = np.arange(1, len(starts))  # texts still equal to their predecessor up to `length`
    length = 0
    while len(alike):
        alike = alike[(lengths[alike] > length) & (lengths[alike - 1] > length)]
        alike = alike[data[starts[alike] + length] == data[starts[alike - 1] + length]]
        length += 1
        shared[alike] = length
    return shared


def _subtree_ends(depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first node after each node's subtree, from the depths in depth-first order. int64[nodes]"""
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(1, int(depth.max(initial=0)) + 2))
    levels = [order[low:high] for low, high in pairwise(bounds)]
    sizes = np.ones(len(depth), dtype=np.int64)
    for parents, children in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
        parent = parents[np.searchsorted(parents, children) - 1]
        np.add.at(sizes, parent, sizes[children])
    return np.arange(len(depth)) + sizes


def _fingerprint(
    token_bytes: tuple[bytes | None, ...], end_ids: frozenset[int], adds_prefix_space: bool
) -> str:
    """SHA-256 over everything that a mask or a retokenised text can depend on."""
    lengths = np.array([-1 if text is None else len(text) for text in token_bytes], dtype="<i4")
    digest = hashlib.sha256(b"jfbatch vocabulary 1\0")
    digest.update(repr((len(token_bytes), sorted(end_ids), adds_prefix_space)).encode())
    digest.update(lengths.tobytes())
    digest.update(b"".join(text for text in token_bytes if text is not None))
    return digest.hexdigest()
