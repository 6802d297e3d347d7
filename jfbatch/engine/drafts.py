"""Likely continuations of a row, for the next step to verify: spans of its prompt, phrases of its group.

A draft is built in bytes, piece by piece: what the grammar forces, else the best guess. Its tokens are
those that jumps would make of the same bytes, and the row's own matcher, walked and rolled back, cuts it
off where the grammar says otherwise. Drafts cost time if they are wrong but never change an output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from jfbatch.engine.retokenize import Retokenizer, Tokenization
from jfbatch.engine.sequence import Sequence
from jfbatch.errors import GrammarError

# A word with what stands before it: the steps in which a copied span is guessed.
_PIECE = re.compile(rb"[^A-Za-z0-9\x80-\xff]*[A-Za-z0-9\x80-\xff]*")
_WORD = re.compile(rb"[A-Za-z0-9\x80-\xff]+")
_MATCHES = (16, 8, 5)  # bytes of the row's text that are looked for in its prompt
_CONTEXT = 16  # bytes of text that a phrase of the group is remembered under


@dataclass(frozen=True)
class Guess:
    """Bytes that may come next. `source` says where they are from: guesses of one source are equally good."""

    data: bytes
    source: str


@dataclass
class Trust:
    """How often the tokens of each source were what the model chose."""

    accepted: dict[str, float] = field(default_factory=dict)
    offered: dict[str, float] = field(default_factory=dict)

    def rate(self, source: str) -> float:
        """The expected share of accepted tokens; two of three before anything is known."""
        return (self.accepted.get(source, 0.0) + 2) / (self.offered.get(source, 0.0) + 3)

    def record(self, source: str, accepted: bool) -> None:
        self.offered[source] = self.offered.get(source, 0.0) + 1
        self.accepted[source] = self.accepted.get(source, 0.0) + accepted


class Phrases:
    """What rows of one group wrote after the same bytes."""

    def __init__(self) -> None:
        self._following: dict[bytes, dict[bytes, int]] = {}

    def learn(self, text: bytes, data: bytes) -> None:
        following = self._following.setdefault(text[-_CONTEXT:], {})
        following[data] = following.get(data, 0) + 1

    def guess(self, text: bytes) -> Guess | None:
        following = self._following.get(text[-_CONTEXT:])
        if not following:
            return None
        total = sum(following.values())
        data = max(following, key=following.__getitem__)
        share = following[data] / (total + 0.5)
        return Guess(data, f"phrase {int(share * 5)}")


class Prompt:
    """A row's prompt as bytes, and where its words start."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.words: dict[bytes, list[int]] = {}
        for match in _WORD.finditer(text):
            for length in (1, 2, 3):
                self.words.setdefault(text[match.start() : match.start() + length], []).append(match.start())

    def guess(self, text: bytes) -> Guess | None:
        """What follows the longest match of the text's end."""
        for length in _MATCHES:
            place = self.text.find(text[-length:]) if len(text) >= length else -1
            if place >= 0:
                return self._at(place + length, f"copy {length}")
        word = re.search(rb"[A-Za-z0-9\x80-\xff]+\Z", text[-16:])
        if word:
            start = word.group()
            for place in self.words.get(start[:3], ()):
                if self.text.startswith(start, place):
                    return self._at(place + len(start), f"word {min(len(start), 3)}")
        return None

    def _at(self, place: int, source: str) -> Guess | None:
        match = _PIECE.match(self.text, place)
        return Guess(match.group(), source) if match and match.group() else None


