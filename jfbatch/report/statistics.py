"""What a run has done so far, as numbers: one frozen snapshot that the progress line and the summary read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# A row with one of these statuses has a value that obeys its pattern.
GOOD_STATUSES = frozenset({"ok", "shortened"})


@dataclass(frozen=True)
class RunStatistics:
    """A snapshot of a run's counters. Times are in seconds.

    `rows_total` is None while the input is still being read. `rows_kept` are rows that an earlier start
    had finished; they are in `status_counts` too. `rows_failed_before` are the failed ones among those in
    `status_counts`. `unheeded` counts rows by the fields they ask for that have no effect.
    """

    rows_total: int | None = None
    rows_kept: int = 0
    rows_failed_before: int = 0
    status_counts: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    jumped_tokens: int = 0
    forward_passes: int = 0
    patterns_compiled: int = 0
    patterns_loaded: int = 0
    patterns_failed: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    unheeded: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows_done(self) -> int:
        """Rows with a final status, kept ones included."""
        return sum(self.status_counts.values())

    @property
    def rows_failed(self) -> int:
        return sum(count for status, count in self.status_counts.items() if status not in GOOD_STATUSES)

    @property
    def rows_failed_now(self) -> int:
        """Rows that failed in this start."""
        return self.rows_failed - self.rows_failed_before

    @property
    def completion_tokens(self) -> int:
        return self.sampled_tokens + self.jumped_tokens

    @property
    def jumped_share(self) -> float:
        """The share of output tokens that were never sampled, 0 to 1."""
        return self.jumped_tokens / self.completion_tokens if self.completion_tokens else 0.0

    @property
    def rows_per_second(self) -> float:
        """Rows finished by this start per second of it."""
        return (self.rows_done - self.rows_kept) / self.elapsed_seconds if self.elapsed_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.elapsed_seconds if self.elapsed_seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The time the remaining rows need at the rate so far; None while that is unknown."""
        if self.rows_total is None or self.rows_per_second <= 0:
            return None
        return max(0, self.rows_total - self.rows_done) / self.rows_per_second


_SUMMED = (
    "rows_kept",
    "rows_failed_before",
    "prompt_tokens",
    "sampled_tokens",
    "jumped_tokens",
    "forward_passes",
    "patterns_compiled",
    "patterns_loaded",
    "patterns_failed",
    "compile_seconds",
    "prefill_seconds",
    "decode_seconds",
)


def summed(workers: Sequence[RunStatistics], elapsed_seconds: float) -> RunStatistics:
    """One snapshot of several processes at one run; the times spent on its parts add up over them."""
    counts: Counter[str] = Counter()
    unheeded: Counter[str] = Counter()
    for worker in workers:
        counts.update(worker.status_counts)
        unheeded.update(worker.unheeded)
    totals = [worker.rows_total for worker in workers]
    return RunStatistics(
        rows_total=None if None in totals else sum(filter(None, totals)),
        status_counts=counts,
        elapsed_seconds=elapsed_seconds,
        unheeded=dict(unheeded),
        **{name: sum(getattr(worker, name) for worker in workers) for name in _SUMMED},
    )
