"""Likely continuations of a row, for the next step to verify: spans of its prompt, phrases of its group.

A draft is built in bytes, piece by piece: what the grammar forces, else the best guess (guesses.py), as
long as it is likely enough for what it costs. Drafts cost time if wrong; they never change an output.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

from jfbatch.engine.continuation import GIVEN, Continuation
from jfbatch.engine.guesses import CONTEXT, MOST_CONTEXTS, Guess, Phrases, Prompt, Trust, Values
from jfbatch.engine.retokenize import Retokenizer, Tokenization
from jfbatch.engine.sequence import Sequence
from jfbatch.errors import JfbatchError

LONGEST = 24  # draft tokens of a row
_MOST_GROUPS = 256
_CONTEXTS = 200_000  # that all groups remember together, about 450 bytes each
# Forced bytes come for sure, but the model may cut them otherwise: how often not, before it was measured.
_FORCED = 0.99


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

    def draft(self, sequence: Sequence, price: float) -> None:
        """Let the next step verify what this row probably goes on with.

        price: what a token in vain costs, where a step saved is worth 1.
        """
        room = min(self.longest, sequence.tokens_left - 1)
        if room <= 0:
            sequence.set_drafts([])
            return
        memory = sequence.draftable = sequence.draftable or self._begin(sequence)
        draft = Continuation(sequence, self._tokenization, self._retokenizer)
        with suppress(JfbatchError):  # a grammar at its limits: if it matters, the row's own way will say so
            self._grow(draft, sequence, memory, price, room)
        draft.undo()
        ids, sources = draft.ids[:room], draft.sources[:room]
        sequence.set_drafts(ids, [index for index, source in enumerate(sources) if source == GIVEN])
        memory.sources = dict(enumerate(sources, sequence.certain))

    def _grow(
        self, draft: Continuation, sequence: Sequence, memory: Draftable, price: float, room: int
    ) -> None:
        """Add what is forced and what is likely, until it does not pay or there is no room."""
        likely, place, value_start = 1.0, -1, memory.value_start
        memory.watched = None
        while len(draft.ids) < room:
            if forced := sequence.matcher.forced_bytes():
                start = len(draft.text)
                jumps = sequence.can_jump and start > len(sequence.text)
                if jumps and likely < (1 - likely) * price * self._tokens(forced):
                    return
                likely *= _FORCED if sequence.can_jump else self.trust.share("forced", _FORCED)
                if not sequence.can_jump and likely < (1 - likely) * price:
                    memory.watched = (start, "forced", self._first_token(forced))
                    return
                if not draft.extend(forced, "forced"):
                    return
                if jumps:
                    draft.mark_given(start)
                place, value_start = -1, len(draft.text)
            guess = self._guess(memory, draft.text, value_start, place)
            if guess is None or likely * guess.likely < (1 - likely * guess.likely) * price:
                if guess is not None:
                    memory.watched = (len(draft.text), guess.source, guess.data)
                if forced and draft.ids and draft.sources[-1] == "forced":
                    self._weigh_last(memory, draft, likely, price)
                return
            if not draft.extend(guess.data, guess.source):
                return
            likely *= guess.likely
            place = guess.place

    def _tokens(self, data: bytes) -> int:
        return len(self._retokenizer.encode(data) or data)

    def _first_token(self, data: bytes) -> bytes:
        ids = self._retokenizer.encode(data)
        return self._tokenization.token_bytes(ids[0]) if ids else data

    def _begin(self, sequence: Sequence) -> Draftable:
        data = b"".join(map(self._tokenization.token_bytes, sequence.request.prompt_ids))
        return Draftable(Prompt(data), self._group(sequence.request.group), _after_forced(sequence))

    def _group(self, name: str | None) -> _Group:
        """What rows of this group have written; a row without a group learns from itself alone."""
        if name is None:
            return _Group()
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) >= _MOST_GROUPS:
                self._groups.popitem(last=False)
            group = self._groups[name] = _Group()
            for other in self._groups.values():
                other.phrases.forget(self._most_contexts)
        self._groups.move_to_end(name)
        return group

    @property
    def _most_contexts(self) -> int:
        """How many one group may remember."""
        return min(MOST_CONTEXTS, _CONTEXTS // max(len(self._groups), 1))

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

    def _weigh_last(self, memory: Draftable, draft: Continuation, likely: float, price: float) -> None:
        """What follows could merge with the last forced token: keep it only if it usually does not."""
        data = self._tokenization.token_bytes(draft.ids[-1])
        source = f"held {data!r}"
        before = draft.text[: len(draft.text) - len(data)]
        likely *= memory.group.phrases.share(before, data, self.trust.share(source, 0.8))
        if likely < (1 - likely) * price:
            memory.watched = (len(before), source, data)
            draft.drop_last()
        else:
            draft.sources[-1] = source

    def record(self, sequence: Sequence, place: int, accepted: bool) -> None:
        """The draft at token index `place` was what the output became, or was not."""
        source = sequence.draftable.sources.get(place) if sequence.draftable else None
        if source and source != GIVEN:
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
                if source == "forced":  # its bytes are right, its tokens perhaps not
                    right = data == guessed
                else:
                    begun = guessed.startswith(data) and not source.startswith("held")
                    right = begun or data.startswith(guessed)
                self.trust.record(source, right)
        text = sequence.text
        before = bytes(text[max(start - CONTEXT, 0) : start])
        most = self._most_contexts
        memory.group.phrases.learn(before, data, most)
        if len(data) > 1 and data[:1] == b" ":  # the grammar may force the space alone
            memory.group.phrases.learn(before + b" ", data[1:], most)
        written = start + len(data)
        if len(text) > written:  # the grammar forced more: a value is complete
            kind = bytes(text[max(memory.value_start - CONTEXT, 0) : memory.value_start])
            memory.group.values.learn(kind, bytes(text[memory.value_start : written]), memory.prompt)
            memory.value_start = _after_forced(sequence)


def _after_forced(sequence: Sequence) -> int:
    """The length of the output with what the grammar forces next."""
    with suppress(JfbatchError):
        return len(sequence.text) + len(sequence.matcher.forced_bytes())
    return len(sequence.text)
