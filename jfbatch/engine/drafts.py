"""Likely continuations of a row, for the next step to verify: spans of its prompt, phrases of its group.

A draft is built in bytes, piece by piece: what the grammar forces, else the best guess (guesses.py). Its
tokens are those that jumps would make of the same bytes, and the row's own matcher, walked and rolled
back, cuts it off where the grammar says otherwise. Drafts cost time if wrong; they never change an output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from jfbatch.engine.guesses import CONTEXT, Guess, Phrases, Prompt, Values
from jfbatch.engine.retokenize import Retokenizer, Tokenization
from jfbatch.engine.sequence import Sequence
from jfbatch.errors import GrammarError

LONGEST = 24  # draft tokens of a row
_MOST_GROUPS = 256
_GIVEN = "given"  # the source of tokens that a jump will make certain
_FORCED = 0.99  # forced bytes come for sure, but the model may cut them otherwise
_PRIOR_WEIGHT = 4.0
_MEMORY = 200.0  # decisions after which old ones count for little


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


@dataclass
class _Group:
    """What is remembered of rows with the same grammar."""

    phrases: Phrases = field(default_factory=Phrases)
    values: Values = field(default_factory=Values)


@dataclass
class Draftable:
    """What a row's drafts need to remember between steps.

    value_start: where in its output the model took over from the grammar last. sources: draft token
    index -> where it is from. watched: (place in the output, source, bytes) of a guess not offered.
    """

    prompt: Prompt
    group: _Group
    value_start: int
    sources: dict[int, str] = field(default_factory=dict)
    watched: tuple[int, str, bytes] | None = None


class Drafter:
    """Gives rows their drafts and learns from what became of them.

    longest: most draft tokens of a row, 0 for none.
    """

    def __init__(self, tokenization: Tokenization, retokenizer: Retokenizer, longest: int = LONGEST) -> None:
        self.trust = Trust()
        self.longest = longest
        self._tokenization = tokenization
        self._retokenizer = retokenizer
        self._groups: OrderedDict[str, _Group] = OrderedDict()

    def draft(self, sequence: Sequence, threshold: float) -> None:
        """Let the next step verify what this row probably goes on with.

        A draft ends where it would be accepted as a whole less often than `threshold`.
        """
        room = min(self.longest, sequence.tokens_left - 1)
        if room <= 0:
            sequence.set_drafts([])
            return
        memory = sequence.draftable = sequence.draftable or self._begin(sequence)
        walk = _Walk(sequence, self._tokenization, self._retokenizer)
        value_start, place = memory.value_start, -1
        likely, forced = 1.0, b""
        sources: list[str] = []
        memory.watched = None
        while len(walk.ids) < room:
            forced = sequence.matcher.forced_bytes()
            if forced:
                guess = Guess(forced, _FORCED, "forced")
            else:
                found = self._guess(memory, walk.text, value_start, place)
                if found is None:
                    break
                guess = found
            if likely * guess.likely < threshold:
                memory.watched = (len(walk.text), guess.source, guess.data)
                break
            likely *= guess.likely
            start = len(walk.text)
            whole = walk.extend(guess.data)
            sources = (sources + [guess.source] * len(walk.ids))[: len(walk.ids)]
            if not whole:
                break
            if forced:
                if start > len(sequence.text) and sequence.can_jump:
                    self._mark_given(walk, start, sources)
                value_start = len(walk.text)
            place = guess.place
        if forced and walk.ids and sources[-1] == "forced":
            self._weigh_last(memory, walk, likely, threshold, sources)
        walk.undo()
        sequence.set_drafts(walk.ids[:room], [i for i, s in enumerate(sources[:room]) if s == _GIVEN])
        memory.sources = dict(enumerate(sources[:room], sequence.certain))

    def _begin(self, sequence: Sequence) -> Draftable:
        data = b"".join(map(self._tokenization.token_bytes, sequence.request.prompt_ids))
        start = len(sequence.text) + len(sequence.matcher.forced_bytes())
        return Draftable(Prompt(data), self._group(sequence.request.group), start)

    def _group(self, name: str | None) -> _Group:
        """What rows of this group have written; a row without a group learns from itself alone."""
        if name is None:
            return _Group()
        group = self._groups.setdefault(name, _Group())
        self._groups.move_to_end(name)
        if len(self._groups) > _MOST_GROUPS:
            self._groups.popitem(last=False)
        return group

    def _guess(self, memory: Draftable, text: bytes, value_start: int, place: int) -> Guess | None:
        """The likeliest of what the group and the prompt propose."""
        prompt, values = memory.prompt, memory.group.values
        kind = text[max(value_start - CONTEXT, 0) : value_start]
        if place >= 0:
            copied, found = place, "on"
        else:
            copied, found = prompt.after(text, text[value_start:])
        guesses = [memory.group.phrases.guess(text)]
        if copied >= 0:
            guesses.append(values.go_on(kind, prompt, copied, found))
        elif len(text) == value_start:
            guesses.append(values.start(kind, prompt))
        measured = [self.trust.measured(guess) for guess in guesses if guess is not None]
        return max(measured, key=lambda guess: guess.likely, default=None)

    def _mark_given(self, walk: _Walk, start: int, sources: list[str]) -> None:
        """Name the tokens that jumps will make of the bytes forced after `start`: nobody chooses them."""
        boundary = self._retokenizer.last_boundary(walk.text, start + 1)
        end = len(walk.text)
        for index in reversed(range(len(sources))):
            size = len(self._tokenization.token_bytes(walk.ids[index]))
            if end - size < start:
                return
            if end <= boundary:
                sources[index] = _GIVEN
            end -= size

    def _weigh_last(
        self, memory: Draftable, walk: _Walk, likely: float, threshold: float, sources: list[str]
    ) -> None:
        """What follows could merge with the last forced token: keep it only if it usually does not."""
        data = self._tokenization.token_bytes(walk.ids[-1])
        source = f"held {data!r}"
        before = walk.text[: len(walk.text) - len(data)]
        share = memory.group.phrases.share(before, data, self.trust.share(source, 0.8))
        if likely * share < threshold:
            memory.watched = (len(before), source, data)
            walk.drop_last()
            sources.pop()
        else:
            sources[-1] = source

    def record(self, sequence: Sequence, place: int, accepted: bool) -> None:
        """The draft at token index `place` was what the output became, or was not."""
        source = sequence.draftable.sources.get(place) if sequence.draftable else None
        if source and source != _GIVEN:
            self.trust.record(source, accepted)

    def learn(self, sequence: Sequence, start: int, token_id: int) -> None:
        """The model chose `token_id` as what follows the first `start` bytes of the row's output."""
        memory = sequence.draftable
        if memory is None or token_id in self._tokenization.end_ids:
            return
        data = self._tokenization.token_bytes(token_id)
        if memory.watched is not None and start >= memory.watched[0]:
            place, source, guessed = memory.watched
            memory.watched = None
            if place == start:
                right = data == guessed if source.startswith("held") else guessed.startswith(data)
                self.trust.record(source, right or data.startswith(guessed))
        text = sequence.text
        before = bytes(text[max(start - CONTEXT, 0) : start])
        memory.group.phrases.learn(before, data)
        if len(data) > 1 and data[:1] == b" ":  # the grammar may force the space alone
            memory.group.phrases.learn(before + b" ", data[1:])
        written = start + len(data)
        if len(text) > written:  # the grammar forced more: a value is complete
            kind = bytes(text[max(memory.value_start - CONTEXT, 0) : memory.value_start])
            memory.group.values.learn(kind, bytes(text[memory.value_start : written]), memory.prompt)
            memory.value_start = len(text) + len(sequence.matcher.forced_bytes())


class _Walk:
    """A row's output continued by tokens that are not certain; its matcher goes along until `undo`."""

    def __init__(self, sequence: Sequence, tokenization: Tokenization, retokenizer: Retokenizer) -> None:
        self._tokenization = tokenization
        self._retokenizer = retokenizer
        self._matcher = sequence.matcher
        self._certain = len(sequence.text)
        keep, self._start = retokenizer.tail(bytes(sequence.text), sequence.ends)
        self._tail = sequence.token_ids[sequence.prompt_tokens + keep : sequence.certain]
        self.text = bytes(sequence.text)
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
            ids = self._retokenizer.encode(whole[self._certain :])
        if ids is None:
            return False
        same = 0
        while same < min(len(ids), len(self.ids)) and ids[same] == self.ids[same]:
            same += 1
        while len(self.ids) > same:
            self.drop_last()
        return self.accept(ids[same:])

    def drop_last(self) -> None:
        data = self._tokenization.token_bytes(self.ids.pop())
        self._matcher.rollback(1)
        self.text = self.text[: len(self.text) - len(data)]

    def undo(self) -> None:
        self._matcher.rollback(len(self.ids))
