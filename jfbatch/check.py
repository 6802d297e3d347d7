"""`jfbatch check`: which rows a run would refuse, and what its patterns are worth, without any weights.

Patterns are compiled over the 256 bytes instead of a tokenizer's vocabulary: which texts they allow does
not depend on how those are cut into tokens.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from jfbatch.config import RunConfig
from jfbatch.engine.model import check_model_name
from jfbatch.engine.tokenizer import ModelTokenizer, load_tokenizer
from jfbatch.errors import GrammarError, InputError, InvalidGrammar, OutputError, UnsupportedSchema
from jfbatch.feed import FREE_TEXT, schema_fault
from jfbatch.grammar import Grammar, Vocabulary
from jfbatch.grammar.backends import CompiledGrammar
from jfbatch.grammar.compiler import BackendChoice, Compiler, CompilerOptions
from jfbatch.job import check_settings, default_pattern
from jfbatch.report.findings import Findings, PatternFinding, RowFinding, print_findings
from jfbatch.report.kernels import telling_of_compilation
from jfbatch.rows.prompt import PromptRenderer, chat_template
from jfbatch.rows.reader import ReaderOptions, check_inputs, read_rows
from jfbatch.rows.reasoning import ReasoningEnd, reasoning_end
from jfbatch.rows.row import Pattern, Row, RowProblem
from jfbatch.rows.tags import tag_set
from jfbatch.rows.tools import PRESETS, as_tags, tool_format

MOST_STATES = 2_000
"""States that are looked at per pattern; a recursive schema never stops having new ones."""

_TEXTS = 5
_TEXT_BYTES = 2_000
_TOWARDS_END = 0.15  # how often a random text takes a step on the shortest way to its end
_LISTED_FAULTS = 1_000
_CHUNK = 64
_BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])


def check_job(config: RunConfig, json_file: Path | None = None) -> int:
    """Read every row and pattern and print what was found; 1 if a row would fail, else 0.

    `json_file` gets the findings as JSON; "-" prints them instead of the text. Raises JfbatchError, for
    damaged input after printing.
    """
    check_settings(config)
    reader = ReaderOptions(
        pattern=default_pattern(config),
        prompt_column=config.prompt_column,
        schema_column=config.schema_column,
        id_column=config.id_column,
        duplicate_ids=config.duplicate_ids,
        open_objects=config.objects == "open",
    )
    check_inputs(config.inputs, reader)
    check_model_name(config.model)
    options = CompilerOptions(
        style=config.json_style,
        objects=config.objects,
        strict=config.strict,
        timeout=config.compile_timeout,
        explore=0.0,
        backend=config.backend,
        max_string=config.max_string,
        integers=config.integers,
    )
    damage: InputError | None = None
    with telling_of_compilation(config.quiet), Compiler(_BYTES, options) as compiler:
        checking = Checking(config, compiler)
        try:
            checking.take(read_rows(config.inputs, reader))
        except InputError as error:
            damage = error
            checking.findings.damage = str(error)
    findings = checking.findings
    if json_file is not None:
        write_json(findings, json_file)
    if json_file != Path("-"):
        print_findings(findings)
    if damage is not None:
        raise damage
    return 1 if findings.rows_failing else 0


def write_json(findings: Findings, path: Path) -> None:
    """The findings as one JSON document. Raises OutputError."""
    text = json.dumps(findings.document(), ensure_ascii=False, indent=2)
    if path == Path("-"):
        print(text)
        return
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


@dataclass(frozen=True)
class _Known:
    """What was learnt of a pattern: its finding, and a shortest text it allows (None if refused)."""

    finding: PatternFinding
    shortest: str | None


class Checking:
    """The rows as they are read, against the patterns met so far."""

    def __init__(self, config: RunConfig, compiler: Compiler) -> None:
        self.findings = Findings()
        self._config = config
        self._compiler = compiler
        self._known: dict[tuple[Pattern, str | None], _Known] = {}
        self._model: ModelTokenizer | None = None
        self._renderer: PromptRenderer | None = None
        self._end: ReasoningEnd | None = None
        self._tokens: dict[str, int] = {}  # of shortest texts, where they had to be counted

    def take(self, rows: Iterable[Row]) -> None:
        """Look at every row. Raises InputError where the input breaks off, after the rows before."""
        for row in rows:
            self.findings.rows += 1
            self.findings.unheeded.update(row.unheeded)
            if row.error is not None:
                self._fault(row, "invalid_input", row.error)
                continue
            pattern = self._pattern_of(row)
            known = self._known.get((pattern, row.backend))
            if known is None:
                known = self._known[pattern, row.backend] = self._learn(pattern, row)
                self.findings.patterns.append(known.finding)
            known.finding.rows += 1
            self._look_at(row, known)

    def _pattern_of(self, row: Row) -> Pattern:
        """What a row's output must obey; tools in the way in which this model calls them."""
        pattern = row.pattern or FREE_TEXT
        if pattern.kind != "tools":
            return pattern
        _, renderer = self._tokenizer()
        # A form that is not known is the row's fault, told when its prompt is rendered.
        return as_tags(pattern, renderer.tool_format or PRESETS["hermes"])

    def _look_at(self, row: Row, known: _Known) -> None:
        """The row's prompt and the room for its output, in the order in which a run looks."""
        model, renderer = self._tokenizer()
        try:
            text = renderer.text(row)
        except RowProblem as problem:
            self._fault(row, "invalid_input", f"{row.place}: {problem}")
            return
        # No token is shorter than a byte: most rows need no tokenizing. (8: what a tokenizer adds itself.)
        size = len(text.encode("utf-8", "surrogatepass")) + 8
        limit = row.max_tokens or self._config.max_tokens
        shortest = known.shortest or ""
        with_thinking = self._end_of_thinking(text) + shortest
        length = size
        if size + len(with_thinking.encode()) > model.context_length:
            (ids,) = renderer.token_ids([text])
            length = len(ids)
        if not text:
            self._fault(row, "invalid_input", f"{row.place}: the prompt is empty: it has no tokens")
            return
        if length >= model.context_length:
            reason = f"the prompt has {length} tokens, the model's context holds {model.context_length}"
            self._fault(row, "prompt_too_long", f"{row.place}: {reason}, output included")
            return
        if known.shortest is None:
            self._fault(row, "unsupported_schema", f"{row.place}: {known.finding.reason}")
            return
        room = model.context_length - length
        has = f"max_tokens is {limit}" if limit <= room else f"the prompt leaves {room} of the context"
        # Thinking has tokens of its own, but room in the context it takes like any output.
        for needed, most in ((shortest, limit), (with_thinking, room)):
            if len(needed.encode()) > most and (count := self._count_tokens(needed)) > most:
                self._fault(row, "failed", f"{row.place}: the shortest output needs {count} tokens; {has}")
                return

    def _end_of_thinking(self, prompt: str) -> str:
        """What has to stand between a prompt and its output where the model thinks, else ""."""
        if self._end is None or self._end.is_over(prompt):
            return ""
        return self._end.end + self._end.after

    def _fault(self, row: Row, status: str, reason: str) -> None:
        self.findings.fault_counts[status] += 1
        if len(self.findings.faults) < _LISTED_FAULTS:
            self.findings.faults.append(RowFinding(row.place, row.id, status, reason))

    def _tokenizer(self) -> tuple[ModelTokenizer, PromptRenderer]:
        """Loaded for the first row that has a prompt."""
        if self._model is None or self._renderer is None:
            config = self._config
            self._model = load_tokenizer(config.model, config.cache_directory, config.trust_remote_code)
            chosen = tool_format(config.tool_format)
            self._renderer = PromptRenderer(self._model.tokenizer, config.system, config.raw, chosen)
            template = "" if config.raw else chat_template(self._model.tokenizer)
            self._end = reasoning_end(config.reasoning_end, template)
        return self._model, self._renderer

    def _count_tokens(self, text: str) -> int:
        if text not in self._tokens:
            _, renderer = self._tokenizer()
            self._tokens[text] = renderer.count_tokens(text)
        return self._tokens[text]

    def _learn(self, pattern: Pattern, row: Row) -> _Known:
        """Compile a pattern as a run would and look around in its automaton."""
        kind, label = ("free text", "") if pattern is FREE_TEXT else (pattern.kind, label_of(pattern))
        finding = PatternFinding(kind, label, pattern.fingerprint, row.place)
        started = time.perf_counter()
        shortest = None
        try:
            backend = cast(BackendChoice | None, row.backend)
            grammar = self._compiler.submit(pattern.kind, pattern.text, backend).result()
            self._compiler.forget()  # each pattern comes here once: keep no automaton
            if (fault := schema_fault(pattern)) is not None:
                raise fault
            shortest = grammar.matcher().shortest_ending().decode()
            finding.shortest_bytes = len(shortest.encode())
            finding.unenforced = grammar.unenforced
            finding.verdict = "checked" if grammar.unenforced else "enforced"
            finding.backend = grammar.backend
            finding.warnings = (*grammar.warnings, *_look_around(grammar, finding))
        except GrammarError as error:  # another engine's grammar, for which no ending was found
            finding.verdict, finding.reason = "refused", str(error)
        except InvalidGrammar as error:
            finding.verdict, finding.reason = "refused", str(error)
            if isinstance(error, UnsupportedSchema):
                finding.pointer, finding.keyword = error.path, error.keyword
        finding.seconds = time.perf_counter() - started
        return _Known(finding, shortest)


