"""Objects: declared properties in their order, optional ones skippable, then undeclared ones.

Until the first member stands there are as many ways to begin as optional properties; after it the
rest is one sequence of optional pieces. So the size is linear in the number of properties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jfbatch.grammar.expression import (
    NOTHING,
    Expression,
    Intersection,
    Literal,
    Reference,
    choice,
    literal,
    optional,
    repeat,
    sequence,
)
from jfbatch.grammar.json_schema import strings
from jfbatch.grammar.json_schema.properties import (
    declared_names,
    patterns_exclude_each_other,
    property_conjunction,
)
from jfbatch.grammar.json_schema.shape import (
    Conjunction,
    Shape,
    SomeKey,
)

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.compiler import SchemaCompiler

CLASS_LIMIT = 128
"""Sets of patterns that the key of an undeclared property may match."""

TWO_ORDERS_LIMIT = 32
"""Members of an open object up to which their second order is let through as well."""

COUNT_LIMIT = 20_000
"""Rules that counting the members of one object may take."""


@dataclass(frozen=True)
class _Member:
    """One declared property, ready to be written."""

    name: str
    text: Expression
    required: bool


class ObjectBuilder:
    """Builds the rules of one object shape. `name` is the rule to define, `depth` that of the object."""

    def __init__(self, compiler: SchemaCompiler, name: str, shape: Shape, depth: int) -> None:
        self.compiler = compiler
        self.name = name
        self.shape = shape
        self.facts = shape.object
        self.depth = depth
        layout = compiler.layout
        self.opening = literal(layout.opening(depth))
        self.separator = literal(layout.separator(depth))
        self.close = literal(layout.closing(depth) + "}")
        self.colon = literal(layout.colon)
        self.known: frozenset[str] = frozenset()
        self.undeclared: Expression = NOTHING
        self.wanted: Expression = NOTHING
        self.some: SomeKey | None = None

    def build(self) -> None:
        facts = self.facts
        members: list[_Member] = []
        names = declared_names(facts)
        self.known = frozenset(names) | facts.forbidden
        for name in names:
            required = name in facts.required
            value = self._value(name)
            if value == NOTHING:
                if required:
                    self._define(NOTHING)
                    return
                continue
            members.append(_Member(name, sequence(self._key(name), self.colon, value), required))
        self.undeclared = self._undeclared(None)
        if facts.some_keys:
            self.some = facts.some_keys[0]
            self.wanted = self._undeclared(self.some)
            for other in facts.some_keys[1:]:
                self.compiler.leave_to_check(other.label)
        self._define(self._body(members))

    def _define(self, body: Expression) -> None:
        self.compiler.define(self.name, body if body == NOTHING else sequence(literal("{"), body))

    def _key(self, name: str) -> Expression:
        return Literal(strings.json_string_literal(name))

    def _value(self, name: str) -> Expression:
        conjunction = property_conjunction(self.compiler.merger, self.facts, name)
        return self.compiler.expression(conjunction, self.depth + 1)

    # The members

    def _body(self, members: list[_Member]) -> Expression:
        facts = self.facts
        required = sum(member.required for member in members)
        low = facts.min_properties if facts.min_properties > required else 0
        high = facts.max_properties
        if high is not None and self.undeclared == NOTHING and high >= len(members):
            high = None
        second = self._second_order(members)
        if second is not None and (len(members) + 1) * (max(low, high or 0) + 1) <= COUNT_LIMIT:
            return self._in_either_order(members, second, low, high)
        if low == 0 and high is None:
            return self._plain(members)
        if low > len(members) and self.undeclared == NOTHING:
            return NOTHING
        limit = max(low, high or 0)
        if not members:
            return self._first_end(low, high)
        if (len(members) + 1) * (min(limit, len(members)) + 1) > COUNT_LIMIT:
            self.compiler.leave_to_check(facts.size_label)
            return self._plain(members)
        return self._counted(members, low, high)

    def _plain(self, members: list[_Member]) -> Expression:
        """Without a count: what can come first, each followed by all that may come after it."""
        first_required = next((i for i, member in enumerate(members) if member.required), len(members))
        after = sequence(*self._rest_pieces(members[first_required + 1 :]), self._rest_end())
        if first_required == len(members):
            beginnings = [self._first_end(0, None)]
            following: Expression = self._rest_end()
        else:
            member = members[first_required]
            following = self._shared(f"{first_required + 1}", after) if first_required else after
            beginnings = [sequence(self.opening, member.text, following)]
            following = sequence(self.separator, member.text, following)
        for index in range(first_required - 1, -1, -1):
            member = members[index]
            following = self._shared(f"{index + 1}", following)
            beginnings.append(sequence(self.opening, member.text, following))
            following = sequence(optional(sequence(self.separator, member.text)), following)
        return choice(*reversed(beginnings))

    def _shared(self, part: str, expression: Expression) -> Expression:
        """A rule for what several places continue with."""
        if isinstance(expression, (Literal, Reference)) or expression == NOTHING:
            return expression
        return self.compiler.define(f"{self.name}.{part}", expression)

    def _rest_pieces(self, members: list[_Member]) -> Iterator[Expression]:
        for member in members:
            piece = sequence(self.separator, member.text)
            yield piece if member.required else optional(piece)

    def _counted(self, members: list[_Member], low: int, high: int | None) -> Expression:
        """One rule per position and number of members so far."""
        cap = high if high is not None else low

        def rule(index: int, count: int) -> Expression:
            return Reference(f"{self.name}.{index}.{count}")

        pending = [(0, 0)]
        seen = {(0, 0)}
        while pending:
            index, count = pending.pop()
            if index == len(members):
                left_low, left_high = max(0, low - count), None if high is None else high - count
                end = self._rest_end(left_low, left_high) if count else self._first_end(left_low, left_high)
                self.compiler.define(f"{self.name}.{index}.{count}", end)
                continue
            member = members[index]
            ways: list[Expression] = []
            more = min(count + 1, max(cap, 1))
            if high is None or count < high:
                start = self.separator if count else self.opening
                ways.append(sequence(start, member.text, rule(index + 1, more)))
                following = [(index + 1, more)]
            else:
                following = []
            if not member.required:
                ways.append(rule(index + 1, count))
                following.append((index + 1, count))
            self.compiler.define(f"{self.name}.{index}.{count}", choice(*ways))
            for state in following:
                if state not in seen:
                    seen.add(state)
                    pending.append(state)
        return rule(0, 0)

    def _second_order(self, members: list[_Member]) -> list[int] | None:
        """In an open object: required members as `required` lists them, then the others; None if that is no
        other order. An object that takes undeclared members promises less about order anyway."""
        if self.compiler.objects != "open" or self.undeclared == NOTHING or self.some is not None:
            return None
        if not 1 < len(members) <= TWO_ORDERS_LIMIT:
            return None
        place = {name: index for index, name in enumerate(self.facts.required)}
        order = sorted(range(len(members)), key=lambda index: place.get(members[index].name, len(place)))
        return None if order == list(range(len(members))) else order

    def _in_either_order(
        self, members: list[_Member], second: list[int], low: int, high: int | None
    ) -> Expression:
        """A state is the last member, the orders that fit so far, and the count of members (clamped).

        Both orders in one automaton: side by side they would double the threads at every level of nesting.
        """
        orders = (list(range(len(members))), second)
        places = [{index: place for place, index in enumerate(order)} for order in orders]
        cap = high if high is not None else low
        start = (-1, (True, True), 0)
        pending, seen = [start], {start}

        def rule(state: tuple[int, tuple[bool, bool], int]) -> Expression:
            last, (one, other), count = state
            return Reference(f"{self.name}.{last + 1}.{one + 2 * other}.{count}")

        while pending:
            last, alive, count = state = pending.pop()
            steps: dict[int, list[bool]] = {}
            may_end = False
            for which in (0, 1):
                if not alive[which]:
                    continue
                for index in orders[which][0 if last < 0 else places[which][last] + 1 :]:
                    steps.setdefault(index, [False, False])[which] = True
                    if members[index].required:
                        break
                else:
                    may_end = True
            ways: list[Expression] = []
            if may_end:
                left_low, left_high = max(0, low - count), None if high is None else high - count
                end = self._first_end if last < 0 else self._rest_end
                ways.append(end(left_low, left_high))
            if high is not None and count >= high:
                steps = {}
            for index, (one, other) in steps.items():
                following = (index, (one, other), min(count + 1, cap))
                lead = self.opening if last < 0 else self.separator
                ways.append(sequence(lead, members[index].text, rule(following)))
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
            name = rule(state)
            assert isinstance(name, Reference)
            self.compiler.define(name.name, choice(*ways))
        return rule(start)

    # Undeclared members and the end

    def _rest_end(self, low: int = 0, high: int | None = None) -> Expression:
        """From low to high undeclared members after others, and the closing bracket."""
        member = sequence(self.separator, self.undeclared)
        if self.some is None:
            return sequence(repeat(member, low, high), self.close)
        self._note_uncounted(low, high)
        return sequence(repeat(member), self.separator, self.wanted, repeat(member), self.close)

    def _first_end(self, low: int, high: int | None) -> Expression:
        """The same where no member stands yet."""
        member = sequence(self.separator, self.undeclared)
        if self.some is not None:
            self._note_uncounted(low, high)
            later = sequence(self.undeclared, repeat(member), self.separator, self.wanted)
            return sequence(self.opening, choice(self.wanted, later), repeat(member), self.close)
        ways: list[Expression] = [literal("}")] if low == 0 else []
        if high is None or high > 0:
            others = repeat(member, max(0, low - 1), None if high is None else high - 1)
            ways.append(sequence(self.opening, self.undeclared, others, self.close))
        return choice(*ways)

    def _note_uncounted(self, low: int, high: int | None) -> None:
        if low > 1 or high is not None:
            self.compiler.leave_to_check(self.facts.size_label)

    def _undeclared(self, some: SomeKey | None) -> Expression:
        """A member whose name is not declared; with `some`, one that answers its demand too."""
        ways: list[Expression] = []
        patterns: dict[str, None] = {}
        for scope in self.facts.scopes:
            patterns.update((pattern, None) for pattern, _ in scope.patterns)
        if some is not None:
            patterns.update(dict.fromkeys((*some.patterns, *some.not_patterns)))
        names = self.known | (some.names if some else frozenset())
        merger = self.compiler.merger
        classes = self._key_classes(list(patterns))
        exact = classes is not None
        if classes is None:
            # A key that matches several patterns satisfies each of them: that is more, but never less.
            label = f"patternProperties over more than {CLASS_LIMIT} sets of patterns"
            self.compiler.leave_to_check(f"#: {label}")
            classes = [frozenset(), *(frozenset({pattern}) for pattern in patterns)]
        for matched in classes:
            if some and not (matched.issuperset(some.patterns) and matched.isdisjoint(some.not_patterns)):
                continue
            conjunction = self._class_conjunction(matched, some)
            if conjunction == (merger.never,):
                continue
            value = self.compiler.expression(conjunction, self.depth + 1)
            if value == NOTHING:
                continue
            unmatched = frozenset(patterns) - matched if exact or not matched else frozenset()
            key = self._key_expression(names, matched, unmatched, some)
            ways.append(sequence(key, self.colon, value))
        if not ways:
            return NOTHING
        return self._shared("some" if some else "more", choice(*ways))

    def _key_classes(self, patterns: list[str]) -> list[frozenset[str]] | None:
        """Every set of patterns that one key may match; None if they are too many."""
        classes: list[frozenset[str]] = [frozenset()]
        for pattern in patterns:
            classes += [
                matched | {pattern}
                for matched in classes
                if not any(patterns_exclude_each_other(pattern, other) for other in matched)
            ]
            if len(classes) > CLASS_LIMIT:
                return None
        return classes

    def _class_conjunction(self, matched: frozenset[str], some: SomeKey | None) -> Conjunction:
        merger = self.compiler.merger
        atoms = []
        asked = self.compiler.objects == "open"
        for scope in self.facts.scopes:
            own = [atom for pattern, atom in scope.patterns if pattern in matched]
            if not own and scope.additional is not None:
                own = [scope.additional]
            atoms += own
            asked = asked or any(isinstance(node.schema, dict) for node, _ in own)
        if not asked:
            return (merger.never,)
        if some is not None:
            atoms += some.atoms
        return merger.canonical(tuple(atoms))

    def _key_expression(
        self, names: frozenset[str], matched: frozenset[str], unmatched: frozenset[str], some: SomeKey | None
    ) -> Expression:
        if matched or unmatched:
            key = strings.keys_matching(tuple(sorted(matched)), tuple(sorted(unmatched)), names)
        else:
            key = strings.keys_excluding(names)
        atoms = self.facts.key_atoms + (some.key_atoms if some else ())
        if not atoms:
            return key
        resolver = self.compiler.resolver
        text = resolver.synthetic({"type": "string"})
        allowed = self.compiler.expression(self.compiler.merger.canonical(((text, True), *atoms)), 0)
        if allowed == NOTHING:
            return NOTHING
        return Intersection((key, allowed))
