"""What is known of a grammar before code is made: which parts match nothing or the empty text, which recur.

Alternatives that match nothing are left out of the program, so that no reachable state is a dead end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.expression import (
    ByteSet,
    Choice,
    Difference,
    ExplicitAutomaton,
    Expression,
    Intersection,
    Literal,
    Reference,
    Repeat,
    RuleSet,
    Sequence,
    TextExcept,
)

if TYPE_CHECKING:
    from jfbatch.grammar.templates import Library, Template

SET_OPERATIONS = (Intersection, Difference, ExplicitAutomaton)

MIN_TEMPLATE, MAX_TEMPLATE = 16, 600  # nodes of an expression worth keeping ready-made

# Turns a set operation, given a look-up of rules and the free character, into a Dfa or CountedDfa.
LeafCompiler = Callable[[Expression, Callable[[str], Expression], Expression | None], Any]


class Facts(NamedTuple):
    """What is known of an expression before code is made."""

    productive: bool  # some text matches
    nullable: bool  # the empty text matches


FACTS = {(p, n): Facts(p, n) for p in (False, True) for n in (False, True)}


class Analysis:
    """Facts about expressions and rules: which match nothing, which match the empty text, which recur."""

    share_from = 6  # a subexpression of this many nodes that stands in several places becomes a rule

    def __init__(
        self,
        grammar: RuleSet,
        leaf: LeafCompiler | None,
        free_character: Expression | None,
        absent: int,
        library: Library | None,
    ) -> None:
        self.free_character = free_character
        self.rules = grammar.rules
        self.leaf = leaf
        self.absent = absent
        self.library = library
        self.templates: dict[int, Template] = {}
        self.foreign: set[int] = set()  # no part of a template: depends on this grammar, or is one
        self.uses: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.referring: dict[int, list[str]] = {}  # expression -> the References below it, if any
        self.known: dict[int, Facts] = {}
        self.kept: list[Expression] = []  # keeps ids valid
        self.rule_facts: dict[str, Facts] = {}
        references: list[str] = []
        self.measure(grammar.start, references)
        self.reached: dict[str, list[str]] = {}  # rule -> the rules it refers to
        queue = list(references)
        while queue:
            name = queue.pop()
            if name not in self.reached:
                references = []
                self.measure(self.rule(name), references)
                self.reached[name] = references
                queue.extend(references)
        self.settle()

    def rule(self, name: str) -> Expression:
        try:
            return self.rules[name]
        except KeyError:
            raise InvalidGrammar(f"the rule {name!r} is not defined") from None

    def explicit(self, expression: Expression) -> Any:
        """The explicit automaton of a set operation."""
        if self.leaf is None:
            raise TypeError("set operations need a leaf compiler")
        if self.absent:
            written = Repeat(ByteSet(((1 << 256) - 1) & ~self.absent), 0, None)
            expression = Intersection((expression, written))
        return self.leaf(expression, self.rule, self.free_character)

    def measure(self, expression: Expression, references: list[str]) -> int:
        """Count uses and nodes below; note the rules met in `references`."""
        key = id(expression)
        uses = self.uses.get(key, 0)
        self.uses[key] = uses + 1
        if uses:
            references.extend(self.referring.get(key, ()))
            return self.sizes[key]
        self.kept.append(expression)
        if self.library is not None and (template := self.library.get(expression)) is not None:
            self.templates[key] = template
            self.foreign.add(key)
            self.known[key] = template.facts
            self.sizes[key] = template.size
            return template.size
        size, before, own = 1, len(references), True
        if isinstance(expression, Literal):
            size = len(expression.data) or 1
        elif isinstance(expression, Sequence | Choice):
            for part in expression.parts:
                size += self.measure(part, references)
                own = own and id(part) not in self.foreign
        elif isinstance(expression, Repeat):
            size += self.measure(expression.inner, references)
            own = id(expression.inner) not in self.foreign
        elif isinstance(expression, Reference):
            references.append(expression.name)
            own = False
        elif isinstance(expression, SET_OPERATIONS):
            own = False
        elif isinstance(expression, TextExcept):
            size += self.measure(expression.text, references) + self.measure(expression.not_plain, references)
            size += len(expression.words)
            own = False
        if len(references) > before:
            self.referring[key] = list(dict.fromkeys(references[before:]))
        self.sizes[key] = size
        if (
            own
            and self.library is not None
            and MIN_TEMPLATE <= size <= MAX_TEMPLATE
            and not isinstance(expression, Literal)
        ):
            self.library.note(expression)
            own = False  # the larger ones around it are made of it
        if not own:
            self.foreign.add(key)
        return size

    def shared(self, expression: Expression) -> bool:
        key = id(expression)
        return self.uses.get(key, 0) > 1 and self.sizes[key] >= self.share_from

    def settle(self) -> None:
        """The least fixpoint over the rules: start from 'matches nothing' and grow.

        In an order in which rules come after those they refer to, one round settles all but cycles.
        """
        order, cyclic = self.ordered()
        for name in order:
            self.rule_facts[name] = Facts(False, False)
        changed = True
        while changed:
            changed = False
            for key in self.referring:
                self.known.pop(key, None)
            for name in order:
                facts = self.of(self.rules[name])
                if facts != self.rule_facts[name]:
                    self.rule_facts[name] = facts
                    changed = cyclic

    def ordered(self) -> tuple[list[str], bool]:
        """The reached rules in post-order, and whether any refers back to one that is not done."""
        order: list[str] = []
        state: dict[str, int] = {}  # 1 = being visited, 2 = done
        cyclic = False
        for root in self.reached:
            stack = [root]
            while stack:
                name = stack[-1]
                if state.get(name) is None:
                    state[name] = 1
                    for other in self.reached[name]:
                        if other not in state:
                            stack.append(other)
                        elif state[other] == 1:
                            cyclic = True
                else:
                    stack.pop()
                    if state[name] == 1:
                        state[name] = 2
                        order.append(name)
        return order, cyclic

    def of(self, expression: Expression) -> Facts:
        key = id(expression)
        facts = self.known.get(key)
        if facts is None:
            facts = self.known[key] = self.compute(expression)
        return facts

    def compute(self, expression: Expression) -> Facts:
        match expression:
            case Literal(data):
                written = not self.absent or not any(self.absent >> byte & 1 for byte in data)
                return FACTS[written, not data]
            case ByteSet(bits):
                return FACTS[bits & ~self.absent != 0, False]
            case Sequence(parts):
                nullable = True
                for part in parts:
                    fact = self.of(part)
                    if not fact.productive:
                        return FACTS[False, False]
                    nullable = nullable and fact.nullable
                return FACTS[True, nullable]
            case Choice(parts):
                productive = nullable = False
                for part in parts:
                    fact = self.of(part)
                    productive = productive or fact.productive
                    nullable = nullable or fact.nullable
                return FACTS[productive, nullable]
            case Repeat(inner, low, high):
                if high is not None and high < low:
                    return Facts(False, False)
                fact = self.of(inner)
                return Facts(low == 0 or fact.productive, low == 0 or fact.nullable)
            case Reference(name):
                return self.rule_facts[name]
            case TextExcept(words):
                return FACTS[True, words[0] != b""]
            case _:
                dfa = self.explicit(expression)
                return Facts(not dfa.is_empty, dfa.accepts_empty_text)
