"""Rows on their way to the engine: rendered and tokenised ahead, each waiting for its own grammar only.

A reader thread turns rows into prompts and submits their patterns; the engine takes what is ready
and never blocks. What cannot run is settled here, with the reason, and the others go on.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import cast

from jfbatch.engine.sequence import Request
from jfbatch.errors import GrammarError, InputError, InvalidGrammar
from jfbatch.grammar.backends import CompiledGrammar
from jfbatch.grammar.compiler import BackendChoice, Compiler
from jfbatch.grammar.matcher import Matcher
from jfbatch.grammar.reasoning import Reasoning
from jfbatch.rows.prompt import PromptRenderer
from jfbatch.rows.reasoning import ReasoningEnd
from jfbatch.rows.row import Pattern, Row, RowProblem
from jfbatch.rows.tags import tag_set
from jfbatch.rows.tools import as_tags
from jfbatch.rows.validate import validator

FREE_TEXT = Pattern("regex", r"[\s\S]*")  # what a row without any pattern may write
RETRY_TEMPERATURE = 0.7  # at least, when a row is sampled again: greedy would only repeat itself
_CHUNK = 64  # rows rendered and tokenised in one call

Settle = Callable[[Row, str, str], None]


@dataclass(frozen=True)
class FeedOptions:
    """Defaults for rows that do not say otherwise; `window` bounds the rows read ahead.

    `reasoning_end` and `reasoning` are the tag and the grammar of thinking, where the model thinks.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    context_length: int = 2048
    window: int = 50_000
    reasoning_end: ReasoningEnd | None = None
    reasoning: Reasoning | None = None


@dataclass
class Waiting:
    """A row with its prompt, waiting for its grammar or running.

    `pattern` is what its output must obey: the row's own, tools as this model's tags. `reasons`: it thinks
    before its output. `fault` is what the validator has against the row's schema. `attempt` counts
    samplings from 0.
    """

    row: Row
    pattern: Pattern
    prompt_ids: array[int]
    grammar: Future[CompiledGrammar]
    fault: InvalidGrammar | None = None
    reasons: bool = False
    attempt: int = 0


