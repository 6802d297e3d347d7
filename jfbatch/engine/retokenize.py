"""An output and the bytes that follow it -> the tokens of its new tail.

The tail is retokenised from a boundary behind which the tokenization cannot change, up to a boundary
which what follows cannot change. Both are the same notion, a safe boundary; so the tokens are those
of retokenising the whole text, whatever follows.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

_AFTER_WORD = b'",:]}\n'
_REACH = 64  # bytes looked back at first for a boundary
# A pair of bytes that a safe boundary may lie between, if no token contains it.
_CANDIDATE = re.compile(rb'(?=([^\x00-\x20\x7f]) |([0-9A-Za-z\x80-\xff])[",:\]}\n])', re.DOTALL)


class Tokenization(Protocol):
    """A tokenizer as the engine needs it.

    `encode` adds no special tokens; `token_bytes` is b"" for an id that stands for no text;
    joining the bytes of encode(text) gives text in UTF-8 (where it does not, rows do not jump).
    """

    @property
    def end_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True)
class Retokenized:
    """What an output becomes: its first `keep` tokens, then `certain`, then perhaps `held`.

    `held` are the tokens after the last safe boundary: likely, but what follows could merge with
    them, so they are for the model to confirm.
    """

    keep: int
    certain: list[int]
    held: list[int]


class Retokenizer:
    """Retokenises outputs for one tokenization.

    A boundary inside a text, between bytes x and y, is safe if

    * no token's bytes contain x directly before y: then no merge (BPE) and no piece (Unigram)
      crosses it, and the two sides are tokenized independently; and
    * every pre-tokenizer pattern in use (the GPT-2, Llama 3, Qwen, o200k and DeepSeek families)
      splits there whatever stands around: before a space that follows a character which is not
      white space, and after a letter or digit that one of `",:]}` or a newline follows.

    vocabulary_size: ids to look for crossing tokens in.
    """

    def __init__(self, tokenization: Tokenization, vocabulary_size: int) -> None:
        self._tokenization = tokenization
        self._vocabulary_size = vocabulary_size
        crossed = crossed_pairs(tokenization.token_bytes(token) for token in range(vocabulary_size))
        self._boundary = _boundary_pattern(crossed)
        self._by_bytes: dict[bytes, int] = {}
        self._encode_piece = lru_cache(maxsize=1 << 16)(self._encode_checked)

    def jump(self, text: bytes, ends: list[int], forced: bytes) -> Retokenized | None:
        """The output after `forced` is appended, or None if that makes no token certain.

        text: the output so far; ends[i]: length of text after output token i. Tokens before the
        last safe boundary are left as the model chose them, canonical or not. With held tokens
        appended, the result ends where the text and `forced` end (less an unfinished character).
        """
        whole = _complete_characters(text + forced)
        if len(whole) <= len(text) or len(_complete_characters(text)) != len(text):
            return None
        retokenized = self._retokenize(whole, len(text), ends)
        if retokenized is None:
            return None
        keep, start, ids = retokenized
        stop = self._last_boundary(whole, len(whole) - 1, len(text) + 1)
        count = self._count_up_to(ids, stop - start) if stop else 0
        if count is None:
            return None
        return Retokenized(keep, ids[:count], ids[count:])

    def ending(self, text: bytes, ends: list[int], ending: bytes) -> Retokenized | None:
        """The output after `ending` is appended and nothing follows; None if it cannot be tokenized."""
        retokenized = self._retokenize(text + ending, len(text), ends)
        if retokenized is not None:
            keep, _, ids = retokenized
            return Retokenized(keep, ids, [])
        # The tokenizer cannot give this text back: append the ending in the longest tokens there are.
        pieces = self._longest_tokens(ending)
        return None if pieces is None else Retokenized(len(ends), pieces, [])

    def encode(self, text: bytes) -> list[int] | None:
        """The tokens of a text that starts at a safe boundary; None if the tokenizer cannot give it back.

        The pieces between safe boundaries are tokenized one by one, and most were met before.
        """
        ids: list[int] = []
        start = 0
        for stop in [*self._boundaries(text, 0, len(text)), len(text)]:
            piece = self._encode_piece(text[start:stop])
            if piece is None:
                return None
            ids += piece
            start = stop
        return ids

    def _retokenize(self, whole: bytes, length: int, ends: list[int]) -> tuple[int, int, list[int]] | None:
        """(output tokens kept, start of the retokenised tail, its ids) for `whole`, which is the
        output of `length` bytes and what is appended."""
        keep, start = self._tail(whole, min(length, len(whole) - 1), ends)
        ids = self.encode(whole[start:])
        return None if ids is None else (keep, start, ids)

    def last_boundary(self, text: bytes, low: int) -> int:
        """The last safe boundary in `text` from `low` on, 0 if there is none."""
        return self._last_boundary(text, len(text) - 1, low) or 0

    def tail(self, text: bytes, ends: list[int]) -> tuple[int, int]:
        """(tokens, bytes) of the output `text` before its last safe boundary."""
        return self._tail(text, len(text) - 1, ends)

    def _tail(self, text: bytes, high: int, ends: list[int]) -> tuple[int, int]:
        """(tokens, bytes) before the last safe boundary up to `high` that no output token crosses."""
        while start := self._last_boundary(text, high, 1):
            keep = bisect_left(ends, start) + 1
            if keep <= len(ends) and ends[keep - 1] == start:
                return keep, start
            high = start - 1
        return 0, 0

    def _last_boundary(self, text: bytes, high: int, low: int) -> int | None:
        """The last safe boundary in low..high, both included; high < len(text)."""
        reach = _REACH
        while high >= low:
            start = max(high - reach, low)
            found = self._boundaries(text, start - 1, high + 1)
            if found:
                return found[-1]
            high, reach = start - 1, 4 * reach
        return None

    def _boundaries(self, text: bytes, start: int, stop: int) -> list[int]:
        """The safe boundaries of text between start and stop, neither included, in order."""
        found = [match.end() for match in self._boundary.finditer(text, start, stop)]
        return [
            place
            for place in found
            if text[place - 1] < 0x80 or _ends_in_letter(text[max(place - 4, 0) : place])
        ]

    def _encode_checked(self, text: bytes) -> tuple[int, ...] | None:
        try:
            ids = self._tokenization.encode(text.decode("utf-8"))
        except UnicodeDecodeError:
            return None
        joined = b"".join(self._tokenization.token_bytes(token) for token in ids)
        return tuple(ids) if joined == text else None

    def _longest_tokens(self, text: bytes) -> list[int] | None:
        """`text` cut greedily into the longest tokens; None if some byte has no token."""
        if not self._by_bytes:
            for token in range(self._vocabulary_size - 1, -1, -1):
                self._by_bytes[self._tokenization.token_bytes(token)] = token
        ids, start, longest = [], 0, max(map(len, self._by_bytes))
        while start < len(text):
            for stop in range(min(len(text), start + longest), start, -1):
                if text[start:stop] in self._by_bytes:
                    ids.append(self._by_bytes[text[start:stop]])
                    start = stop
                    break
            else:
                return None
        return ids

    def _count_up_to(self, ids: list[int], length: int) -> int | None:
        """How many of `ids` make exactly `length` bytes; None if a token crosses that place."""
        total = 0
        for count, token in enumerate(ids):
            if total >= length:
                return count if total == length else None
            total += len(self._tokenization.token_bytes(token))
        return len(ids) if total == length else None


def crossed_pairs(vocabulary: Iterable[bytes]) -> frozenset[tuple[int, int]]:
    """The byte pairs (before, after) of possible boundaries that some token contains."""
    joined = np.frombuffer(b"\x00".join(vocabulary), np.uint8).astype(np.uint16)
    present = np.zeros(1 << 16, np.bool_)
    present[joined[:-1] << 8 | joined[1:]] = True
    pairs = (divmod(int(pair), 256) for pair in np.flatnonzero(present))
    return frozenset(pair for pair in pairs if _CANDIDATE.match(bytes(pair)))


def _boundary_pattern(crossed: frozenset[tuple[int, int]]) -> re.Pattern[bytes]:
    """Matches the byte before every boundary of two bytes that no token contains together."""
    choices = []
    for after in b" " + _AFTER_WORD:
        befores = [
            before
            for before in range(256)
            if _CANDIDATE.match(bytes([before, after])) and (before, after) not in crossed
        ]
        if befores:
            members = b"".join(b"\\x%02x" % before for before in befores)
            choices.append(b"[%b](?=\\x%02x)" % (members, after))
    return re.compile(b"|".join(choices) if choices else rb"(?!)", re.DOTALL)


def _ends_in_letter(tail: bytes) -> bool:
    """Whether the last character of up to four bytes of UTF-8 is a letter or digit."""
    while tail and 0x80 <= tail[0] < 0xC0:
        tail = tail[1:]
    return tail.decode("utf-8", "ignore")[-1:].isalnum()


def _complete_characters(text: bytes) -> bytes:
    """`text` without a last character that is not complete yet."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte < 0x80:
            return text
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text if back >= size else text[:-back]
    return text
