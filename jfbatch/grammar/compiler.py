"""The background threads that turn patterns into ready grammars.

Each distinct pattern is compiled once, or loaded from the disk cache, and explored ahead of the
decoder; a row waits for its own pattern only. A pattern that fails or passes its time limit gives
an InvalidGrammar that is remembered: it goes to exactly its rows and is never tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from types import TracebackType

import numpy as np

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.deadline import deadline
from jfbatch.grammar.grammar import Grammar, JsonStyle, Objects
from jfbatch.grammar.stored import dump_grammar, load_grammar
from jfbatch.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

FORMAT = "jfbatch-grammar-1"
STACK_BYTES = 512 * 1024 * 1024  # of a compiling thread: virtual, touched only by deeply nested patterns
RECURSION_LIMIT = 200_000


@dataclass(frozen=True)
class CompilerOptions:
    """How patterns become grammars; part of every grammar's fingerprint but for the limits."""

    style: JsonStyle = "spaced"
    objects: Objects = "closed"
    strict: bool = False
    timeout: float = 30.0  # seconds for one pattern
    threads: int = 1
    explore: float = 0.2  # seconds of looking ahead per pattern


@dataclass
class CompilerStatistics:
    """Counts of distinct patterns; seconds are of all threads together."""

    compiled: int = 0
    loaded: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Job:
    kind: str
    text: str
    key: str
    future: Future[Grammar]


class Compiler:
    """Compiles patterns in background threads; a context manager, which stores what grew at its end."""

    def __init__(
        self, vocabulary: Vocabulary, options: CompilerOptions, cache: GrammarCache | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.options = options
        self.cache = cache
        self.statistics = CompilerStatistics()
        self.futures: dict[str, Future[Grammar]] = {}
        self.stored_states: dict[str, int] = {}  # key -> masks in the cache's copy
        self.lock = threading.Lock()
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()
        self.closing = threading.Event()
        for _ in range(max(1, options.threads)):
            self._start_thread()

    def submit(self, kind: str, text: str) -> Future[Grammar]:
        """The grammar of a pattern, now or later; the same future for the same pattern."""
        key = self.fingerprint(kind, text)
        with self.lock:
            future = self.futures.get(key)
            if future is None:
                future = self.futures[key] = Future()
                self.queue.put(_Job(kind, text, key, future))
        return future

    def fingerprint(self, kind: str, text: str) -> str:
        """sha256 hex over the pattern, the options that change its language, and the vocabulary."""
        options = self.options
        parts = [FORMAT, kind, text, options.style, options.objects, str(options.strict)]
        parts.append(self.vocabulary.fingerprint)
        return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def close(self) -> None:
        """Stop the threads and store the grammars that met new states since they were loaded."""
        self.closing.set()
        self.queue.put(None)
        if self.cache is None:
            return
        for key, future in self.futures.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                grammar = future.result()
                if grammar.masks.walks:
                    self._store(key, grammar)

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
        warm_up()
        while (job := self.queue.get()) is not None and not self.closing.is_set():
            watch = threading.Timer(self.options.timeout * 1.5 + 1, self._give_up, (job,))
            watch.daemon = True
            watch.start()
            self._run(job)
            watch.cancel()
        self.queue.put(None)  # for the next thread

    def _run(self, job: _Job) -> None:
        started = time.perf_counter()
        try:
            with deadline(self.options.timeout):
                grammar = self._load(job) or self._compile(job)
        except InvalidGrammar as error:
            self._settle(job, None, error)
        except RecursionError:
            self._settle(job, None, GrammarTooLarge("the pattern nests too deep"))
        except MemoryError:
            self._settle(job, None, GrammarTooLarge("the pattern needs more memory than there is"))
        except Exception as error:  # the row boundary: one pattern's fault must not end the run
            logger.exception("compiling a %s failed", job.kind)
            self._settle(job, None, InvalidGrammar(f"internal error: {type(error).__name__}: {error}"))
        else:
            self._settle(job, grammar, None)
            self._look_ahead(job, grammar)
        with self.lock:
            self.statistics.seconds += time.perf_counter() - started

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
            job.kind, job.text, self.vocabulary, options.style, options.objects, options.strict
        )
        grammar.matcher().token_mask()
        with self.lock:
            self.statistics.compiled += 1
        return grammar

    def _settle(self, job: _Job, grammar: Grammar | None, error: InvalidGrammar | None) -> None:
        """Give the future its outcome unless it was given up before."""
        with self.lock:
            if job.future.done():
                return
            if error is not None:
                self.statistics.failed += 1
                job.future.set_exception(error)
            elif grammar is not None:
                job.future.set_result(grammar)

    def _give_up(self, job: _Job) -> None:
        """A thread did not come back in time: its rows get the reason, another thread takes the queue."""
        if job.future.done() or self.closing.is_set():
            return
        reason = f"compiling took longer than the limit of {self.options.timeout:g} s"
        self._settle(job, None, GrammarTooLarge(reason))
        self._start_thread()

    def _look_ahead(self, job: _Job, grammar: Grammar) -> None:
        try:
            explore_ahead(grammar, self.options.explore, self.closing)
        except InvalidGrammar as error:
            logger.debug("looking ahead stopped: %s", error)
        if self.cache is not None and grammar.masks.walks:
            self._store(job.key, grammar)

    def _store(self, key: str, grammar: Grammar) -> None:
        if self.cache is not None and self.cache.set(key, dump_grammar(grammar)):
            grammar.masks.walks = 0