class Feed:
    """A `RequestSource` over rows. A context manager: leaving it ends the reader thread.

    `settle(row, status, error)` is called for rows that never reach the engine, from the reader
    thread or the engine's. `each_step` is called whenever the engine asks for rows; `span` times the
    reader thread's work.
    """

    def __init__(
        self,
        rows: Iterator[Row],
        renderer: PromptRenderer,
        compiler: Compiler,
        options: FeedOptions,
        settle: Settle,
        each_step: Callable[[], None],
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.rows = rows
        self.renderer = renderer
        self.compiler = compiler
        self.options = options
        self.settle = settle
        self.each_step = each_step
        self.span = span
        self.running: dict[str, Waiting] = {}
        self.error: BaseException | None = None  # what ended reading early
        self._ready: deque[Waiting] = deque()
        self._unready = 0  # rows whose grammar is still being made
        self._reading = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="jfbatch-reader", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._reading = False
            self._changed.notify_all()
        self._thread.join(timeout=5)

    # What the engine asks

    def take(self, limit: int) -> list[Request]:
        """At most `limit` requests whose grammar is ready."""
        self.each_step()
        requests: list[Request] = []
        with self._changed:
            ready = [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
            self._changed.notify_all()
        for waiting in ready:
            # What the compiler says comes first: it names the place in the schema.
            fault = waiting.grammar.exception() or waiting.fault
            if isinstance(fault, InvalidGrammar):
                self.settle(waiting.row, "unsupported_schema", f"{waiting.row.place}: {fault}")
                continue
            grammar = waiting.grammar.result()
            if (reason := self._too_long(waiting, grammar)) is not None:
                self.settle(waiting.row, "failed", f"{waiting.row.place}: {reason}")
                continue
            self.running[waiting.row.key] = waiting
            requests.append(self._request(waiting, grammar))
        return requests

    def exhausted(self) -> bool:
        """Whether every row has its outcome: none is to come, and none that is out may come back."""
        with self._changed:
            return not (self._reading or self._ready or self._unready or self.running)

    def wait(self, seconds: float) -> None:
        """Until something may be ready, or `seconds` have passed."""
        with self._changed:
            if not self._ready:
                self._changed.wait(seconds)

    # What the job asks

    def finished(self, key: str) -> Waiting:
        """The row that the engine has completed; it is no longer running."""
        return self.running.pop(key)

    def again(self, waiting: Waiting) -> None:
        """Sample a row once more, with other randomness."""
        with self._changed:
            self._ready.appendleft(replace(waiting, attempt=waiting.attempt + 1))

    # The reader thread

    def _read(self) -> None:
        try:
            while self._reading and (chunk := self._next_chunk()):
                self._prepare(chunk)
                with self._changed:
                    self._changed.wait_for(
                        lambda: not self._reading or len(self._ready) + self._unready < self.options.window
                    )
        except BaseException as error:  # handed to the job, which raises it
            self.error = error
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def _next_chunk(self) -> list[Row]:
        """The next rows; those that lie before a place where the input breaks off run as well."""
        chunk: list[Row] = []
        try:
            with self.span("read"):
                for row in islice(self.rows, _CHUNK):
                    chunk.append(row)
        except InputError as error:
            self.error = error
        return chunk

    def _prepare(self, chunk: list[Row]) -> None:
        """Render and tokenise rows in one call and put them in the queue of their grammar."""
        with self.span("render"):
            prompts = self.renderer.render(chunk)
        for row, rendered in zip(chunk, prompts, strict=True):
            if isinstance(rendered, RowProblem):
                self.settle(row, "invalid_input", f"{row.place}: {rendered}")
                continue
            length, context = len(rendered.token_ids), self.options.context_length
            if length >= context:
                reason = f"the prompt has {length} tokens, the model's context holds {context}"
                self.settle(row, "prompt_too_long", f"{row.place}: {reason}, output included")
                continue
            pattern = self._pattern_of(row)
            backend = cast(BackendChoice | None, row.backend)
            future = self.compiler.submit(pattern.kind, pattern.text, backend)
            end = self.options.reasoning_end
            reasons = end is not None and not end.is_over(rendered.text)
            ids = array("i", rendered.token_ids)
            waiting = Waiting(row, pattern, ids, future, schema_fault(pattern), reasons)
            with self._changed:
                self._unready += 1
            future.add_done_callback(partial(self._grammar_is_ready, waiting))

    def _pattern_of(self, row: Row) -> Pattern:
        """What a row's output must obey; tools become the tags of this model."""
        pattern = row.pattern or FREE_TEXT
        chosen = self.renderer.tool_format
        return as_tags(pattern, chosen) if pattern.kind == "tools" and chosen is not None else pattern

    def _grammar_is_ready(self, waiting: Waiting, _grammar: Future[CompiledGrammar]) -> None:
        with self._changed:
            self._unready -= 1
            self._ready.append(waiting)
            self._changed.notify_all()

    def _request(self, waiting: Waiting, grammar: CompiledGrammar) -> Request:
        row, options = waiting.row, self.options
        temperature = options.temperature if row.temperature is None else row.temperature
        seed = options.seed if row.seed is None else row.seed
        if waiting.attempt:
            temperature = max(temperature, RETRY_TEMPERATURE)
            seed += waiting.attempt
        matcher: Matcher = grammar.matcher()
        max_tokens, unused = self._max_tokens(row), None
        if waiting.reasons and options.reasoning is not None:
            thinking = options.reasoning.matcher(matcher)
            matcher, unused = thinking, thinking.unused_tokens
            max_tokens += options.reasoning.most_tokens
        return Request(
            key=row.key,
            prompt_ids=list(waiting.prompt_ids),
            matcher=matcher,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            group=waiting.pattern.fingerprint,
            unused=unused,
        )

    def _max_tokens(self, row: Row) -> int:
        """The most tokens of the row's output, its thinking aside."""
        return self.options.max_tokens if row.max_tokens is None else row.max_tokens

    def _too_long(self, waiting: Waiting, grammar: CompiledGrammar) -> str | None:
        """Why no output behind its thinking fits a row; of others, the engine says it."""
        if not waiting.reasons:
            return None
        try:
            ending = grammar.matcher().shortest_ending()
        except GrammarError:  # another engine's grammar, for which no ending was found: the engine says so
            return None
        most = self._max_tokens(waiting.row)
        if len(ending) <= most:  # a token has a byte at least
            return None
        needed = self.renderer.count_tokens(ending.decode("utf-8", "replace"))
        return f"the shortest output needs {needed} tokens; max_tokens is {most}" if needed > most else None


def schema_fault(pattern: Pattern) -> InvalidGrammar | None:
    """What the validator has against the schemas of a pattern."""
    try:
        if pattern.kind == "schema":
            validator(pattern)
        elif pattern.kind == "tags":
            for tag in tag_set(pattern).tags:
                try:
                    tag.validator()
                except InvalidGrammar as error:
                    raise InvalidGrammar(f"{tag.place}: {error.reason}") from None
    except InvalidGrammar as error:
        return error
    return None
