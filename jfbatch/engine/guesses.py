"""Where drafts come from: what a row's prompt says, and what other rows of its group wrote.

Everything is kept in bytes and counts, so guesses do not depend on how a text was cut into tokens nor on
time. A `Guess` carries the share of such guesses that came true so far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

CONTEXT = 16  # bytes of text under which what followed is remembered,
_CONTEXTS = CONTEXT, 4, 2  # and fewer, for texts not met before
MOST_CONTEXTS = 20_000  # remembered per group
_MOST_FOLLOWERS = 64  # per context, and of closings per kind of value
_MOST_CUES = 12  # per kind of value
_MOST_KINDS = 1_000  # of values, where keys are the model's to choose
_LONGEST_VALUE = 64  # bytes of a value that are looked for as a whole

# Expected shares before anything was measured, for how a copied piece was found and how it goes on.
_FOUND = {"value 1": 0.5, "value 2": 0.8, "word 1": 0.3, "word 2": 0.6, "word 3": 0.7, "match 5": 0.85}
_SHAPES = {"inside": 0.9, "next": 0.75, "over": 0.5}

_PRIOR_WEIGHT = 4.0
_MEMORY = 200.0  # guesses after which old ones count for little

_LETTERS = rb"A-Za-z0-9\x80-\xff"
_WORD = re.compile(rb"[%b]+" % _LETTERS)
_LAST_WORD = re.compile(rb"[%b]+\Z" % _LETTERS)
_AFTER_LAST_WORD = re.compile(rb"[^%b]*\Z" % _LETTERS)
# A word with what stands before it: the step in which a copied span is guessed.
_PIECE = re.compile(rb"[^%b]{0,8}[%b]*" % (_LETTERS, _LETTERS))
_CUES = (re.compile(rb"[%b]+[^%b]+\Z" % (_LETTERS, _LETTERS)), re.compile(rb"[^%b]{2,}\Z" % _LETTERS))


@dataclass(frozen=True)
class Guess:
    """Bytes that may come next, and how likely they are.

    source: how it was found; guesses of one source are about equally good, and how good is measured.
    place: where the prompt goes on after a copied piece, else -1.
    """

    data: bytes
    likely: float
    source: str
    place: int = -1


class Trust:
    """How often the guesses of each source were what the model chose."""

    def __init__(self) -> None:
        self.accepted: dict[str, float] = {}
        self.offered: dict[str, float] = {}

    def share(self, source: str, prior: float) -> float:
        """The measured share of accepted guesses, drawn towards `prior`."""
        offered = self.offered.get(source, 0.0) + _PRIOR_WEIGHT
        return (self.accepted.get(source, 0.0) + prior * _PRIOR_WEIGHT) / offered

    def measured(self, guess: Guess) -> Guess:
        """The guess with what was measured of its source."""
        return replace(guess, likely=self.share(guess.source, guess.likely))

    def record(self, source: str, accepted: bool) -> None:
        keep = 1 - 1 / _MEMORY
        self.offered[source] = self.offered.get(source, 0.0) * keep + 1
        self.accepted[source] = self.accepted.get(source, 0.0) * keep + accepted


class Prompt:
    """A row's prompt as bytes, and where its words start."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._words: dict[bytes, list[int]] = {}
        for match in _WORD.finditer(text):
            for length in (1, 2, 3):
                start = text[match.start() : match.start() + length]
                places = self._words.setdefault(start, [])
                if len(places) < 8:
                    places.append(match.start())

    def after(self, text: bytes, value: bytes) -> tuple[int, str]:
        """(place, how it was found) after the longest match of what was written, or (-1, "").

        value: the end of text that the model wrote since the grammar last forced something.
        """
        if 0 < len(value) <= _LONGEST_VALUE:
            for place in self._words.get(value[:3], ()):
                if self.text.startswith(value, place):
                    return place + len(value), f"value {min(len(value), 4)}"
        for length in (16, 8, 5):
            place = self.text.find(text[-length:]) if len(text) >= length else -1
            if place >= 0:
                return place + length, f"match {length}"
        word = _LAST_WORD.search(text[-CONTEXT:])
        if word:
            for place in self._words.get(word.group()[:3], ()):
                if self.text.startswith(word.group(), place):
                    return place + len(word.group()), f"word {min(len(word.group()), 4)}"
        return -1, ""

    def piece(self, place: int) -> bytes:
        """The rest of the word at `place`, or what stands before the next word and that word."""
        match = _PIECE.match(self.text, place)
        return match.group() if match else b""

    def places(self, text: bytes) -> Iterator[int]:
        """The first places at which `text` stands at the start of a word."""
        for place in self._words.get(text[:3], ()):
            if self.text.startswith(text, place):
                yield place


