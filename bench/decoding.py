"""The 64 rows through jfbatch, measured: everything of a run but loading the model and writing the table.

Rows are read, rendered, tokenised, their grammar compiled (no cache), decoded, and every output validated,
by the parts of the program that do so in a run.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bench.first  # noqa: F401 - before torch

# isort: split

import torch
from torch import Tensor

from bench import workload
from jfbatch.decoding import ModelTokenization, vocabulary_of
from jfbatch.engine.configuration import EngineStatistics
from jfbatch.engine.engine import Engine, EngineConfig
from jfbatch.engine.graphs import StepCounts
from jfbatch.engine.model import LoadedModel, load_model
from jfbatch.engine.runner import LateTokens, Runner, Segment
from jfbatch.engine.sequence import Completion
from jfbatch.engine.watching import Span
from jfbatch.feed import Feed, FeedOptions, Waiting
from jfbatch.grammar.compiler import Compiler, CompilerOptions
from jfbatch.rows.prompt import PromptRenderer
from jfbatch.rows.reader import ReaderOptions, read_rows
from jfbatch.rows.row import Pattern
from jfbatch.rows.validate import validator

PATTERN = Pattern.of_schema(workload.SCHEMA)


@dataclass(frozen=True)
class Step:
    """One step of a run: its parts, the KV slots it attended over, seconds of all and of its forward pass."""

    segments: Sequence[Segment]
    slots: int
    pool_length: int
    seconds: float
    forward_seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def logits(self) -> int:
        return sum(len(segment.logits) for segment in self.segments)

    @property
    def prefills(self) -> bool:
        """Whether it computes tokens of a prompt."""
        return any(segment.start < segment.prompt for segment in self.segments)


@dataclass
class Measured:
    """A run: texts in row order, what it took, what it did."""

    texts: list[str]
    seconds: float
    cpu_seconds: float
    output_tokens: int
    row_steps: int  # steps that rows took part in, from the one that gave their first token
    valid: int
    statistics: EngineStatistics
    counts: StepCounts
    steps: list[Step] = field(default_factory=list)

    @property
    def rows_per_second(self) -> float:
        return len(self.texts) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def passes_per_token(self) -> float:
        return self.row_steps / self.output_tokens

    @property
    def decode_steps(self) -> list[Step]:
        return [step for step in self.steps if not step.prefills]

    @property
    def padding(self) -> float:
        """The share of the positions that decode steps attended over which held no token of a row."""
        steps = self.decode_steps
        held = sum(segment.start + len(segment.token_ids) for step in steps for segment in step.segments)
        return 1 - held / sum(step.slots * step.pool_length for step in steps)


class _TimedEngine(Engine):
    """An engine that keeps account of its steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps: list[Step] = []
        self._segments: Sequence[Segment] = ()
        self._attended = (0, 0)
        self._forward_seconds = 0.0
        self._run = self.runner.forward
        setattr(self.runner, "forward", self._timed_forward)  # noqa: B010 - taken back by `close`

    def close(self) -> None:
        """Leave the runner as it was, its KV storage empty."""
        delattr(self.runner, "forward")
        self.runner.pool.clear()
        self.runner.pool.resize(0, 1)

    def step(self) -> None:
        started = time.perf_counter()
        super().step()
        seconds = time.perf_counter() - started
        self.steps.append(Step(self._segments, *self._attended, seconds, self._forward_seconds))

    def _timed_forward(self, segments: Sequence[Segment], late: LateTokens | None = None) -> Tensor:
        started = time.perf_counter()
        logits = self._run(segments, late)
        self._forward_seconds = time.perf_counter() - started
        self._segments = segments
        self._attended = self.runner.attended(segments)
        return logits


class Bench:
    """A loaded model and its runner, for any number of runs with other settings."""

    def __init__(
        self, loaded: LoadedModel, kv_dtype: torch.dtype | None = None, static: bool | None = None
    ) -> None:
        self.loaded = loaded
        self.vocabulary = vocabulary_of(loaded)
        self.dtype: torch.dtype = loaded.model.dtype
        self.runner = Runner(loaded.model, kv_dtype, static=static)
        self.warm_up()

    @staticmethod
    def load(model: str, dtype: str, device: str = "cpu") -> Bench:
        """By the name of a model. Raises ModelError."""
        return Bench(load_model(model, device, dtype))

    def warm_up(self) -> None:
        """What only the first run pays: compiled kernels are loaded, the pool learns its shapes."""
        self.run(EngineConfig(batch_size=2, context_length=self.loaded.context_length), rows=2, max_tokens=40)

    def run(self, settings: EngineConfig, rows: int, max_tokens: int = workload.MAX_TOKENS) -> Measured:
        """Run the first `rows` rows of the workload."""
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "rows.jsonl"
            workload.write_rows(file, rows)
            return self.run_file(file, settings, rows, max_tokens, PATTERN)

    def run_file(
        self,
        file: Path,
        settings: EngineConfig,
        rows: int,
        max_tokens: int,
        pattern: Pattern | None = None,
        span: Span = nullcontext,
    ) -> Measured:
        """Run the rows of a file; `pattern` is for those that bring none."""
        started, cpu = time.perf_counter(), cpu_seconds()
        before = replace(self.runner.counts)
        engine = _TimedEngine(self.runner, ModelTokenization(self.loaded, self.vocabulary), settings, span)
        texts = [""] * rows
        valid = tokens = row_steps = 0
        try:
            with (
                Compiler(self.vocabulary, CompilerOptions(style="compact"), span=span) as compiler,
                Feed(
                    read_rows([str(file)], ReaderOptions(pattern=pattern)),
                    self._renderer(),
                    compiler,
                    self._options(max_tokens),
                    _refuse,
                    _nothing,
                    span,
                ) as feed,
            ):
                for completion in engine.run(feed):
                    waiting = feed.finished(completion.key)
                    texts[waiting.row.index] = completion.text.decode("utf-8", "replace")
                    valid += _is_valid(waiting, completion)
                    tokens += completion.completion_tokens
                    row_steps += completion.forward_passes
            seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        finally:
            engine.close()
        counts = self.runner.counts.since(before)
        return Measured(
            texts, seconds, cpu, tokens, row_steps, valid, engine.statistics, counts, engine.steps
        )

    def _renderer(self) -> PromptRenderer:
        tokenizer: Any = self.loaded.tokenizer
        return PromptRenderer(tokenizer, raw=not tokenizer.chat_template)

    def _options(self, max_tokens: int) -> FeedOptions:
        return FeedOptions(max_tokens=max_tokens, context_length=self.loaded.context_length)


def _is_valid(waiting: Waiting, completion: Completion) -> bool:
    """As a run checks it: schemas by a validator of its own, other patterns by their grammar."""
    pattern = waiting.row.pattern
    if pattern is None or pattern.kind != "schema":
        return waiting.grammar.result().fault(completion.text) is None
    return validator(pattern).check(completion.text.decode("utf-8", "replace")) is None


def _refuse(row: Any, status: str, error: str) -> None:
    raise RuntimeError(f"{row.place}: {status}: {error}")


def _nothing() -> None:
    pass


def cpu_seconds() -> float:
    """Of all threads of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
