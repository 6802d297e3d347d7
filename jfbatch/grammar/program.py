"""Expressions to a small instruction list: the Pike/Thompson machine with a call stack and counters.

An instruction consumes a byte, splits, counts, calls or returns. A machine thread is a pair
(instruction, stack); a stack frame is a return address or the count of a loop, and the instruction
alone says which (`loop_of`). So recursion and bounded repeats cost nothing to compile.

After R. Cox, "Regular Expression Matching: the Virtual Machine Approach" (2009), with a stack added.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import partial

from jfbatch.errors import NothingMatches
from jfbatch.grammar import opcodes
from jfbatch.grammar.analysis import MAX_TEMPLATE, SET_OPERATIONS, Analysis, LeafCompiler
from jfbatch.grammar.expression import (
    ByteSet,
    Choice,
    Expression,
    Literal,
    Reference,
    Repeat,
    RuleSet,
    Sequence,
    TextExcept,
)
from jfbatch.grammar.listing import Code, Listing
from jfbatch.grammar.templates import Library, Template


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
    Raises NothingMatches if no text does, GrammarTooLarge past MAX_INSTRUCTIONS.
    """
    absent = ByteSet.of(absent_bytes).bits
    return _Compilation(grammar, leaf, free_character, absent, library_of(free_character, absent)).program()


class _Compilation:
    """One compilation, backwards: every piece is compiled with the address of what follows it."""

    def __init__(
        self,
        grammar: RuleSet,
        leaf: LeafCompiler | None,
        free_character: Expression | None,
        absent: int,
        library: Library | None,
    ) -> None:
        self.grammar = grammar
        self.free_character = free_character
        listing = self.listing = Listing()
        self.op, self.x, self.y, self.loop_of = listing.op, listing.x, listing.y, listing.loop_of
        self.targets, self.sets, self.free = listing.targets, listing.sets, listing.free
        self.emit, self.byte_set = listing.emit, listing.byte_set
        self.entries: dict[Hashable, int] = {}  # rule name or shared expression -> its entry
        self.pending: list[tuple[int, Expression]] = []
        self.facts = Analysis(grammar, leaf, free_character, absent, library)

    def program(self) -> Program:
        match = self.emit(opcodes.MATCH)
        self.ret = self.emit(opcodes.RETURN)
        if not self.facts.of(self.grammar.start).productive:
            raise NothingMatches
        start = self.compile(self.grammar.start, match, -1)
        while self.pending:
            entry, body = self.pending.pop()
            self.x[entry] = self.compile(body, self.ret, -1, inline=True)
        return Program(self.listing.assemble(), start)

    def compile(self, expression: Expression, after: int, loop: int, inline: bool = False) -> int:
        """Code for `expression` followed by instruction `after`; returns its entry.

        `loop` is the LOOP whose body this is in, -1 in none. With `inline`, it is not called even if it
        is used in several places.
        """
        if isinstance(expression, Literal):
            return self.compile_literal(expression.data, after, loop)
        if isinstance(expression, ByteSet):
            return self.emit(opcodes.BYTE, self.byte_set(expression.bits & ~self.facts.absent), after, loop)
        if isinstance(expression, Reference):
            return self.call(("rule", expression.name), self.facts.rule(expression.name), after, loop)
        if isinstance(expression, SET_OPERATIONS):
            return self.call(("leaf", expression), expression, after, loop)
        if not inline and self.facts.shared(expression):
            return self.call(id(expression), expression, after, loop)
        template = self.facts.templates.get(id(expression))
        if template is not None:
            return self.insert(template, after, loop)
        if isinstance(expression, Sequence):
            for part in reversed(expression.parts):
                after = self.compile(part, after, loop)
            return after
        if isinstance(expression, Choice):
            return self.compile_choice(expression.parts, after, loop)
        if isinstance(expression, TextExcept):
            return self.compile_text_except(expression, after, loop)
        if isinstance(expression, Repeat):
            return self.compile_repeat(expression.inner, expression.low, expression.high, after, loop)
        raise TypeError(f"not an expression: {expression!r}")

    def insert(self, template: Template, after: int, loop: int) -> int:
        """A copy of ready-made code, its addresses moved here."""
        self.listing.check_limits()
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
            self.listing.bounds[at + base] = bounds
        for at, free in template.free.items():
            self.free[at + base] = free
        return after if template.entry == template.after else template.entry + base

    def compile_literal(self, data: bytes, after: int, loop: int) -> int:
        """`emit` once per byte, in one go: most of a grammar is literals."""
        self.listing.check_limits()
        sets, length, first = self.sets, len(data), len(self.op)
        if not length:
            return after
        self.op += [opcodes.BYTE] * length
        self.x += [sets.setdefault(1 << byte, len(sets)) for byte in reversed(data)]
        self.y.append(after)
        self.y += range(first, first + length - 1)
        self.loop_of += [loop] * length
        return first + length - 1

    def call(self, key: Hashable, body: Expression, after: int, loop: int) -> int:
        """A call of a rule, or a jump where nothing is left to do after it."""
        entry = self.entries.get(key)
        if entry is None:
            if isinstance(body, SET_OPERATIONS):
                entry = self.compile_leaf(body)
            else:
                entry = self.emit(opcodes.JUMP)
                self.pending.append((entry, body))
            self.entries[key] = entry
        if after == self.ret:
            return entry
        return self.emit(opcodes.CALL, entry, after, loop=loop)

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
                    self.emit(opcodes.BYTE, self.byte_set(1 << byte), node(first, end, depth + 1), loop)
                )
                first = end
            if plain & ~taken:
                entries.append(self.emit(opcodes.BYTE, self.byte_set(plain & ~taken), free, loop))
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
        return self.emit(opcodes.SPLIT, first, len(entries), loop=loop)

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
            back = self.emit(opcodes.SPLIT, loop=loop)
            body = self.compile_body(inner, back, loop)
            first = len(self.targets)
            self.targets.extend((body, after))
            self.x[back], self.y[back] = first, 2
            return body if low == 1 else back
        counting = self.emit(opcodes.LOOP, 0, after, loop=loop)
        self.listing.bounds[counting] = low, -1 if high is None else high
        increment = self.emit(opcodes.INCREMENT, counting, loop=counting)
        self.x[counting] = self.compile_body(inner, increment, counting)
        return self.emit(opcodes.PUSH, counting, loop=loop)

    def compile_body(self, inner: Expression, after: int, loop: int) -> int:
        """The body of a loop; where it is one free character, its first instructions are noted."""
        if inner is not self.free_character or not isinstance(inner, Choice):
            return self.compile(inner, after, loop)
        entry = self.compile(inner, after, loop, inline=True)
        for target in self.targets[self.x[entry] : self.x[entry] + self.y[entry]]:
            if self.op[target] == opcodes.BYTE:
                self.free[target] = 1 if self.op[after] == opcodes.INCREMENT else 2
        return entry

    def compile_leaf(self, expression: Expression) -> int:
        made = self.facts.explicit(expression)
        is_counted = hasattr(made, "live")
        dfa = made.dfa if is_counted else made
        first, states = len(self.op), len(dfa.accepting)
        self.op += [opcodes.COUNTED if is_counted else opcodes.LEAF] * states
        self.x += [0] * states
        self.y += [self.ret] * states
        self.loop_of += range(first, first + states) if is_counted else [-1] * states
        self.listing.check_limits()
        self.listing.leaves.append((first, dfa))
        start = first + int(dfa.start)
        if not is_counted:
            return start
        self.listing.counted.append((first, made))
        return self.emit(opcodes.ENTER, start)


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


