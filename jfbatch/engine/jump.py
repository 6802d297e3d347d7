"""Jump-forward and finishing in time: text that is known without asking the model.

Forced bytes become tokens (retokenize.py), the matcher moves along, and the KV cache keeps the
common token prefix. Tokens that what follows could merge with are left to the model.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext

from jfbatch.engine.retokenize import Retokenized, Retokenizer, Tokenization
from jfbatch.engine.sequence import Sequence
from jfbatch.engine.watching import Span, watched
from jfbatch.errors import GrammarError


class Jumper:
    """Changes outputs by what their grammars already determine."""

    def __init__(
        self, tokenization: Tokenization, retokenizer: Retokenizer, span: Span = nullcontext
    ) -> None:
        self._tokenization = tokenization
        self._after_jump = watched(span, "retokenise", retokenizer.jump)
        self._after_ending = watched(span, "retokenise", retokenizer.ending)

    def jump(self, sequence: Sequence) -> bool:
        """Append what the grammar forces; whether that finished the output.

        Tokens that the model chose are replaced only from the last safe boundary on, where the
        forced bytes change the tokenization: the model then reads on from tokens it knows.
        """
        if not sequence.can_jump:
            return False
        forced = sequence.matcher.forced_bytes()
        if not forced:
            return False
        plan = self._after_jump(bytes(sequence.text), sequence.ends, forced)
        if plan is None:
            return False
        if sequence.matcher.shortest_ending() == forced and self._jump_to_end(sequence, plan):
            return True
        before = sequence.output_ids
        if plan.certain:
            if not self.replace_tail(sequence, plan.keep, plan.certain):
                sequence.can_jump = False
                return False
            if not self.can_end_in_time(sequence):
                self.replace_tail(sequence, plan.keep, before[plan.keep :])
                return False
            self._count(sequence, before)
        return False

    def _jump_to_end(self, sequence: Sequence, plan: Retokenized) -> bool:
        """Append everything if nothing may follow it; otherwise change nothing."""
        before = sequence.output_ids
        if not self.replace_tail(sequence, plan.keep, plan.certain + plan.held):
            sequence.can_jump = False
            return False
        if sequence.matcher.is_finished() and sequence.tokens_left >= 0:
            self._count(sequence, before)
            return True
        self.replace_tail(sequence, plan.keep, before[plan.keep :])
        return False

    def tokens_to_end(self, sequence: Sequence) -> int | None:
        """Tokens that a shortest ending adds; None if the tokenizer cannot write it."""
        ending = sequence.matcher.shortest_ending()
        if not ending:
            return 0
        plan = self._after_ending(bytes(sequence.text), sequence.ends, ending)
        return None if plan is None else plan.keep + len(plan.certain) - sequence.output_tokens

    def can_end_in_time(self, sequence: Sequence) -> bool:
        """Whether the tokens left cover a shortest ending."""
        left = sequence.tokens_left
        if left < 0:
            return False
        try:
            ending = sequence.matcher.shortest_ending()
        except GrammarError:  # another engine's grammar: no ending is known here, but one before this token
            return False
        if len(ending) <= left:  # a token has a byte at least
            return True
        needed = self.tokens_to_end(sequence)
        return needed is not None and needed <= left

    def take_ending(self, sequence: Sequence) -> None:
        """Complete the output by its shortest ending. Raises GrammarError if the matcher refuses it."""
        ending = sequence.matcher.shortest_ending()
        if not ending:
            return
        plan = self._after_ending(bytes(sequence.text), sequence.ends, ending)
        before = sequence.output_ids
        if plan is None or not self.replace_tail(sequence, plan.keep, plan.certain):
            raise GrammarError("the grammar's shortest ending cannot be written in the model's tokens")
        self._count(sequence, before)

    def replace_tail(self, sequence: Sequence, keep: int, new_ids: SequenceOf[int]) -> bool:
        """Make the output its first `keep` tokens and then `new_ids`.

        Returns False, with nothing changed, if the matcher refuses one of them. What the KV cache
        holds of the new tokens stays in it.
        """
        old = sequence.output_ids
        same = _common(old[keep:], new_ids)
        keep, new_ids = keep + same, new_ids[same:]
        matcher = sequence.matcher
        matcher.rollback(len(old) - keep)
        for count, token in enumerate(new_ids):
            try:
                matcher.accept_token(token)
            except GrammarError:
                matcher.rollback(count)
                for dropped in old[keep:]:
                    matcher.accept_token(dropped)
                return False
        sequence.truncate(keep)
        for token in new_ids:
            sequence.append(token, self._tokenization.token_bytes(token))
        return True

    def _count(self, sequence: Sequence, before: SequenceOf[int]) -> None:
        sequence.jumped_tokens += sequence.output_tokens - _common(before, sequence.output_ids)


def _common(left: SequenceOf[int], right: SequenceOf[int]) -> int:
    same = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        same += 1
    return same
