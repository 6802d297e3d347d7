"""The background threads that turn patterns into ready grammars.

Each distinct pattern is compiled once per backend, or loaded from the disk cache, and explored ahead of
the decoder; a row waits for its own pattern only. A pattern that fails or passes its time limit gives an
InvalidGrammar that is remembered: it goes to exactly its rows and is never tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Literal

from jfbatch.errors import GrammarError, GrammarTooLarge, InvalidGrammar, Unsatisfiable, UnsupportedSchema
from jfbatch.grammar import backends
from jfbatch.grammar.ahead import explore_ahead, warm_up
from jfbatch.grammar.backends.protocol import (
    Backend,
    BackendName,
    CompiledGrammar,
    ForeignGrammar,
    one_line,
)
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.deadline import deadline
from jfbatch.grammar.grammar import Grammar, JsonStyle, Objects
from jfbatch.grammar.json_schema import Integers
from jfbatch.grammar.kept import KeptKeys
from jfbatch.grammar.stored import dump_grammar, load_grammar
from jfbatch.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

BackendChoice = Literal["auto", "fsm", "llguidance", "xgrammar", "outlines"]
FALLBACK: BackendName = "llguidance"
"""What "auto" tries where fsm refuses a pattern."""

FORMAT = "jfbatch-grammar-2"
_FOREIGN_BYTES = 256 * 1024  # an estimate: other engines do not say what a grammar takes
_REFUSAL_BYTES = 4096  # with the pattern's job and future
STACK_BYTES = 512 * 1024 * 1024  # of a compiling thread: virtual, touched only by deeply nested patterns
RECURSION_LIMIT = 200_000
_MOST_UNEXPLORED = 64


@dataclass(frozen=True)
class CompilerOptions:
    """How patterns become grammars; part of every grammar's fingerprint but for the limits."""

    style: JsonStyle = "spaced"
    objects: Objects = "closed"
    strict: bool = False
    timeout: float = 30.0  # seconds for one pattern
    threads: int = 1
    explore: float = 0.2  # seconds of looking ahead per pattern
    backend: BackendChoice = "fsm"  # for patterns that are submitted without one
    max_string: int | None = None  # most characters of a string that its schema lets be of any length
    integers: Integers = "any"  # "int64": those that lack a bound keep to what a table column holds
    memory: int = 1 << 30  # bytes of ready grammars, past which those met longest ago are given up


@dataclass
class CompilerStatistics:
    """Counts of distinct patterns; seconds are of all threads together."""

    compiled: int = 0
    loaded: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Job:
    """A pattern for the first of `candidates`; `refused` is why earlier ones did not take it."""

    kind: str
    text: str
    key: str
    candidates: tuple[BackendName, ...]
    future: Future[CompiledGrammar]
    refused: InvalidGrammar | None = None
    given_up: threading.Event = field(default_factory=threading.Event)

    def next(self, refused: InvalidGrammar) -> _Job | None:
        """The same pattern for the next candidate, if there is one."""
        if len(self.candidates) == 1:
            return None
        return replace(self, candidates=self.candidates[1:], refused=refused, given_up=threading.Event())


