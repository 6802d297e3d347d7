"""What becomes of rows: which still need a run, what their outputs are worth, and the running counts.

The only place that writes to the store; the reader thread and the engine's thread both come here.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from jfbatch.engine.sequence import Completion
from jfbatch.feed import Waiting
from jfbatch.grammar.compiler import CompilerStatistics
from jfbatch.report.progress import Progress, progress_text
from jfbatch.report.statistics import GOOD_STATUSES, RunStatistics
from jfbatch.rows.reasoning import ReasoningEnd
from jfbatch.rows.result import VALUE_STATUSES, RowResult
from jfbatch.rows.row import Pattern, Row
from jfbatch.rows.tags import tag_set
from jfbatch.rows.validate import validator

if TYPE_CHECKING:  # it brings torch, which a run with nothing left to do goes without
    from jfbatch.engine.engine import EngineStatistics

_STATUS_OF = {"finished": "ok", "shortened": "shortened", "failed": "failed"}


class Results(Protocol):
    """Where results go: a Store, or memory."""

    def contains(self, row: Row) -> bool: ...

    def add(self, result: RowResult) -> None: ...

    def commit_if_due(self) -> bool: ...


class Outcomes:
    """The results of a run as they come in; `span` times what is done with them."""

    def __init__(
        self,
        store: Results,
        progress: Progress,
        retries: int,
        max_failures: int | None,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.store = store
        self.progress = progress
        self.retries = retries
        self.max_failures = max_failures
        self.span = span
        self.counts: Counter[str] = Counter()
        self.rows_kept = 0
        self.rows_total: int | None = None
        self.all_read = False  # the whole input, without damage
        self.stopping = False  # nothing more is to be read
        self.prompt_tokens = 0
        self.started = time.monotonic()
        self.engine: EngineStatistics | None = None  # there is none before the model is loaded
        self.compiler = CompilerStatistics()
        self.reasoning_end: ReasoningEnd | None = None  # where the model thinks before its outputs
        self.calls_tools = False  # whether any row may
        self.unheeded: Counter[str] = Counter()  # rows by the fields that have no effect (rows.unheeded)
        self._patterns: set[Pattern | None] = set()
        self._lock = threading.RLock()

    def watch(self, engine: EngineStatistics, compiler: CompilerStatistics) -> None:
        """Count what these say from now on."""
        self.engine, self.compiler = engine, compiler

    # Rows come in

    def still_to_run(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows without a result of an earlier start; invalid ones are settled on the way."""
        read = 0
        try:
            for row in rows:
                if self.stopping:
                    return
                read += 1
                if row.error is None and len(self._patterns) < 2:  # more say nothing new
                    self._patterns.add(row.pattern)
                self.calls_tools |= row.pattern is not None and row.pattern.kind == "tools"
                if row.unheeded:
                    self._tell_unheeded(row)
                with self._lock:
                    known = self.store.contains(row)
                if known:
                    self.rows_kept += 1
                elif row.error is not None:
                    self.reject(row, "invalid_input", row.error)
                else:
                    yield row
            self.all_read = True
        finally:
            self.rows_total = read

    def _tell_unheeded(self, row: Row) -> None:
        for name in row.unheeded:
            if name not in self.unheeded:
                self.progress.say(f"{name} has no effect here, though rows ask for it")
        self.unheeded.update(row.unheeded)

    def shared_pattern_or(self, default: Pattern | None) -> Pattern | None:
        """The pattern that all valid rows have; None if they differ, `default` where there is no such row."""
        if not self._patterns:
            return default
        return next(iter(self._patterns)) if len(self._patterns) == 1 else None

    # Rows leave

    def reject(self, row: Row, status: str, error: str) -> None:
        """A row that never reaches the engine."""
        self._add(RowResult.of(row, status, error=error))

    def complete(self, waiting: Waiting, completion: Completion) -> bool:
        """Settle what the engine has finished; an output that fails its check is `invalid`, never ok.

        False where such a row may be sampled again: it is not settled yet.
        """
        row = waiting.row
        status, error = _STATUS_OF[completion.reason], completion.error
        if status != "failed" and (fault := self._fault(waiting, completion)) is not None:
            if waiting.attempt < self.retries:
                return False
            status, error = "invalid", f"{fault} ({waiting.attempt + 1} outputs were sampled)"
        self.prompt_tokens += completion.prompt_tokens
        thinking, output = self._parts(waiting, completion)
        text = output.decode("utf-8", "replace")
        tool_calls = None
        if status in VALUE_STATUSES and waiting.pattern.kind == "tags":
            tagged = tag_set(waiting.pattern)
            if tagged.calls_tools:
                text, tool_calls = tagged.split(text).told
        result = RowResult.of(
            row,
            status,
            text=text,
            error=f"{row.place}: {error}" if error else None,
            backend=waiting.grammar.result().backend,
            reasoning=None if thinking is None else thinking.decode("utf-8", "replace"),
            tool_calls=tool_calls,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            sampled_tokens=completion.sampled_tokens,
            jumped_tokens=completion.jumped_tokens,
            forward_passes=completion.forward_passes,
        )
        self._add(result)
        return True

    def _parts(self, waiting: Waiting, completion: Completion) -> tuple[bytes | None, bytes]:
        """The thinking, None in a row without, and the output proper."""
        if self.reasoning_end is None or not waiting.reasons:
            return None, completion.text
        return self.reasoning_end.split(completion.text)

    def _fault(self, waiting: Waiting, completion: Completion) -> str | None:
        """What is wrong with an output, None if it is as its pattern says."""
        _, output = self._parts(waiting, completion)
        try:
            text = output.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"the output is not UTF-8: {error.reason}"
        pattern = waiting.pattern
        if pattern.kind == "schema":
            return validator(pattern).check(text)
        if pattern.kind == "tags":
            try:
                tag_set(pattern).split(text)
            except ValueError as error:
                return str(error)
            return None
        return waiting.grammar.result().fault(output)

    def _add(self, result: RowResult) -> None:
        with self._lock:
            self.counts[result.status] += 1
            self.store.add(result)

    # What is shown

    @property
    def rows_done(self) -> int:
        return self.rows_kept + sum(self.counts.values())

    @property
    def is_complete(self) -> bool:
        """Whether every row of the input has its outcome."""
        return self.all_read and self.rows_done == self.rows_total

    @property
    def too_many_failures(self) -> bool:
        with self._lock:  # the reader thread may be counting
            bad = sum(count for status, count in self.counts.items() if status not in GOOD_STATUSES)
        return self.max_failures is not None and bad >= self.max_failures

    def each_step(self) -> None:
        """Commit and show what is due; called between steps of the engine."""
        with self._lock, self.span("write"):
            self.store.commit_if_due()
        if self.progress.is_due():
            with self.span("show"):
                self.progress.update(self.statistics())

    def status_line(self) -> str:
        return progress_text(self.statistics())

    def statistics(self, final: Mapping[str, int] | None = None) -> RunStatistics:
        """A snapshot; `final` are the finished table's counts, which include rows kept from before."""
        # A copy in one go: the reader thread may be counting.
        counts = {status: count for status, count in dict(final or self.counts).items() if count}
        if final is None and self.rows_kept:
            counts["ok"] = counts.get("ok", 0) + self.rows_kept
        engine = self.engine
        return RunStatistics(
            rows_total=self.rows_total,
            rows_kept=self.rows_kept,
            status_counts=counts,
            prompt_tokens=self.prompt_tokens,
            sampled_tokens=engine.sampled_tokens if engine else 0,
            jumped_tokens=engine.jumped_tokens if engine else 0,
            forward_passes=engine.forward_passes if engine else 0,
            patterns_compiled=self.compiler.compiled,
            patterns_loaded=self.compiler.loaded,
            patterns_failed=self.compiler.failed,
            compile_seconds=self.compiler.seconds,
            prefill_seconds=engine.prefill_seconds if engine else 0,
            decode_seconds=engine.decode_seconds if engine else 0,
            elapsed_seconds=time.monotonic() - self.started,
            unheeded=dict(self.unheeded),
        )

    def all_good(self, final: Mapping[str, int]) -> bool:
        return all(status in GOOD_STATUSES for status, count in final.items() if count)