class Drafter:
    """Gives rows their drafts and learns from what became of them.

    threshold: a draft ends where less than this share of such drafts would be accepted as a whole.
    """

    def __init__(
        self, tokenization: Tokenization, retokenizer: Retokenizer, longest: int = 24, threshold: float = 0.5
    ) -> None:
        self.trust = Trust()
        self.longest = longest
        self.threshold = threshold
        self._tokenization = tokenization
        self._retokenizer = retokenizer
        self._groups: dict[str, Phrases] = {}

    def draft(self, sequence: Sequence) -> None:
        """Let the next step verify what this row probably goes on with."""
        room = min(self.longest, sequence.tokens_left - 1)
        walk = _Walk(sequence, self._tokenization, self._retokenizer)
        walk.accept(sequence.drafts[:room])
        sources = ["held"] * len(walk.ids)
        likely = 1.0
        while len(walk.ids) < room:
            forced = sequence.matcher.forced_bytes()
            guess = Guess(forced, "forced") if forced else self._guess(sequence, walk.text)
            if guess is None:
                break
            likely *= self.trust.rate(guess.source)
            if likely < self.threshold or not walk.extend(guess.data):
                break
            sources = (sources + [guess.source] * len(walk.ids))[: len(walk.ids)]
        walk.undo()
        sequence.set_drafts(walk.ids[:room])
        sequence.draft_sources = dict(enumerate(sources[:room], sequence.certain))

    def _guess(self, sequence: Sequence, text: bytes) -> Guess | None:
        if sequence.prompt is None:
            data = b"".join(map(self._tokenization.token_bytes, sequence.request.prompt_ids))
            sequence.prompt = Prompt(data)
        phrases = self._groups.get(sequence.request.group or "")
        guesses = [phrases.guess(text) if phrases else None, sequence.prompt.guess(text)]
        return max((g for g in guesses if g), key=lambda g: self.trust.rate(g.source), default=None)

    def record(self, sequence: Sequence, place: int, accepted: bool) -> None:
        """The draft at token index `place` was what the output became, or was not."""
        source = sequence.draft_sources.get(place)
        if source is not None:
            self.trust.record(source, accepted)

    def learn(self, sequence: Sequence, start: int, token_id: int) -> None:
        """The model chose `token_id` as what follows the first `start` bytes of the row's output."""
        group = sequence.request.group
        if group is not None and token_id not in self._tokenization.end_ids:
            phrases = self._groups.setdefault(group, Phrases())
            context = bytes(sequence.text[max(start - _CONTEXT, 0) : start])
            phrases.learn(context, self._tokenization.token_bytes(token_id))


class _Walk:
    """A row's output continued by tokens that are not certain; its matcher goes along until `undo`."""

    def __init__(self, sequence: Sequence, tokenization: Tokenization, retokenizer: Retokenizer) -> None:
        self._tokenization = tokenization
        self._retokenizer = retokenizer
        self._matcher = sequence.matcher
        self._certain = bytes(sequence.text)
        self._keep, self._start = retokenizer.tail(self._certain, sequence.ends)
        self._tail = sequence.token_ids[sequence.prompt_tokens + self._keep : sequence.certain]
        self.text = self._certain
        self.ids: list[int] = []

    def accept(self, ids: SequenceOf[int]) -> bool:
        """Go on with these tokens as far as the grammar allows; whether it allowed all."""
        for token in ids:
            if token in self._tokenization.end_ids:
                return False
            try:
                self._matcher.accept_token(token)
            except GrammarError:
                return False
            self.ids.append(token)
            self.text += self._tokenization.token_bytes(token)
        return True

    def extend(self, data: bytes) -> bool:
        """Go on with `data`, tokenized together with what precedes it; whether all of it is allowed."""
        whole = self.text + data
        ids = self._retokenizer.encode(whole[self._start :])
        if ids is not None and ids[: len(self._tail)] == self._tail:
            ids = ids[len(self._tail) :]
        else:
            ids = self._retokenizer.encode(whole[len(self._certain) :])
        if ids is None:
            return False
        same = 0
        while same < min(len(ids), len(self.ids)) and ids[same] == self.ids[same]:
            same += 1
        self._matcher.rollback(len(self.ids) - same)
        dropped = sum(len(self._tokenization.token_bytes(token)) for token in self.ids[same:])
        self.text = self.text[: len(self.text) - dropped]
        del self.ids[same:]
        return self.accept(ids[same:])

    def undo(self) -> None:
        self._matcher.rollback(len(self.ids))