def _template(expression: Expression, free_character: Expression | None, absent: int) -> Template:
    """The template of an expression without References and set operations."""
    made = _Compilation(RuleSet(expression), None, free_character, absent, library=None)
    made.facts.share_from = MAX_TEMPLATE + 1
    entry = made.compile(expression, -1, -1)
    kinds = {opcodes.BYTE: -1, opcodes.SPLIT: 2, opcodes.JUMP: 1}
    kinds |= {opcodes.PUSH: 1, opcodes.LOOP: 1, opcodes.INCREMENT: 1}
    listing = made.listing
    return Template(
        expression=expression,
        size=made.facts.sizes[id(expression)],
        facts=made.facts.of(expression),
        entry=entry,
        op=listing.op,
        x=listing.x,
        x_kinds=[kinds[op] for op in listing.op],
        y=listing.y,
        y_is_address=[op in (opcodes.BYTE, opcodes.LOOP) for op in listing.op],
        loop_of=listing.loop_of,
        targets=listing.targets,
        sets=list(listing.sets),
        bounds=listing.bounds,
        free=listing.free,
    )


_libraries: dict[tuple[int, int], Library] = {}


def library_of(free_character: Expression | None, absent: int) -> Library:
    """The templates of this process for one free character (a constant) and one set of absent bytes."""
    key = id(free_character), absent
    if key not in _libraries:
        _libraries[key] = Library(partial(_template, free_character=free_character, absent=absent))
    return _libraries[key]
