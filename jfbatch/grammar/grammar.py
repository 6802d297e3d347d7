"""A compiled pattern and a row's position in it: what front ends, compiler and engine meet in.

A `Grammar` is shared by all rows of a pattern and used from several threads; an `AutomatonMatcher`
belongs to one row.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarError, InvalidGrammar, NothingMatches, Unsatisfiable
from jfbatch.grammar import expression as expressions
from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.counted import leaf_of
from jfbatch.grammar.ebnf import grammar_to_rules
from jfbatch.grammar.expression import RuleSet
from jfbatch.grammar.json_schema import CompiledSchema, Integers, schema_to_rules
from jfbatch.grammar.json_schema.python_types import schema_of
from jfbatch.grammar.masks import MaskTable
from jfbatch.grammar.matcher import new_serial
from jfbatch.grammar.program import Program, compile_program
from jfbatch.grammar.regex import JSON_CHARACTER, RAW_UTF8, regex_to_expression
from jfbatch.grammar.tags import reasoning_to_rules, tags_to_rules
from jfbatch.grammar.vocabulary import Vocabulary

JsonStyle = Literal["spaced", "compact", "pretty"]
Objects = Literal["open", "closed"]

_MOST_ENDINGS = 10_000  # that a grammar remembers


class Grammar:
    """A pattern compiled for one vocabulary.

    `unenforced` lists what the automaton cannot hold (JSON pointer and keyword): outputs are then a
    superset and must be checked. `warnings` are for people.
    """

    backend: Literal["fsm"] = "fsm"  # see backends.protocol.CompiledGrammar

    def __init__(
        self,
        program: Program,
        vocabulary: Vocabulary,
        unenforced: Sequence[str] = (),
        warnings: Sequence[str] = (),
        automaton: Automaton | None = None,
    ) -> None:
        self.serial = new_serial()
        self.vocabulary = vocabulary
        self.program = program
        self.automaton = automaton or Automaton(program)
        self.masks = MaskTable(self.automaton, vocabulary)
        self.unenforced = tuple(unenforced)
        self.warnings = tuple(warnings)
        self._forced: dict[int, bytes] = {}
        self._last: dict[int, bool] = {}
        self._endings: dict[int, bytes] = {}

    @staticmethod
    def from_json_schema(
        schema: Any,
        vocabulary: Vocabulary,
        style: JsonStyle = "spaced",
        objects: Objects = "closed",
        strict: bool = False,
        max_string: int | None = None,
        integers: Integers = "any",
    ) -> Grammar:
        """The JSON texts a schema allows, in one fixed layout.

        `schema` is a JSON Schema, or a pydantic model or dataclass, whose schema is then taken.
        `objects` "closed" leaves undeclared properties out unless the schema asks for them, "open"
        lets them through wherever the specification does. `max_string` is the most characters of strings
        that the schema lets be of any length. `integers` "int64" holds integers that lack a bound to it.
        Raises UnsupportedSchema, UsageError on an option that there is not.
        """
        with _collector_paused():
            compiled, program = compile_schema(
                schema_of(schema), style, objects, strict, _absent_bytes(vocabulary), max_string, integers
            )
        return Grammar(program, vocabulary, compiled.unenforced, compiled.warnings)

    @staticmethod
    def from_regex(pattern: str, vocabulary: Vocabulary) -> Grammar:
        """The texts that Python's re.fullmatch(pattern, text) accepts, as UTF-8. Raises InvalidGrammar."""
        expression = regex_to_expression(
            _text(pattern, "a regular expression"), dialect="python", alphabet=RAW_UTF8
        )
        return Grammar(_program(RuleSet(expression), vocabulary), vocabulary)

    @staticmethod
    def from_choice(choices: Iterable[str], vocabulary: Vocabulary) -> Grammar:
        """Exactly one of the given texts. Raises InvalidGrammar if there is none."""
        listed = list(choices) if isinstance(choices, Iterable) and not isinstance(choices, str) else []
        if not listed or not all(isinstance(text, str) for text in listed):
            raise InvalidGrammar("a choice needs a list of at least one text")
        try:
            texts = [expressions.literal(text) for text in listed]
        except UnicodeEncodeError:
            raise InvalidGrammar("a choice holds a lone surrogate, which no text can") from None
        return Grammar(_program(RuleSet(expressions.choice(*texts)), vocabulary), vocabulary)

    @staticmethod
    def from_grammar(text: str, vocabulary: Vocabulary) -> Grammar:
        """The texts of a grammar file, in GBNF or Lark's syntax, as UTF-8. Raises InvalidGrammar."""
        return Grammar(_program(grammar_to_rules(_text(text, "a grammar")), vocabulary), vocabulary)

    @staticmethod
    def from_tags(
        spec: str,
        vocabulary: Vocabulary,
        style: JsonStyle = "spaced",
        objects: Objects = "closed",
        strict: bool = False,
        max_string: int | None = None,
        integers: Integers = "any",
    ) -> Grammar:
        """Free text with tags around JSON values (`tags.tags_to_rules`). Raises InvalidGrammar."""
        with _collector_paused():
            compiled = tags_to_rules(
                spec, style, objects, strict, _absent_bytes(vocabulary), max_string, integers
            )
            program = _program(compiled.rules, vocabulary)
        return Grammar(program, vocabulary, compiled.unenforced, compiled.warnings)

    @staticmethod
    def from_pattern(
        kind: str,
        text: str,
        vocabulary: Vocabulary,
        style: JsonStyle = "spaced",
        objects: Objects = "closed",
        strict: bool = False,
        max_string: int | None = None,
        integers: Integers = "any",
    ) -> Grammar:
        """A pattern as rows carry it: its kind, and its text (JSON for a schema, a choice and tags).

        "reasoning" is what a model thinks before its output (`tags.reasoning_to_rules`).
        """
        _text(text, f"a pattern of kind {kind}")
        if kind == "schema":
            schema = json.loads(text)
            return Grammar.from_json_schema(schema, vocabulary, style, objects, strict, max_string, integers)
        if kind == "regex":
            return Grammar.from_regex(text, vocabulary)
        if kind == "choice":
            return Grammar.from_choice(json.loads(text), vocabulary)
        if kind == "grammar":
            return Grammar.from_grammar(text, vocabulary)
        if kind == "tags":
            return Grammar.from_tags(text, vocabulary, style, objects, strict, max_string, integers)
        if kind == "reasoning":
            return Grammar(_program(reasoning_to_rules(text), vocabulary), vocabulary)
        raise InvalidGrammar(
            f"patterns of kind {kind!r} are not known: schema, regex, choice, grammar and tags are"
        )

    @property
    def memory(self) -> int:
        """Bytes it takes, about: its automaton's arrays and masks so far, and what Python adds."""
        arrays = sum(array.nbytes for array in self.automaton.store)
        return 65_536 + arrays + len(self.masks.masks) * 4 * self.vocabulary.words

    def matcher(self) -> AutomatonMatcher:
        """A new position at the start of an output."""
        return AutomatonMatcher(self)

    def fault(self, text: bytes) -> str | None:
        """None: what the automaton lets through of a regex, choice or grammar is right."""
        return None

    def forced(self, state: int) -> bytes:
        found = self._forced.get(state)
        if found is None:
            found = self._forced[state] = self.automaton.forced(state)
        return found

    def is_last(self, state: int) -> bool:
        found = self._last.get(state)
        if found is None:
            found = self._last[state] = self.automaton.is_last(state)
        return found

    def shortest_ending(self, state: int) -> bytes:
        found = self._endings.get(state)
        if found is None:
            if len(self._endings) >= _MOST_ENDINGS:
                self._endings.clear()
            found = self._endings[state] = self.automaton.shortest_ending(state)
        return found


