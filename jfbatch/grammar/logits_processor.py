"""A grammar as a transformers LogitsProcessor, for whoever calls model.generate() themselves.

A row's position follows from the tokens after its prompt alone, and those of the last step are remembered:
beams may be reordered and copied, and still every row costs one token per step.
"""

from __future__ import annotations

import numpy as np
import torch
import transformers

from jfbatch.errors import GrammarError
from jfbatch.grammar.grammar import AutomatonMatcher, Grammar


class LogitsProcessor(transformers.LogitsProcessor):  # type: ignore[misc]  # untyped base
    """Lets model.generate() write texts of `grammar` only: logits_processor=[LogitsProcessor(grammar)].

    For greedy search, sampling and beam search, with batches padded on the left. The grammar's vocabulary
    must have the model's end tokens. Use one for one call of generate at a time; the next call with other
    prompts starts anew by itself, with the same prompts too, and `reset` makes sure. generate does not wait
    for an output to be complete: one that max_new_tokens cuts off is the beginning of a text of the grammar.
    """

    def __init__(self, grammar: Grammar) -> None:
        if not grammar.vocabulary.end_ids:
            raise GrammarError("the grammar's vocabulary has no end token: generate could never stop")
        self.grammar = grammar
        self._end_mask = np.zeros(grammar.vocabulary.words, np.uint32)
        for token in grammar.vocabulary.end_ids:
            self._end_mask[token >> 5] |= np.uint32(1 << (token & 31))
        self.reset()

    def reset(self) -> None:
        """Forget the prompts: the next call is the first of a new generation."""
        self._prompts: torch.Tensor | None = None
        self._groups: dict[tuple[int, ...], list[int]] = {}  # prompt -> its rows
        # Tokens since the prompt -> their matcher, None if the grammar does not have them: beam search fills
        # up with such rows, at a score of -inf, where it finds fewer continuations than it has beams.
        self._matchers: dict[tuple[int, ...], AutomatonMatcher | None] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores with -inf for tokens that may not come next. int64[rows, length], float[rows, V] -> same.

        Raises GrammarError where all rows of a prompt have left the grammar, or nothing is left to choose:
        another processor forbids what the grammar asks for.
        """
        if self._is_new(input_ids):
            self._begin(input_ids)
        assert self._prompts is not None
        rows = [tuple(ids) for ids in input_ids[:, self._prompts.shape[1] :].tolist()]
        found: dict[tuple[int, ...], AutomatonMatcher | None] = {}
        for ids in rows:
            if ids not in found:
                found[ids] = self._matcher(ids)
        self._matchers = found
        matchers = [found[ids] for ids in rows]
        for group in self._groups.values():
            if all(matchers[row] is None for row in group):
                raise GrammarError(
                    f"row {group[0]} has tokens that the grammar does not allow; another logits processor "
                    "chose them, or this one was used for two generations without reset() between them"
                )
        masks = [
            self._end_mask if matcher is None or matcher.ended else matcher.token_mask()
            for matcher in matchers
        ]
        allowed = _as_tensor(np.stack(masks), scores.shape[-1]).to(scores.device)
        chosen = scores.masked_fill(~allowed, float("-inf"))
        if bool((chosen == float("-inf")).all(dim=-1).any()):
            raise GrammarError("another logits processor forbids every token that the grammar allows")
        return chosen

    def _is_new(self, input_ids: torch.Tensor) -> bool:
        if self._prompts is None:
            return True
        rows, length = self._prompts.shape
        if input_ids.shape[0] != rows or input_ids.shape[1] <= length:
            return True
        return not torch.equal(input_ids[:, :length], self._prompts)

    def _begin(self, input_ids: torch.Tensor) -> None:
        self.reset()
        self._prompts = input_ids.clone()
        for row, ids in enumerate(input_ids.tolist()):
            self._groups.setdefault(tuple(ids), []).append(row)

    def _matcher(self, ids: tuple[int, ...]) -> AutomatonMatcher | None:
        """The position after `ids`: one step from the one before, else all steps from the start."""
        if not ids:
            return self.grammar.matcher()
        if ids[:-1] in self._matchers:
            before = self._matchers[ids[:-1]]
            return None if before is None else _stepped(before, ids[-1])
        matcher: AutomatonMatcher | None = self.grammar.matcher()
        for token in ids:
            matcher = None if matcher is None else _stepped(matcher, token)
        return matcher


def _stepped(matcher: AutomatonMatcher, token: int) -> AutomatonMatcher | None:
    """A matcher one token further; what is written after an end token is padding."""
    if matcher.ended:
        return matcher
    after = matcher.fork()
    try:
        after.accept_token(token)
    except GrammarError:
        return None
    return after


def _as_tensor(masks: np.ndarray[tuple[int, int], np.dtype[np.uint32]], width: int) -> torch.Tensor:
    """uint32[rows, words] -> bool[rows, width]; tokens past the vocabulary are not allowed."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :width].astype(np.bool_)
    if bits.shape[1] < width:
        bits = np.pad(bits, ((0, 0), (0, width - bits.shape[1])))
    return torch.from_numpy(bits)