@cache
def warm_up() -> None:
    """Have numba compile, or load from its cache, the kernels that every pattern needs.

    Once per installation this takes tens of seconds; no pattern's time limit shall pay for it.
    """
    strings = {  # a length alone, with a small pattern, with one that is worth counting, and two patterns
        "a": {"type": "string", "maxLength": 5},
        "b": {"type": "string", "maxLength": 5, "pattern": "^a"},
        "c": {"type": "string", "maxLength": 5000, "pattern": "^([a-z]+ )*b$"},
        "d": {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]},
    }
    schema = {"type": "object", "properties": strings, "required": list(strings)}
    tokens = [*(bytes([byte]) for byte in range(128)), b"longer than a", None]
    grammar = Grammar.from_json_schema(schema, Vocabulary.from_tokens(tokens, end_ids=[129]))
    matcher = grammar.matcher()
    for byte in b'{"a": "ab", "b": "ab", "c": "b", "d": "ab"}':
        matcher.token_mask()
        matcher.forced_bytes()
        matcher.accept_token(byte)
        matcher.shortest_ending()
        matcher.is_finished()
    grammar.automaton.advance_afresh(grammar.automaton.start, b"{")
    grammar.automaton.explore(100)


def explore_ahead(grammar: Grammar, seconds: float, stop: threading.Event | None = None) -> None:
    """Make the masks that decoding will ask for: random texts of the grammar, token by token.

    Forced bytes are taken at once as the engine would; ends when time is up, when five texts in a
    row met no new mask, or when `stop` is set. Raises GrammarTooLarge if the grammar outgrows memory.
    """
    chance = random.Random(0)
    end = time.monotonic() + seconds
    automaton, masks, vocabulary = grammar.automaton, grammar.masks, grammar.vocabulary
    idle = 0
    while idle < 5:
        state, walks = automaton.start, masks.walks
        for length in range(256):
            if time.monotonic() > end or (stop is not None and stop.is_set()):
                return
            mask = masks.mask(state)
            forced = grammar.forced(state)
            ending = automaton.shortest_ending(state) if length > 24 and chance.random() < 0.5 else b""
            if forced:
                state = automaton.advance(state, forced)
            elif ending:
                state = automaton.advance(state, ending[:1])
            else:
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                data = vocabulary.token_bytes[int(chance.choice(allowed))] if len(allowed) else None
                if data is None:  # an end token, or nothing
                    break
                state = automaton.advance(state, data)
        idle = idle + 1 if masks.walks == walks else 0