def _look_around(grammar: CompiledGrammar, finding: PatternFinding) -> Sequence[str]:
    """Fill in states and forced share; a warning where the automaton outgrows its memory on the way."""
    if not isinstance(grammar, Grammar):
        return [f"decoded by {grammar.backend}: every output is checked"]
    try:
        finding.complete = grammar.automaton.explore(MOST_STATES)
        finding.states = grammar.automaton.state_count
        finding.forced_share = forced_share(grammar)
    except InvalidGrammar as error:
        finding.states = grammar.automaton.state_count
        return [f"looking at its states stopped: {error}"]
    return []


def forced_share(grammar: Grammar, seed: int = 0) -> float:
    """The share of bytes, 0 to 1, that the grammar determines in a few random texts.

    `grammar` is one over the 256 bytes. A text takes forced bytes at once; elsewhere any allowed byte,
    and now and then a step on the shortest way to the end, so that free strings stay short.
    """
    chance = random.Random(seed)
    forced = total = 0
    for _ in range(_TEXTS):
        for piece, was_forced in _random_text(grammar, chance):
            total += len(piece)
            forced += len(piece) if was_forced else 0
    return forced / total if total else 0.0


def _random_text(grammar: Grammar, chance: random.Random) -> Iterator[tuple[bytes, bool]]:
    automaton = grammar.automaton
    state, length = automaton.start, 0
    while not grammar.is_last(state):
        piece = grammar.forced(state)
        was_forced = bool(piece)
        if not piece:
            ending = automaton.shortest_ending(state)
            hurried = length > _TEXT_BYTES or chance.random() < _TOWARDS_END
            if hurried and not ending:
                return
            piece = ending[:1] if hurried else _any_byte(grammar, state, chance)
        yield piece, was_forced
        length += len(piece)
        state = automaton.advance(state, piece)


def _any_byte(grammar: Grammar, state: int, chance: random.Random) -> bytes:
    allowed = np.flatnonzero(np.unpackbits(grammar.masks.mask(state).view(np.uint8), bitorder="little")[:256])
    return bytes([int(chance.choice(allowed))])


def label_of(pattern: Pattern) -> str:
    """A pattern in at most 48 characters: a schema's title or first keys, else the pattern itself."""
    text = pattern.text
    if pattern.kind == "schema":
        schema = pattern.schema
        title = schema.get("title") if isinstance(schema, dict) else None
        if isinstance(title, str) and title.strip():
            text = title.strip()
        elif isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
            text = f"{{{', '.join(islice(schema['properties'], 12))}}}"
    elif pattern.kind == "choice":
        text = ", ".join(pattern.choices)
    elif pattern.kind == "tags":
        text = ", ".join(tag.name or tag.begin for tag in tag_set(pattern).tags)
    text = " ".join(text.split())
    return text if len(text) <= 48 else f"{text[:45]}..."