class Phrases:
    """What rows of one group wrote after the same bytes: after as many of them as were met before."""

    def __init__(self) -> None:
        self._following: dict[int, dict[bytes, dict[bytes, int]]] = {length: {} for length in _CONTEXTS}

    def __len__(self) -> int:
        return sum(map(len, self._following.values()))

    def learn(self, text: bytes, data: bytes, most: int = MOST_CONTEXTS) -> None:
        """`data` followed `text` (of which the last bytes count). `most`: contexts to remember."""
        self.forget(most)
        for length, following in self._following.items():
            _count(following.setdefault(text[-length:], {}), data)

    def forget(self, most: int) -> None:
        """Keep fewer than `most` contexts, the newer ones."""
        for following in self._following.values():
            _forget_older(following, most // len(self._following))

    def guess(self, text: bytes) -> Guess | None:
        """What followed most often; the unseen counts as often as there were different followers (PPM C)."""
        for length, known in self._following.items():
            if following := known.get(text[-length:]):
                data = max(following, key=following.__getitem__)
                likely = following[data] / (sum(following.values()) + len(following))
                return _counted(f"after {length}", data, likely)
        return None

    def share(self, text: bytes, data: bytes, unknown: float) -> float:
        """How often `data` followed `text`; `unknown` counts as two times."""
        following = self._following[CONTEXT].get(text[-CONTEXT:], {})
        return (following.get(data, 0) + 2 * unknown) / (sum(following.values()) + 2)


class Values:
    """Where in their prompts the rows of one group found a kind of value, and how they closed it.

    A value is what the model writes between two stretches that the grammar forces; its kind is the end
    of the stretch before. A cue is the text that stands before the value in the prompt.
    """

    def __init__(self) -> None:
        self._cues: dict[bytes, dict[bytes, list[int]]] = {}  # kind -> cue -> [hits, tries]
        # (kind, the prompt's next byte, b"" at its end) -> what came: None for the prompt's next piece
        self._next: dict[tuple[bytes, bytes], dict[bytes | None, int]] = {}

    def start(self, kind: bytes, prompt: Prompt) -> Guess | None:
        """The first piece of a value of this kind."""
        best: Guess | None = None
        for cue, (hits, tries) in self._cues.get(kind, {}).items():
            likely = hits / (tries + 1)
            if best is not None and likely <= best.likely:
                continue
            place = prompt.text.find(cue)
            if place >= 0:
                place += len(cue)
                piece = prompt.piece(place)
                if piece:
                    best = _counted("cue", piece, likely, place + len(piece))
        return best

    def go_on(self, kind: bytes, prompt: Prompt, place: int, found: str) -> Guess | None:
        """What follows in a value that was copied up to `place`."""
        piece = prompt.piece(place)
        came = self._next.get((kind, prompt.text[place : place + 1]), {})
        if came:
            total = sum(came.values()) + 2
            best = max(came, key=came.__getitem__)
            if best is not None:
                return _counted("closing", best, came[best] / total)
        if not piece:
            return None
        likely = _FOUND.get(found, 0.9) * _SHAPES[_shape(piece)]
        return Guess(piece, likely, f"{found} {_shape(piece)}", place + len(piece))

    def learn(self, kind: bytes, value: bytes, prompt: Prompt) -> None:
        """A row wrote `value`, then the grammar forced what followed."""
        _forget_older(self._cues, _MOST_KINDS)
        closing = _AFTER_LAST_WORD.search(value)
        body = value[: closing.start()] if closing else value
        cues = self._cues.setdefault(kind, {})
        for cue, counts in cues.items():
            place = prompt.text.find(cue)
            if place >= 0:
                counts[1] += 1
                counts[0] += bool(body) and prompt.text.startswith(body, place + len(cue))
        for place in prompt.places(body) if body else ():
            for pattern in _CUES:
                before = pattern.search(prompt.text[max(place - CONTEXT, 0) : place])
                if (
                    before
                    and before.group() not in cues
                    and prompt.text.find(before.group()) + len(before.group()) == place
                ):
                    cues[before.group()] = [1, 1]
            self._learn_copy(kind, body, value[len(body) :], prompt, place)
            break
        while len(cues) > _MOST_CUES:
            del cues[min(cues, key=lambda cue: cues[cue][0] / (cues[cue][1] + 1))]

    def _learn_copy(self, kind: bytes, body: bytes, closing: bytes, prompt: Prompt, place: int) -> None:
        stop = place + len(body)
        while place < stop:
            piece = prompt.piece(place)
            place += len(piece)
            if not piece or place > stop:
                return
            _forget_older(self._next, 4 * _MOST_KINDS)
            came = self._next.setdefault((kind, prompt.text[place : place + 1]), {})
            _count(came, None if place < stop else closing)


def _forget_older(memory: dict[Any, Any], most: int) -> None:
    """Make room for one more by dropping the older half of what is full."""
    if len(memory) >= most:
        for key in list(memory)[: max(len(memory) - most // 2, 1)]:
            del memory[key]


def _count(counts: dict[Any, int], what: bytes | None) -> None:
    """One more of `what`; where there are many kinds already, those met least make room."""
    if what not in counts and len(counts) >= _MOST_FOLLOWERS:
        for rare in sorted(counts, key=counts.__getitem__)[: _MOST_FOLLOWERS // 2]:
            del counts[rare]
    counts[what] = counts.get(what, 0) + 1


def _counted(kind: str, data: bytes, likely: float, place: int = -1) -> Guess:
    """A guess whose likelihood was counted; how good such counts are is measured by eighths."""
    return Guess(data, likely, f"{kind} {int(8 * likely)}", place)


def _shape(piece: bytes) -> str:
    """The kind of step that a copied piece is: they are not equally likely."""
    if _WORD.match(piece):
        return "inside"
    if piece[:1] == b" " and _WORD.match(piece, 1):
        return "next"
    return "over"
