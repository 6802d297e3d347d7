"""Expressions to a small instruction list: the Pike/Thompson machine with a call stack and counters.

An instruction consumes a byte, splits, counts, calls or returns. A machine thread is a pair
(instruction, stack); a stack frame is a return address or the count of a loop, and the instruction
alone says which (`loop_of`). So recursion and bounded repeats cost nothing to compile.

After R. Cox, "Regular Expression Matching: the Virtual Machine Approach" (2009), with a stack added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar import machine
from jfbatch.grammar.continuations import fill_distances
from jfbatch.grammar.deadline import check_deadline
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

MAX_INSTRUCTIONS = 8_000_000

MIN_TEMPLATE, MAX_TEMPLATE = 16, 600  # nodes of an expression worth keeping ready-made
LIBRARY_SIZE = 2048

_SET_OPERATIONS = frozenset({Intersection, Difference, ExplicitAutomaton})

# Turns a set operation, given a look-up of rules and the free character, into a Dfa or CountedDfa.
LeafCompiler = Callable[[Expression, Callable[[str], Expression], Expression | None], Any]


class Code(NamedTuple):
    """A program as arrays; `machine.py` runs it. n = instructions, C = byte classes.

    op, x, y, z       int32[n]   opcode and operands, see machine.py
    loop_of           int32[n]   the LOOP whose count is the top frame here, -1: a return address is
    distance          int64[n]   cheapest way from here to the end of this level (continuations.py)
    low, high         int32[n]   bounds of a LOOP; high -1 is without end
    targets           int32[..]  what SPLITs lead to
    set_has           uint8[S,C] which byte classes belong to a byte set
    leaf_rows         int32[Q,C] instruction after a leaf state on a byte class, -1 = dead
    class_of_byte     uint8[256] byte -> byte class
    class_byte        uint8[C]   the byte of a class to write when any would do
    class_size        int32[C]   how many bytes a class has
    counted           int64[K,5] counted leaves: offset in live and reach, states, low, high, last
                                 count that is far from its bounds
    live, reach       uint8[..]  their bitmaps (counted.py), counts x states
    free              uint8[n]   a free character begins here, again and again: 1 counted, 2 without end
    """

    op: NDArray[np.int32]
    x: NDArray[np.int32]
    y: NDArray[np.int32]
    z: NDArray[np.int32]
    loop_of: NDArray[np.int32]
    distance: NDArray[np.int64]
    low: NDArray[np.int32]
    high: NDArray[np.int32]
    targets: NDArray[np.int32]
    set_has: NDArray[np.uint8]
    leaf_rows: NDArray[np.int32]
    class_of_byte: NDArray[np.uint8]
    class_byte: NDArray[np.uint8]
    class_size: NDArray[np.int32]
    free: NDArray[np.uint8]
    counted: NDArray[np.int64]
    live: NDArray[np.uint8]
    reach: NDArray[np.uint8]


@dataclass(frozen=True)
class Program:
    """Machine code and where it starts."""

    code: Code
    start: int


def compile_program(
    grammar: RuleSet,
    leaf: LeafCompiler | None = None,
    free_character: Expression | None = None,
    absent_bytes: Iterable[int] = (),
) -> Program:
    """Compile a rule set.

    `leaf` turns an Intersection or Difference into an explicit automaton (`language.Dfa`).
    `free_character` is the expression of one unconstrained character; repeats of it are marked.
    `absent_bytes` cannot be written (no token has them): texts with them are left out.
    Raises InvalidGrammar if nothing matches, GrammarTooLarge past MAX_INSTRUCTIONS.
    """
    absent = ByteSet.of(absent_bytes).bits
    return _Compilation(grammar, leaf, free_character, absent, _library(free_character, absent)).program()


class _Facts(NamedTuple):
    """What is known of an expression before code is made."""

    productive: bool  # some text matches
    nullable: bool  # the empty text matches


_FACTS = {(p, n): _Facts(p, n) for p in (False, True) for n in (False, True)}


class _Compilation:
    """One compilation, backwards: every piece is compiled with the address of what follows it."""

    def __init__(
        self,
        grammar: RuleSet,
        leaf: LeafCompiler | None,
        free_character: Expression | None,
        absent: int,
        library: _Library | None,
    ) -> None:
        self.grammar = grammar
        self.free_character = free_character
        self.free: dict[int, int] = {}
        self.op: list[int] = []
        self.x: list[int] = []
        self.y: list[int] = []
        self.bounds: dict[int, tuple[int, int]] = {}  # LOOP -> low and high
        self.loop_of: list[int] = []
        self.targets: list[int] = []
        self.sets: dict[int, int] = {}
        self.leaves: list[tuple[int, Any]] = []  # (first instruction, Dfa)
        self.counted: list[tuple[int, Any]] = []  # (first instruction, CountedDfa)
        self.entries: dict[Hashable, int] = {}  # rule name or shared expression -> its entry
        self.pending: list[tuple[int, Expression]] = []
        self.facts = _Analysis(grammar, leaf, free_character, absent, library)

    def program(self) -> Program:
        match = self.emit(machine.MATCH)
        self.ret = self.emit(machine.RETURN)
        if not self.facts.of(self.grammar.start).productive:
            raise InvalidGrammar("nothing can match this pattern")
        start = self.compile(self.grammar.start, match, -1)
        while self.pending:
            entry, body = self.pending.pop()
            self.x[entry] = self.compile(body, self.ret, -1, inline=True)
        return Program(self.assemble(), start)

    def emit(self, op: int, x: int = 0, y: int = 0, loop: int = -1) -> int:
        at = len(self.op)
        if at % 4096 == 0:
            self.check_limits()
        self.op.append(op)
        self.x.append(x)
        self.y.append(y)
        self.loop_of.append(loop)
        return at

    def check_limits(self) -> None:
        check_deadline()
        if len(self.op) >= MAX_INSTRUCTIONS:
            raise GrammarTooLarge(f"the pattern needs more than {MAX_INSTRUCTIONS:,} instructions")

    def compile(self, expression: Expression, after: int, loop: int, inline: bool = False) -> int:
        """Code for `expression` followed by instruction `after`; returns its entry.

        `loop` is the LOOP whose body this is in, -1 in none. With `inline`, it is not called even if it
        is used in several places.
        """
        kind = type(expression)
        if kind is Literal:
            return self.compile_literal(expression.data, after, loop)
        if kind is ByteSet:
            return self.emit(machine.BYTE, self.byte_set(expression.bits & ~self.facts.absent), after, loop)
        if kind is Reference:
            return self.call(("rule", expression.name), self.facts.rule(expression.name), after, loop)
        if kind in _SET_OPERATIONS:
            return self.call(("leaf", expression), expression, after, loop)
        if not inline and self.facts.shared(expression):
            return self.call(id(expression), expression, after, loop)
        template = self.facts.templates.get(id(expression))
        if template is not None:
            return self.insert(template, after, loop)
        if kind is Sequence:
            for part in reversed(expression.parts):
                after = self.compile(part, after, loop)
            return after
        if kind is Choice:
            return self.compile_choice(expression.parts, after, loop)
        if kind is TextExcept:
            return self.compile_text_except(expression, after, loop)
        if kind is Repeat:
            return self.compile_repeat(expression.inner, expression.low, expression.high, after, loop)
        raise TypeError(f"not an expression: {expression!r}")

    def insert(self, template: Template, after: int, loop: int) -> int:
        """A copy of ready-made code, its addresses moved here."""
        self.check_limits()
        base, first_target = len(self.op), len(self.targets)
        moved = [0, base, first_target]
        numbers = [self.byte_set(bits & ~self.facts.absent) for bits in template.sets]
        self.op += template.op
        self.x += [
            numbers[x] if kind < 0 else x + moved[kind]
            for x, kind in zip(template.x, template.x_kinds, strict=True)
        ]
        self.y += [
            after if y == template.after else y + base if is_address else y
            for y, is_address in zip(template.y, template.y_is_address, strict=True)
        ]
        self.loop_of += [loop if at < 0 else at + base for at in template.loop_of]
        self.targets += [after if at == template.after else at + base for at in template.targets]
        for at, bounds in template.bounds.items():
            self.bounds[at + base] = bounds
        for at, free in template.free.items():
            self.free[at + base] = free
        return after if template.entry == template.after else template.entry + base

    def compile_literal(self, data: bytes, after: int, loop: int) -> int:
        """`emit` once per byte, in one go: most of a grammar is literals."""
        self.check_limits()
        sets, length, first = self.sets, len(data), len(self.op)
        if not length:
            return after
        self.op += [machine.BYTE] * length
        self.x += [sets.setdefault(1 << byte, len(sets)) for byte in reversed(data)]
        self.y.append(after)
        self.y += range(first, first + length - 1)
        self.loop_of += [loop] * length
        return first + length - 1

    def call(self, key: Hashable, body: Expression, after: int, loop: int) -> int:
        """A call of a rule, or a jump where nothing is left to do after it."""
        entry = self.entries.get(key)
        if entry is None:
            if type(body) in _SET_OPERATIONS:
                entry = self.compile_leaf(body)
            else:
                entry = self.emit(machine.JUMP)
                self.pending.append((entry, body))
            self.entries[key] = entry
        if after == self.ret:
            return entry
        return self.emit(machine.CALL, entry, after, loop=loop)

    def compile_choice(self, parts: tuple[Expression, ...], after: int, loop: int) -> int:
        literals: list[bytes] = []
        entries: list[int] = []
        for part in parts:
            if not self.facts.of(part).productive:
                continue
            if isinstance(part, Literal):
                literals.append(part.data)
            else:
                entries.append(self.compile(part, after, loop))
        if literals:
            literals.sort()
            entries.extend(self.compile_literals(literals, 0, len(literals), 0, after, loop))
        return self.split(entries, loop)

    def compile_text_except(self, expression: TextExcept, after: int, loop: int) -> int:
        """The trie of the words turned inside out: at each of its nodes the text may end unless a word
        does, go on along the trie, or leave it by any other character and be free.
        """
        free = self.compile(expression.text, after, loop)
        not_plain = self.compile(expression.not_plain, after, loop)
        words, plain = expression.words, expression.plain & ~self.facts.absent

        def node(first: int, last: int, depth: int) -> int:
            entries, taken = [not_plain], 0
            if len(words[first]) == depth:
                first += 1
            else:
                entries.append(after)
            while first < last:
                byte = words[first][depth]
                end = first + 1
                while end < last and words[end][depth] == byte:
                    end += 1
                taken |= 1 << byte
                entries.append(
                    self.emit(machine.BYTE, self.byte_set(1 << byte), node(first, end, depth + 1), loop)
                )
                first = end
            if plain & ~taken:
                entries.append(self.emit(machine.BYTE, self.byte_set(plain & ~taken), free, loop))
            return self.split(entries, loop)

        return node(0, len(words), 0)

    def compile_literals(
        self, texts: list[bytes], first: int, last: int, depth: int, after: int, loop: int
    ) -> list[int]:
        """Entries for the sorted texts[first:last], all alike up to `depth`, as one shared trie."""
        entries = []
        position = first
        while position < last and len(texts[position]) == depth:
            position += 1
        if position > first:
            entries.append(after)
        while position < last:
            byte = texts[position][depth]
            end = position + 1
            while end < last and texts[end][depth] == byte:
                end += 1
            if end - position == 1:
                entries.append(self.compile_literal(texts[position][depth:], after, loop))
            else:
                common = _common_prefix(texts[position], texts[end - 1], depth)
                inner = self.compile_literals(texts, position, end, common, after, loop)
                shared = self.split(inner, loop)
                entries.append(self.compile_literal(texts[position][depth:common], shared, loop))
            position = end
        return entries

    def split(self, entries: list[int], loop: int) -> int:
        entries = list(dict.fromkeys(entries))
        if len(entries) == 1:
            return entries[0]
        first = len(self.targets)
        self.targets.extend(entries)
        return self.emit(machine.SPLIT, first, len(entries), loop=loop)

    def compile_repeat(self, inner: Expression, low: int, high: int | None, after: int, loop: int) -> int:
        while high != 0 and isinstance(inner, Repeat) and _is_one_repeat(inner, low):
            low *= inner.low
            high = None if high is None or inner.high is None else high * inner.high
            inner = inner.inner
        facts = self.facts.of(inner)
        if not facts.productive or high == 0:
            return after  # low is 0 here: anything else has been found unproductive
        if facts.nullable:
            low = 0
        if high == 1:
            body = self.compile(inner, after, loop)
            return body if low == 1 else self.split([body, after], loop)
        if high is None and low <= 1:
            back = self.emit(machine.SPLIT, loop=loop)
            body = self.compile_body(inner, back, loop)
            first = len(self.targets)
            self.targets.extend((body, after))
            self.x[back], self.y[back] = first, 2
            return body if low == 1 else back
        counting = self.emit(machine.LOOP, 0, after, loop=loop)
        self.bounds[counting] = low, -1 if high is None else high
        increment = self.emit(machine.INCREMENT, counting, loop=counting)
        self.x[counting] = self.compile_body(inner, increment, counting)
        return self.emit(machine.PUSH, counting, loop=loop)

    def compile_body(self, inner: Expression, after: int, loop: int) -> int:
        """The body of a loop; where it is one free character, its first instructions are noted."""
        if inner is not self.free_character or not isinstance(inner, Choice):
            return self.compile(inner, after, loop)
        entry = self.compile(inner, after, loop, inline=True)
        for target in self.targets[self.x[entry] : self.x[entry] + self.y[entry]]:
            if self.op[target] == machine.BYTE:
                self.free[target] = 1 if self.op[after] == machine.INCREMENT else 2
        return entry

    def compile_leaf(self, expression: Expression) -> int:
        made = self.facts.explicit(expression)
        is_counted = hasattr(made, "live")
        dfa = made.dfa if is_counted else made
        first, states = len(self.op), len(dfa.accepting)
        self.op += [machine.COUNTED if is_counted else machine.LEAF] * states
        self.x += [0] * states
        self.y += [self.ret] * states
        self.loop_of += range(first, first + states) if is_counted else [-1] * states
        self.check_limits()
        self.leaves.append((first, dfa))
        start = first + int(dfa.start)
        if not is_counted:
            return start
        self.counted.append((first, made))
        return self.emit(machine.ENTER, start)

    def byte_set(self, bits: int) -> int:
        return self.sets.setdefault(bits, len(self.sets))

    def assemble(self) -> Code:
        members = _set_members(list(self.sets) or [0])  # [S, 256]
        columns = [members] + [dfa.class_of_byte[None, :] for _, dfa in self.leaves]
        stacked = np.concatenate(columns, axis=0).astype(np.uint8)
        class_of_byte, first_bytes = byte_classes(stacked)
        classes = len(first_bytes)
        leaf_rows, x = self.leaf_rows(classes, first_bytes), np.array(self.x, np.int32)
        z, low, high = (np.zeros(len(self.op), np.int32) for _ in range(3))
        row = 0
        for first, dfa in self.leaves:
            states = slice(first, first + len(dfa.accepting))
            x[states] = np.arange(row, row + len(dfa.accepting))
            z[states], low[states] = dfa.accepting, dfa.distance
            row += len(dfa.accepting)
        counted = np.zeros((max(len(self.counted), 1), 5), np.int64)
        offset = 0
        for number, (first, leaf) in enumerate(self.counted):
            size = len(leaf.boundary)
            states = slice(first, first + size)
            z[states] |= leaf.boundary << 1
            low[states], high[states] = np.arange(size), number
            counted[number] = offset, size, leaf.low, leaf.high, leaf.high - leaf.spread
            offset += leaf.live.size
        for loop, (fewest, most) in self.bounds.items():
            low[loop], high[loop] = fewest, most
        code = Code(
            op=np.array(self.op, np.int32),
            x=x,
            y=np.array(self.y, np.int32),
            z=z,
            loop_of=np.array(self.loop_of, np.int32),
            distance=np.zeros(len(self.op), np.int64),
            low=low,
            high=high,
            targets=np.array(self.targets or [0], np.int32),
            set_has=np.ascontiguousarray(members[:, first_bytes]),
            leaf_rows=leaf_rows,
            class_of_byte=class_of_byte,
            class_byte=_preferred_bytes(class_of_byte, classes),
            class_size=np.bincount(class_of_byte, minlength=classes).astype(np.int32),
            free=np.zeros(len(self.op), np.uint8),
            counted=counted,
            live=_joined([leaf.live for _, leaf in self.counted]),
            reach=_joined([leaf.reach for _, leaf in self.counted]),
        )
        for instruction, kind in self.free.items():
            code.free[instruction] = kind
        fill_distances(code)
        return code

    def leaf_rows(self, classes: int, first_bytes: NDArray[np.int64]) -> NDArray[np.int32]:
        if not self.leaves:
            return np.full((1, classes), -1, np.int32)
        rows = []
        for first, dfa in self.leaves:
            table = dfa.transitions[:, dfa.class_of_byte[first_bytes]]
            rows.append(np.where(table >= 0, table + first, -1).astype(np.int32))
        return np.ascontiguousarray(np.concatenate(rows, axis=0))


class _Analysis:
    """Facts about expressions and rules: which match nothing, which match the empty text, which recur."""

    share_from = 6  # a subexpression of this many nodes that stands in several places becomes a rule

    def __init__(
        self,
        grammar: RuleSet,
        leaf: LeafCompiler | None,
        free_character: Expression | None,
        absent: int,
        library: _Library | None,
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
        self.known: dict[int, _Facts] = {}
        self.kept: list[Expression] = []  # keeps ids valid
        self.rule_facts: dict[str, _Facts] = {}
        self.measure(grammar.start, references := [])
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
        kind = type(expression)
        size, before, own = 1, len(references), True
        if kind is Literal:
            size = len(expression.data) or 1
        elif kind is Sequence or kind is Choice:
            for part in expression.parts:
                size += self.measure(part, references)
                own = own and id(part) not in self.foreign
        elif kind is Repeat:
            size += self.measure(expression.inner, references)
            own = id(expression.inner) not in self.foreign
        elif kind is Reference:
            references.append(expression.name)
            own = False
        elif kind in _SET_OPERATIONS:
            own = False
        elif kind is TextExcept:
            size += self.measure(expression.text, references) + self.measure(expression.not_plain, references)
            size += len(expression.words)
            own = False
        if len(references) > before:
            self.referring[key] = list(dict.fromkeys(references[before:]))
        self.sizes[key] = size
        if own and self.library is not None and MIN_TEMPLATE <= size <= MAX_TEMPLATE and kind is not Literal:
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
            self.rule_facts[name] = _Facts(False, False)
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

    def of(self, expression: Expression) -> _Facts:
        key = id(expression)
        facts = self.known.get(key)
        if facts is None:
            facts = self.known[key] = self.compute(expression)
        return facts

    def compute(self, expression: Expression) -> _Facts:
        match expression:
            case Literal(data):
                written = not self.absent or not any(self.absent >> byte & 1 for byte in data)
                return _FACTS[written, not data]
            case ByteSet(bits):
                return _FACTS[bits & ~self.absent != 0, False]
            case Sequence(parts):
                nullable = True
                for part in parts:
                    fact = self.of(part)
                    if not fact.productive:
                        return _FACTS[False, False]
                    nullable = nullable and fact.nullable
                return _FACTS[True, nullable]
            case Choice(parts):
                productive = nullable = False
                for part in parts:
                    fact = self.of(part)
                    productive = productive or fact.productive
                    nullable = nullable or fact.nullable
                return _FACTS[productive, nullable]
            case Repeat(inner, low, high):
                if high is not None and high < low:
                    return _Facts(False, False)
                fact = self.of(inner)
                return _Facts(low == 0 or fact.productive, low == 0 or fact.nullable)
            case Reference(name):
                return self.rule_facts[name]
            case TextExcept(words):
                return _FACTS[True, words[0] != b""]
            case _:
                dfa = self.explicit(expression)
                return _Facts(not dfa.is_empty, dfa.accepts_empty_text)


@dataclass(frozen=True)
class Template:
    """Ready-made code of an expression that stands in many grammars, to be copied with its addresses moved.

    Addresses are relative to its first instruction; `after` (-1) stands for what follows it. x_kinds: -1 a
    number in `sets`, 0 no address, 1 an instruction, 2 a place in `targets`.
    """

    expression: Expression  # kept, because its id is the key
    size: int
    facts: _Facts
    entry: int
    op: list[int]
    x: list[int]
    x_kinds: list[int]
    y: list[int]
    y_is_address: list[bool]
    loop_of: list[int]
    targets: list[int]
    sets: list[int]
    bounds: dict[int, tuple[int, int]]
    free: dict[int, int]
    after: int = -1

    @staticmethod
    def of(expression: Expression, free_character: Expression | None, absent: int) -> Template:
        """The template of an expression without References and set operations."""
        made = _Compilation(RuleSet(expression), None, free_character, absent, library=None)
        made.facts.share_from = MAX_TEMPLATE + 1
        entry = made.compile(expression, -1, -1)
        kinds = {machine.BYTE: -1, machine.SPLIT: 2, machine.JUMP: 1}
        kinds |= {machine.PUSH: 1, machine.LOOP: 1, machine.INCREMENT: 1}
        return Template(
            expression=expression,
            size=made.facts.sizes[id(expression)],
            facts=made.facts.of(expression),
            entry=entry,
            op=made.op,
            x=made.x,
            x_kinds=[kinds[op] for op in made.op],
            y=made.y,
            y_is_address=[op in (machine.BYTE, machine.LOOP) for op in made.op],
            loop_of=made.loop_of,
            targets=made.targets,
            sets=list(made.sets),
            bounds=made.bounds,
            free=made.free,
        )


class _Library:
    """Templates of the expressions that came up in more than one compilation, by identity."""

    def __init__(self, free_character: Expression | None, absent: int) -> None:
        self.free_character = free_character
        self.absent = absent
        self.entries: OrderedDict[int, Template | Expression] = OrderedDict()

    def get(self, expression: Expression) -> Template | None:
        found = self.entries.get(id(expression))
        return found if isinstance(found, Template) else None

    def note(self, expression: Expression) -> None:
        """An expression fit for a template was met: remembered once, made into a template the next time."""
        key = id(expression)
        if key in self.entries:
            self.entries[key] = Template.of(expression, self.free_character, self.absent)
        else:
            self.entries[key] = expression
            if len(self.entries) > LIBRARY_SIZE:
                self.entries.popitem(last=False)


_libraries: dict[tuple[int, int], _Library] = {}


def _library(free_character: Expression | None, absent: int) -> _Library:
    """The templates of this process for one free character (a constant) and one set of absent bytes."""
    key = id(free_character), absent
    if key not in _libraries:
        _libraries[key] = _Library(free_character, absent)
    return _libraries[key]


def _joined(tables: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return np.concatenate([table.ravel() for table in tables]) if tables else np.zeros(1, np.uint8)


def _is_one_repeat(inner: Repeat, low: int) -> bool:
    """Whether (x{l,h}){low,..} reaches every count from l*low on: no gap between k and k+1 rounds."""
    if inner.high == 0:
        return False
    if inner.high is None:
        return inner.low <= 1 or low >= 1
    return low * inner.high + 1 >= (low + 1) * inner.low


def _common_prefix(one: bytes, other: bytes, start: int) -> int:
    end = start
    while end < len(one) and end < len(other) and one[end] == other[end]:
        end += 1
    return end


def byte_classes(columns: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bytes with equal columns of uint8[S, 256] are one class: (class per byte, first byte per class)."""
    rows = np.ascontiguousarray(columns.T)
    data, width = rows.tobytes(), rows.shape[1]
    numbers: dict[bytes, int] = {}
    first_bytes: list[int] = []
    class_of_byte = np.empty(256, np.uint8)
    for byte in range(256):
        number = numbers.setdefault(data[byte * width : (byte + 1) * width], len(numbers))
        if number == len(first_bytes):
            first_bytes.append(byte)
        class_of_byte[byte] = number
    return class_of_byte, np.array(first_bytes, np.int64)


def _set_members(sets: list[int]) -> NDArray[np.uint8]:
    """256-bit integers to uint8[S, 256]."""
    packed = b"".join(bits.to_bytes(32, "little") for bits in sets)
    table = np.frombuffer(packed, np.uint8).reshape(len(sets), 32)
    return np.unpackbits(table, axis=1, bitorder="little")


_NICE = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" + bytes(range(0x20, 0x100))
_FILLERS = np.frombuffer(bytes(dict.fromkeys(_NICE + bytes(range(0x20)))), np.uint8)


def _preferred_bytes(class_of_byte: NDArray[np.uint8], classes: int) -> NDArray[np.uint8]:
    """The byte of each class to write when any would do: digits, then letters, then the lowest."""
    preferred = np.zeros(classes, np.uint8)
    preferred[class_of_byte[_FILLERS[::-1]]] = _FILLERS[::-1]  # the last write to a class stays
    return preferred
