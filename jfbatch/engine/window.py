"""The logits that one step gave one row: which token each of them decides, and what became of its drafts."""

from __future__ import annotations

from dataclasses import dataclass

from jfbatch.engine.sequence import Sequence


@dataclass
class Window:
    """The logits a step gave one row: `rows[i]` is the one that decides its token i.

    The step computed tokens up to index `stop`, drafts from `certain` on.
    """

    sequence: Sequence
    rows: dict[int, int]
    certain: int
    stop: int
    decisions: int = 0
    open: bool = True

    @property
    def row(self) -> int | None:
        """The logits row that decides the sequence's next token; None if it was not computed."""
        sequence = self.sequence
        known = self.open and sequence.cached >= sequence.certain
        return self.rows.get(sequence.certain) if known else None

    @property
    def lost(self) -> int:
        """Computed drafts that the output does not go on with."""
        return max(self.stop - max(self.sequence.cached, self.certain), 0)
