"""A compiled schema as something to ask: does it take this text, this value, and what may it produce?"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from jfbatch.errors import UnsupportedSchema
from jfbatch.grammar.automaton import Automaton
from jfbatch.grammar.grammar import compile_schema


class SchemaLanguage:
    """The texts that the rules of a schema allow; none where nothing satisfies the schema."""

    def __init__(self, schema: Any, style: str = "compact", objects: str = "open") -> None:
        self.style = style
        self.unenforced: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.automaton: Automaton | None = None
        try:
            compiled, program = compile_schema(schema, style, objects)  # type: ignore[arg-type]
            self.unenforced, self.warnings = compiled.unenforced, compiled.warnings
            self.automaton = Automaton(program)
        except UnsupportedSchema as error:
            if "no value can satisfy it" not in error.reason:
                raise

    def takes_text(self, text: str) -> bool:
        if self.automaton is None:
            return False
        state = self.automaton.advance(self.automaton.start, text.encode("utf-8"))
        return state >= 0 and self.automaton.is_accepting(state)

    def takes(self, value: Any) -> bool:
        """Whether the value, as json.dumps prints it in this style, is taken."""
        return self.takes_text(dumps(value, self.style))

    def takes_in_some_order(self, value: Any, tries: int = 200) -> bool:
        return any(self.takes(other) for other in itertools.islice(key_orders(value), tries))

    def sample(self, source: random.Random, length: int = 120) -> str:
        """A random text: bytes drawn with a liking for JSON's own, then a shortest ending."""
        assert self.automaton is not None
        automaton, state, text = self.automaton, self.automaton.start, b""
        while len(text) < length:
            if automaton.is_accepting(state) and source.random() < 0.3:
                return text.decode("utf-8")
            liked, others = list(b'[{"ab01nt,}]-.z'), list(range(0x20, 0x7F))
            source.shuffle(liked)
            source.shuffle(others)
            for byte in liked + others:
                following = automaton.advance(state, bytes([byte]))
                if following >= 0:
                    break
            else:
                break
            state, text = following, text + bytes([byte])
        return (text + automaton.shortest_ending(state)).decode("utf-8")


def dumps(value: Any, style: str = "compact") -> str:
    if style == "pretty":
        return json.dumps(value, ensure_ascii=False, indent=2)
    separators = (",", ":") if style == "compact" else (", ", ": ")
    return json.dumps(value, ensure_ascii=False, separators=separators)


def key_orders(value: Any) -> Iterator[Any]:
    """The value with its objects' keys in every order."""
    if isinstance(value, list):
        for items in itertools.product(*[list(key_orders(item)) for item in value]):
            yield list(items)
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for members in itertools.product(*[list(key_orders(value[name])) for name in names]):
                yield dict(zip(names, members, strict=True))
    else:
        yield value


def loads(text: str) -> Any:
    """json.loads; None in place of a text with a key twice in one object, which means nothing certain."""

    class Twice(Exception):
        pass

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise Twice
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=distinct)
    except Twice:
        return None
