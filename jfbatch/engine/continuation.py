"""A row's output continued by tokens that are not certain: what drafts are made of.

Bytes go in; their tokens are those that jumps would make of them. The row's own matcher goes along, so
that nothing the grammar forbids is drafted, and is rolled back at the end.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from jfbatch.engine.retokenize import Retokenizer, Tokenization
from jfbatch.engine.sequence import Sequence
from jfbatch.errors import GrammarError

GIVEN = "given"  # the source of tokens that a jump will make certain


class Continuation:
    """Tokens after a row's certain ones, and what they were made of.

    text: the output with them. ids, sources: the tokens, and where each is from.
    """

    def __init__(self, sequence: Sequence, tokenization: Tokenization, retokenizer: Retokenizer) -> None:
        self._tokenization = tokenization
        self._retokenizer = retokenizer
        self._matcher = sequence.matcher
        self._certain = len(sequence.text)
        self.text = bytes(sequence.text)
        keep, self._start = retokenizer.tail(self.text, sequence.ends)
        self._tail = sequence.token_ids[sequence.prompt_tokens + keep : sequence.certain]
        self.ids: list[int] = []
        self.sources: list[str] = []

    def extend(self, data: bytes, source: str) -> bool:
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
        return self._accept(ids[same:], source)

    def _accept(self, ids: SequenceOf[int], source: str) -> bool:
        for token in ids:
            if token in self._tokenization.end_ids:
                return False
            try:
                self._matcher.accept_token(token)
            except GrammarError:
                return False
            self.ids.append(token)
            self.sources.append(source)
            self.text += self._tokenization.token_bytes(token)
        return True

    def mark_given(self, start: int) -> None:
        """Name the tokens that a jump will make of the bytes from `start` on: nobody chooses them."""
        boundary = self._retokenizer.last_boundary(self.text, start + 1)
        end = len(self.text)
        for index in reversed(range(len(self.ids))):
            size = len(self._tokenization.token_bytes(self.ids[index]))
            if end - size < start:
                return
            if end <= boundary:
                self.sources[index] = GIVEN
            end -= size

    def drop_last(self) -> None:
        """Take the last token back."""
        self._matcher.rollback(1)
        self.sources.pop()
        self.text = self.text[: len(self.text) - len(self._tokenization.token_bytes(self.ids.pop()))]

    def undo(self) -> None:
        """Put the matcher back to the row's certain tokens; what was found stays."""
        self._matcher.rollback(len(self.ids))
