"""One row in flight: its token ids, how many of them are certain and how many are in the KV cache.

`token_ids` is the prompt, then the certain output tokens, then drafts. Certain tokens were accepted
by the matcher; drafts are a guess that the next step verifies. Everything else is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jfbatch.engine.drafts import Draftable
    from jfbatch.grammar.matcher import Matcher

Reason = Literal["finished", "shortened", "failed"]


@dataclass(frozen=True)
class Request:
    """One row to decode. `key` names it in its randomness and its Completion.

    group: rows of one group have the same grammar, so what one of them wrote is a guess for the others.
    unused: how many of max_tokens are lost to the output as it stands, such as those that thinking left over.
    """

    key: str
    prompt_ids: list[int]
    matcher: Matcher
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    group: str | None = None
    unused: Callable[[], int] | None = None


@dataclass(frozen=True)
class Completion:
    """One row's outcome.

    reason: "finished" (the model or the grammar ended it), "shortened" (valid, but cut to fit the
    token limit) or "failed" (`error` says why; text is what there was).
    token_ids, text: the output without end tokens. completion_tokens counts token_ids;
    sampled_tokens the model's decisions that stood when made (end tokens included); jumped_tokens
    the tokens that the grammar gave; forward_passes the steps the row took part in from the one
    that gave its first token on. log_probability sums over the decisions, where it was asked for.
    """

    key: str
    token_ids: list[int]
    text: bytes
    reason: Reason
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    sampled_tokens: int
    jumped_tokens: int
    forward_passes: int
    log_probability: float | None = None


@dataclass(eq=False)
class Sequence:
    """A row in flight. `slot` is -1 until it has a place in the KV pool.

    `text` is the output's bytes, `ends[i]` the length of text after output token i. `computed` are the
    tokens of the last step, from position `computed_start` on: the slot holds their K and V, so a token
    that was dropped and comes again need not be computed again. `given` are the indices of drafts that
    nobody has to choose: the grammar forces them once those before them are accepted.
    """

    request: Request
    limit: int  # most output tokens
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    certain: int = 0
    cached: int = 0
    computed: SequenceOf[int] = ()
    computed_start: int = 0
    given: frozenset[int] = frozenset()
    text: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    can_jump: bool = True
    draftable: Draftable | None = None  # once it was given drafts
    # The row whose prefill computes the first `shared` tokens of this one too; None once copied.
    leader: Sequence | None = None
    shared: int = 0
    sampled_tokens: int = 0
    jumped_tokens: int = 0
    forward_passes: int = 0
    log_probability: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.certain = len(self.token_ids)

    @property
    def matcher(self) -> Matcher:
        return self.request.matcher

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_tokens(self) -> int:
        """Certain output tokens."""
        return self.certain - self.prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens : self.certain]

    @property
    def drafts(self) -> list[int]:
        return self.token_ids[self.certain :]

    @property
    def tokens_left(self) -> int:
        unused = self.request.unused
        most = self.limit if unused is None else min(self.limit, self.request.max_tokens - unused())
        return most - self.output_tokens

    @property
    def pending(self) -> int:
        """Tokens, drafts included, that the next step has to compute."""
        return len(self.token_ids) - self.cached

    @property
    def longest(self) -> int:
        """The most tokens this row can ever hold in the KV cache."""
        return self.prompt_tokens + self.limit

    def append(self, token_id: int, token_bytes: bytes) -> None:
        """Make `token_id` the next certain token. A draft that equals it stays; others are dropped."""
        if self.certain == len(self.token_ids) or self.token_ids[self.certain] != token_id:
            self._replace_drafts([token_id], self.certain)
        self.certain += 1
        self.text += token_bytes
        self.ends.append(len(self.text))

    def truncate(self, output_tokens: int) -> None:
        """Keep the first `output_tokens` output tokens as certain; the rest stay as drafts."""
        self.certain = self.prompt_tokens + output_tokens
        del self.ends[output_tokens:]
        del self.text[self.ends[-1] if self.ends else 0 :]

    def set_drafts(self, drafts: SequenceOf[int], given: Iterable[int] = ()) -> None:
        """Replace the drafts; `given` are indices among them. What the slot holds of them is cached."""
        old = self.token_ids[self.certain :]
        same = 0
        while same < min(len(old), len(drafts)) and old[same] == drafts[same]:
            same += 1
        self._replace_drafts(drafts, self.certain + same)
        self.given = frozenset(self.certain + index for index in given)

    def _replace_drafts(self, drafts: SequenceOf[int], agreed: int) -> None:
        """Replace the drafts; tokens before position `agreed` stay as they are."""
        self.token_ids[self.certain :] = drafts
        self.given = frozenset()
        self.cached = min(self.cached, agreed)
        first = self.computed_start
        if self.cached < first:  # the tokens before them change: what was computed is of another text
            self.computed = ()
            return
        stop = min(len(self.token_ids), first + len(self.computed))
        while self.cached < stop and self.token_ids[self.cached] == self.computed[self.cached - first]:
            self.cached += 1

    def computes(self, segment: SequenceOf[int]) -> None:
        """The step computed these tokens, which follow the cached ones."""
        self.computed, self.computed_start = segment, self.cached
        self.cached += len(segment)

    def computes_late(self, token_id: int) -> None:
        """A step computes this token behind the cached ones; whether the output goes on with it is open."""
        self.computed, self.computed_start = (token_id,), self.cached

    def forget(self) -> None:
        """The slot holds nothing of this row any more."""
        self.cached, self.computed = 0, ()

    def completion(self, reason: Reason, error: str | None = None) -> Completion:
        output = self.output_ids
        return Completion(
            key=self.request.key,
            token_ids=output,
            text=bytes(self.text),
            reason=reason,
            error=error,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(output),
            sampled_tokens=self.sampled_tokens,
            jumped_tokens=self.jumped_tokens,
            forward_passes=self.forward_passes,
            log_probability=self.log_probability,
        )