def compile_schema(
    schema: Any,
    style: JsonStyle = "spaced",
    objects: Objects = "closed",
    strict: bool = False,
    absent_bytes: Iterable[int] = (),
    max_string: int | None = None,
    integers: Integers = "any",
) -> tuple[CompiledSchema, Program]:
    """The rules of a schema and their program, before any vocabulary is looked at.

    Raises UnsupportedSchema, Unsatisfiable and GrammarTooLarge.
    """
    compiled = schema_to_rules(
        schema, style=style, objects=objects, strict=strict, max_string=max_string, integers=integers
    )
    try:
        return compiled, compile_program(compiled.rules, leaf_of, JSON_CHARACTER, absent_bytes)
    except NothingMatches:
        raise Unsatisfiable from None


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection while a schema compiles: it makes many small values and no circles.

    Looking through them again and again takes up to two thirds of the time for a large schema.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidGrammar(f"{name} must be text (str), not {type(value).__name__}")
    return value


def _absent_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    if not isinstance(vocabulary, Vocabulary):
        raise TypeError(f"a Vocabulary is needed, not {type(vocabulary).__name__}: Vocabulary.from_tokenizer")
    return vocabulary.unwritten_bytes


def _program(rules: RuleSet, vocabulary: Vocabulary) -> Program:
    return compile_program(rules, leaf_of, JSON_CHARACTER, _absent_bytes(vocabulary))


class AutomatonMatcher:
    """One row's position: the automaton state after each accepted token (see `Matcher`)."""

    __slots__ = ("ended", "grammar", "states")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.states = [grammar.automaton.start]
        self.ended = False  # an end token was taken; it repeats the last state

    def fork(self) -> AutomatonMatcher:
        """A matcher of its own at the same position."""
        other = AutomatonMatcher(self.grammar)
        other.states, other.ended = self.states.copy(), self.ended
        return other

    def token_mask(self) -> NDArray[np.uint32]:
        if self.ended:
            return np.zeros(self.grammar.vocabulary.words, np.uint32)
        return self.grammar.masks.mask(self.states[-1])

    def state_key(self) -> Hashable:
        return self.grammar.serial, -1 if self.ended else self.states[-1]

    def accept_token(self, token_id: int) -> None:
        vocabulary = self.grammar.vocabulary
        state = self.states[-1]
        if self.ended:
            raise GrammarError("no token may follow an end token")
        if token_id in vocabulary.end_ids:
            if not self.is_accepting():
                raise GrammarError(f"end token {token_id} where the output is not complete")
            self.ended = True
            self.states.append(state)
            return
        data = vocabulary.token_bytes[token_id] if 0 <= token_id < vocabulary.size else None
        target = self.grammar.automaton.advance(state, data) if data else -1
        if target < 0:
            raise GrammarError(f"token {token_id} ({data!r}) is not allowed here")
        self.states.append(target)

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self.states):
            raise GrammarError(f"cannot undo {count} tokens of {len(self.states) - 1}")
        if count:
            del self.states[-count:]
            self.ended = False

    def forced_bytes(self) -> bytes:
        return b"" if self.ended else self.grammar.forced(self.states[-1])

    def is_accepting(self) -> bool:
        return self.grammar.automaton.is_accepting(self.states[-1])

    def is_finished(self) -> bool:
        return self.ended or (self.is_accepting() and self.grammar.is_last(self.states[-1]))

    def shortest_ending(self) -> bytes:
        return b"" if self.ended else self.grammar.shortest_ending(self.states[-1])
