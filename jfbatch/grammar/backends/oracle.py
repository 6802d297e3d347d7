"""Our own automaton of a pattern that another backend decodes: it knows endings, and checks what came out.

It reads single bytes and is made on first use. Where our front ends refuse the pattern there is none, and
the other backend's reading is the only one.
"""

from __future__ import annotations

import threading
from functools import cache

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.deadline import deadline
from jfbatch.grammar.grammar import Grammar, JsonStyle, Objects
from jfbatch.grammar.vocabulary import Vocabulary

_SECONDS = 5.0


class Oracle:
    """What our own grammar says of texts of one pattern. Used from several threads."""

    def __init__(self, kind: str, text: str, style: JsonStyle, objects: Objects) -> None:
        self._kind = kind
        self._pattern = (kind, text)
        self._layout = (style, objects)
        self._lock = threading.Lock()
        self._grammar: Grammar | None = None
        self._tried = False

    def ending(self, text: bytes) -> bytes | None:
        """A shortest text that completes `text`; None if that is not known."""
        grammar = self._compiled()
        if grammar is None:
            return None
        automaton = grammar.automaton
        try:
            state = automaton.advance(automaton.start, text) if text else automaton.start
            return automaton.shortest_ending(state) if state >= 0 else None
        except InvalidGrammar:  # the automaton outgrew its memory
            return None

    def fault(self, text: bytes) -> str | None:
        """What is wrong with an output; None if nothing is, if nothing is known, or if it is JSON.

        JSON is checked against its schema: layout and undeclared properties are the backend's affair.
        """
        grammar = None if self._kind == "schema" else self._compiled()
        if grammar is None:
            return None
        automaton = grammar.automaton
        try:
            state = automaton.advance(automaton.start, text) if text else automaton.start
            good = state >= 0 and automaton.is_accepting(state)
        except InvalidGrammar:
            return None
        return None if good else f"the output is none that the {self._kind} allows"

    def _compiled(self) -> Grammar | None:
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    with deadline(_SECONDS):
                        self._grammar = Grammar.from_pattern(*self._pattern, byte_vocabulary(), *self._layout)
                except (InvalidGrammar, RecursionError):
                    self._grammar = None
            return self._grammar


@cache
def byte_vocabulary() -> Vocabulary:
    """The 256 bytes, each a token; id 256 ends an output."""
    return Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])
