"""The logits that one step gave one row: which token each of them decides, and what became of its drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jfbatch.engine.scheduler import Planned
from jfbatch.engine.sequence import Sequence


@dataclass
class Window:
    """The logits a step gave one row: `rows[i]` is the one that decides its token i.

    The step computed tokens up to index `stop`, drafts from `certain` on. late: its one token was not known
    when the step was launched. lost: computed drafts that the output does not go on with, once it is closed.
    """

    sequence: Sequence
    rows: dict[int, int]
    certain: int
    stop: int
    late: bool = False
    decisions: int = 0
    lost: int = 0
    open: bool = True

    @property
    def row(self) -> int | None:
        """The logits row that decides the sequence's next token; None if it was not computed."""
        sequence = self.sequence
        known = self.open and sequence.cached >= sequence.certain
        return self.rows.get(sequence.certain) if known else None

    @property
    def is_last(self) -> bool:
        """Whether the step decides no token after the next one."""
        return max(self.rows) <= self.sequence.certain

    @property
    def is_of_use(self) -> bool:
        """Whether it is late and the row goes on with the token that the step computed."""
        return self.late and self.row is not None

    def close(self) -> None:
        """The step decides no more of this row's tokens."""
        self.open = False
        self.lost = max(self.stop - max(self.sequence.cached, self.certain), 0)


def still_open(windows: Iterable[Window]) -> list[Window]:
    """Those that decide their row's next token. The others close: the row may go on in the next step now."""
    still = []
    for window in windows:
        if window.row is not None:
            still.append(window)
        else:
            window.close()
    return still


def windows_of(planned: Iterable[Planned], late: Collection[Sequence] = ()) -> list[Window]:
    """The windows of a step's rows, in the order of its logits; rows that ended meanwhile have none.

    late: the rows that went ahead in it. They have taken part in the step from here on.
    """
    windows, offset = [], 0
    for part in planned:
        sequence, segment = part.sequence, part.segment
        rows = {segment.start + index + 1: offset + i for i, index in enumerate(segment.logits)}
        offset += len(rows)
        if not rows or sequence.slot < 0:
            continue
        stop, is_late = segment.start + len(segment.token_ids), sequence in late
        windows.append(Window(sequence, rows, stop if is_late else sequence.certain, stop, is_late))
        sequence.forward_passes += is_late
    return windows