class Compiler:
    """Compiles patterns in background threads; a context manager, which stores what grew at its end.

    `span` times each pattern's work.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: CompilerOptions,
        cache: GrammarCache | None = None,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.vocabulary = vocabulary
        self.options = options
        self.cache = cache
        self.span = span
        self.statistics = CompilerStatistics()
        self.futures: dict[tuple[str, tuple[BackendName, ...]], Future[CompiledGrammar]] = {}
        # What became of a pattern (by fingerprint) with one backend: "auto" and "fsm" share it.
        self.outcomes: dict[tuple[str, BackendName], CompiledGrammar | InvalidGrammar] = {}
        self.kept = KeptKeys(options.memory)
        self.lock = threading.Lock()
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()
        # Grammars to look ahead in, once no pattern waits; past the limit the oldest, whose rows run by now,
        # are left to look at their states as they meet them.
        self._unexplored: deque[tuple[_Job, CompiledGrammar]] = deque(maxlen=_MOST_UNEXPLORED)
        self.closing = threading.Event()
        self._backends: dict[BackendName, Backend] = {}
        self._opening = threading.Lock()
        for _ in range(max(1, options.threads)):
            self._start_thread()

    def submit(self, kind: str, text: str, backend: BackendChoice | None = None) -> Future[CompiledGrammar]:
        """The grammar of a pattern, now or later; the same future for the same pattern and backend."""
        key = self.fingerprint(kind, text)
        candidates = candidates_of(backend or self.options.backend, kind, text, self.options.strict)
        with self.lock:
            self.kept.meet(key)
            future = self.futures.get((key, candidates))
            if future is None:
                future = self.futures[key, candidates] = Future()
                self.queue.put(_Job(kind, text, key, candidates, future))
        return future

    def forget(self) -> None:
        """Keep nothing of the patterns so far: for those who look at each only once."""
        with self.lock:
            self.futures.clear()
            self.outcomes.clear()
            self.kept.clear()

    def fingerprint(self, kind: str, text: str) -> str:
        """sha256 hex over the pattern as it is written, what changes its language, and the vocabulary."""
        options = self.options
        parts = [FORMAT, kind, text, options.style, options.objects, str(options.strict)]
        parts += [str(options.max_string)] if options.max_string is not None else []
        parts += [f"integers {options.integers}"] if options.integers != "any" else []
        parts.append(self.vocabulary.fingerprint)
        return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def close(self) -> None:
        """Stop the threads and store the grammars that met new states since they were loaded."""
        self.closing.set()
        self.queue.put(None)
        if self.cache is None:
            return
        for (key, _), outcome in list(self.outcomes.items()):
            if isinstance(outcome, Grammar) and outcome.masks.walks:
                self._store(key, outcome)

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start_thread(self) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="jfbatch-compiler", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))
        try:
            with self.span("warm up"):
                warm_up()
        except Exception:  # the thread must live: the patterns themselves say what is wrong, row by row
            logger.exception("warming up failed")
        while (work := self._next()) is not None and not self.closing.is_set():
            job, ready = work
            started = time.perf_counter()
            survived = False
            try:
                with self.span("compile"):
                    if ready is None:
                        self._run(job)
                    else:
                        self._look_ahead(job, ready)
                    self._make_room(job.key)
                survived = True
            finally:
                if not survived:
                    self._bury(job)
            with self.lock:
                self.statistics.seconds += time.perf_counter() - started
        self.queue.put(None)  # for the next thread

    def _next(self) -> tuple[_Job, CompiledGrammar | None] | None:
        """The next pattern to compile, or a grammar to look ahead in while there is none; None at the end."""
        try:
            job = self.queue.get_nowait()
        except Empty:
            try:
                return self._unexplored.popleft()
            except IndexError:
                job = self.queue.get()
        return None if job is None else (job, None)

    def _bury(self, job: _Job) -> None:
        """This thread is dying: its pattern's rows get the reason, and another thread takes the queue."""
        self._settle(job, InvalidGrammar("internal error: the compiling thread died"))
        self._start_thread()

    def _make_room(self, newest: str) -> None:
        """Give up the grammars met longest ago, past the limit; rows that have one keep it.

        What is dropped is stored first, and loaded or compiled again where its pattern is met again.
        """
        with self.lock:
            dropped = self.kept.add(newest, self._bytes_of)
            gone = [(key, self.outcomes.get((key, "fsm"))) for key in dropped]
            if dropped:
                for known in [known for known in self.futures if known[0] in set(dropped)]:
                    if self.futures[known].done():
                        del self.futures[known]
            for key in dropped:
                for name in backends.BACKENDS:
                    self.outcomes.pop((key, name), None)
        for key, outcome in gone:
            if isinstance(outcome, Grammar) and outcome.masks.walks:
                self._store(key, outcome)

    def _bytes_of(self, key: str) -> int:
        size = 0
        for name in backends.BACKENDS:
            outcome = self.outcomes.get((key, name))
            if isinstance(outcome, Grammar):
                size += outcome.memory
            elif outcome is not None:
                size += _REFUSAL_BYTES if isinstance(outcome, InvalidGrammar) else _FOREIGN_BYTES
        return size

    def _run(self, job: _Job) -> None:
        """Settle a job by the first of its candidates that takes the pattern."""
        outcome = self._outcome(job)
        if job.given_up.is_set():
            return
        if not isinstance(outcome, InvalidGrammar):
            self._settle(job, outcome)
            self._unexplored.append((job, outcome))
            return
        refused = _refused_too(job, outcome)
        if not isinstance(refused, Unsatisfiable) and (following := job.next(refused)):
            self._run(following)
        else:
            self._settle(job, refused)

    def _outcome(self, job: _Job) -> CompiledGrammar | InvalidGrammar:
        """The grammar of a pattern from the job's first candidate; made once, within the time limit."""
        name = job.candidates[0]
        with self.lock:
            known = self.outcomes.get((job.key, name))
        if known is not None:
            return known
        outcome: CompiledGrammar | InvalidGrammar
        watch: threading.Timer | None = None
        try:
            backend = None if name == "fsm" else self._open(name)
            watch = threading.Timer(self.options.timeout * 1.5 + 1, self._give_up, (job,))
            watch.daemon = True
            watch.start()
            with deadline(self.options.timeout):
                outcome = (
                    self._load(job) or self._compile(job) if backend is None else self._make(job, backend)
                )
        except InvalidGrammar as error:
            outcome = error.with_traceback(None)  # whose frames would keep the schema in memory
        except GrammarError as error:  # another engine that breaks at its first mask
            outcome = InvalidGrammar(str(error))
        except RecursionError:
            outcome = GrammarTooLarge("the pattern nests too deep")
        except MemoryError:
            outcome = GrammarTooLarge("the pattern needs more memory than there is")
        except Exception as error:  # the row boundary: one pattern's fault must not end the run
            logger.exception("compiling a %s failed", job.kind)
            outcome = InvalidGrammar(f"internal error: {type(error).__name__}: {error}")
        finally:
            if watch is not None:
                watch.cancel()
        with self.lock:
            if not job.given_up.is_set():
                self.outcomes[job.key, name] = outcome
        return outcome

    def _open(self, name: BackendName) -> Backend:
        """The backend for this vocabulary; making it counts towards no pattern's time limit."""
        with self._opening:
            if name not in self._backends:
                self._backends[name] = backends.open_backend(name, self.vocabulary)
            return self._backends[name]

    def _load(self, job: _Job) -> Grammar | None:
        data = self.cache.get(job.key) if self.cache else None
        if data is None:
            return None
        try:
            grammar = load_grammar(data, self.vocabulary)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            logger.warning("a cached grammar is damaged and is made again: %s", error)
            return None
        with self.lock:
            self.statistics.loaded += 1
        return grammar

    def _compile(self, job: _Job) -> Grammar:
        options = self.options
        grammar = Grammar.from_pattern(
            job.kind,
            job.text,
            self.vocabulary,
            options.style,
            options.objects,
            options.strict,
            options.max_string,
            options.integers,
        )
        grammar.matcher().token_mask()
        with self.lock:
            self.statistics.compiled += 1
        return grammar

    def _make(self, job: _Job, backend: Backend) -> ForeignGrammar:
        """A pattern compiled by another engine."""
        options = self.options
        backends.check_supported(job.candidates[0], job.kind, options.style, options.objects, options.strict)
        if options.max_string is not None and job.kind == "schema":
            raise InvalidGrammar(f"{job.candidates[0]}: --max-string needs the backend fsm")
        grammar = backend.compile(job.kind, job.text, options.style, options.objects)
        grammar.matcher().token_mask()
        with self.lock:
            self.statistics.compiled += 1
        return grammar

    def _settle(self, job: _Job, outcome: CompiledGrammar | InvalidGrammar) -> None:
        """Give the future its outcome unless it was given up before."""
        with self.lock:
            if job.future.done():
                return
            if isinstance(outcome, InvalidGrammar):
                self.statistics.failed += 1
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)

    def _give_up(self, job: _Job) -> None:
        """A thread did not come back in time: the next candidate gets the pattern, or its rows the reason.

        Another thread takes the queue; what this one still brings is not waited for.
        """
        reason = GrammarTooLarge(f"compiling took longer than the limit of {self.options.timeout:g} s")
        with self.lock:
            if job.future.done() or (job.key, job.candidates[0]) in self.outcomes or self.closing.is_set():
                return
            job.given_up.set()
            self.outcomes[job.key, job.candidates[0]] = reason
        refused = _refused_too(job, reason)
        if following := job.next(refused):
            self.queue.put(following)
        else:
            self._settle(job, refused)
        self._start_thread()

    def _look_ahead(self, job: _Job, grammar: CompiledGrammar) -> None:
        try:
            if isinstance(grammar, Grammar):
                with self.span("look ahead"):
                    explore_ahead(grammar, self.options.explore, self.closing)
            elif isinstance(grammar, ForeignGrammar):
                grammar.prepare()
        except InvalidGrammar as error:
            logger.debug("looking ahead stopped: %s", error)
        if isinstance(grammar, Grammar) and self.cache is not None and grammar.masks.walks:
            self._store(job.key, grammar)

    def _store(self, key: str, grammar: Grammar) -> None:
        if self.cache is not None and self.cache.set(key, dump_grammar(grammar)):
            grammar.masks.walks = 0


def candidates_of(
    choice: BackendChoice, kind: str, text: str, strict: bool = False
) -> tuple[BackendName, ...]:
    """The backends to try, in order.

    "auto" has a second one where it is installed. But under `strict` no schema goes to one that vouches
    for nothing, and a regular expression that Python does not know goes to none that reads it as Rust's.
    """
    if choice != "auto":
        return (choice,)
    if kind not in backends.BACKENDS[FALLBACK].kinds or (kind == "regex" and not _is_python_regex(text)):
        return ("fsm",)
    return (
        ("fsm", FALLBACK)
        if backends.is_installed(FALLBACK) and not (strict and kind == "schema")
        else ("fsm",)
    )


@lru_cache(maxsize=1024)
def _is_python_regex(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _refused_too(job: _Job, error: InvalidGrammar) -> InvalidGrammar:
    """The first candidate's reason, which knows the place best, and what the next one said."""
    if job.refused is None:
        return error
    reason = f"{job.refused.reason}; {job.candidates[0]} refuses it too ({one_line(error.reason, 200)})"
    if isinstance(job.refused, UnsupportedSchema):
        return UnsupportedSchema(job.refused.path, job.refused.keyword, reason)
    return InvalidGrammar(reason)
