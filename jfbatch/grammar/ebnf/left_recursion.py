"""Rules that call themselves before they have read a byte, written so that they read first.

The machine reads from left to right and would call such a rule for ever. A set of rules that begin with
one another is a linear system over "what follows": X = base | X follow | Y follow ... Solving it for X by
substitution leaves X = base follow*, exactly the same texts (Arden's lemma; Aho & Ullman, "The Theory
of Parsing, Translation and Compiling", 1972, algorithm 2.13, with repeats instead of further rules).
A rule that can be empty is split into the empty text and the rest, so that nothing hides behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.deadline import check_deadline
from jfbatch.grammar.ebnf.soundness import least_fixpoint, mentioned_rules
from jfbatch.grammar.expression import (
    EMPTY,
    NOTHING,
    ByteSet,
    Choice,
    Expression,
    Literal,
    Reference,
    Repeat,
    Sequence,
    choice,
    repeat,
    sequence,
)

MAX_NODES = 50_000  # of a circle's rules while one is put into the other

# What a rule matches beyond the empty text: texts that begin with no rule of its circle, and for each rule
# of the circle what follows it where it comes first.
_Follows = dict[str, Expression]


def without_left_recursion(rules: Mapping[str, Expression], start: str) -> dict[str, Expression]:
    """The same languages without left recursion; rules that have none stay as they are.

    Raises InvalidGrammar naming the circle where the rewritten rule would be too large.
    """
    circles = left_recursive_circles(rules)
    if not circles:
        return dict(rules)
    return _Rewriting(rules, start, circles).rewritten()


def left_recursive_circles(rules: Mapping[str, Expression]) -> list[list[str]]:
    """The sets of rules that can begin with one another (or with themselves), in the order of `rules`."""
    nullable = nullable_rules(rules)
    graph = {name: sorted(_first_rules(body, nullable)) for name, body in rules.items()}
    order = {name: number for number, name in enumerate(rules)}
    circles = [
        sorted(part, key=order.__getitem__)
        for part in _strongly_connected(graph)
        if len(part) > 1 or part[0] in graph[part[0]]
    ]
    return sorted(circles, key=lambda circle: order[circle[0]])


def nullable_rules(rules: Mapping[str, Expression]) -> set[str]:
    """The rules that match the empty text."""
    return least_fixpoint(rules, _is_nullable)


def _is_nullable(expression: Expression, nullable: set[str]) -> bool:
    match expression:
        case Literal(data):
            return not data
        case ByteSet():
            return False
        case Sequence(parts):
            return all(_is_nullable(part, nullable) for part in parts)
        case Choice(parts):
            return any(_is_nullable(part, nullable) for part in parts)
        case Repeat(inner, low):
            return low == 0 or _is_nullable(inner, nullable)
        case Reference(name):
            return name in nullable
    raise TypeError(f"no part of a grammar file: {expression!r}")


def _first_rules(expression: Expression, nullable: set[str]) -> set[str]:
    """The rules that a text of `expression` may begin with."""
    match expression:
        case Reference(name):
            return {name}
        case Choice(parts):
            return {name for part in parts for name in _first_rules(part, nullable)}
        case Repeat(inner):
            return _first_rules(inner, nullable)
        case Sequence(parts):
            found: set[str] = set()
            for part in parts:
                found |= _first_rules(part, nullable)
                if not _is_nullable(part, nullable):
                    break
            return found
    return set()


class _Rewriting:
    """One rewriting of all circles."""

    def __init__(self, rules: Mapping[str, Expression], start: str, circles: list[list[str]]) -> None:
        self.rules = rules
        self.start = start
        self.nullable = nullable_rules(rules)
        self.circles = circles
        self.made: dict[str, Expression] = {}
        self.wanted: list[str] = []  # rules of which the non-empty texts were asked for

    def rewritten(self) -> dict[str, Expression]:
        in_circle = {name for circle in self.circles for name in circle}
        self.made.update((name, body) for name, body in self.rules.items() if name not in in_circle)
        for circle in self.circles:
            self.rewrite(circle)
        while self.wanted:
            name = self.wanted.pop()
            if name not in in_circle and _filled(name) not in self.made:
                self.made[_filled(name)] = self.non_empty(self.rules[name])
        return self.made

    def rewrite(self, circle: list[str]) -> None:
        members = frozenset(circle)
        bases: dict[str, Expression] = {}
        follows: dict[str, _Follows] = {}
        for name in circle:
            bases[name], follows[name] = self.split(self.rules[name], members)
        used = {self.start}.union(
            *(mentioned_rules(body) for name, body in self.rules.items() if name not in members),
            *(mentioned_rules(part) for name in circle for part in (bases[name], *follows[name].values())),
        )
        for name in circle:
            if name not in used:  # it only ever comes first in the others: they have it put in
                continue
            base, follow = _solved(name, circle, bases, follows)
            rest: Expression = Reference(_begun(name))
            if name in self.nullable:
                rest = choice(EMPTY, rest)
                self.made[name] = choice(EMPTY, Reference(_filled(name)))
            # A part that ends in `name` may end in its base: what more follows is read by the repeat here.
            # This keeps  e: e "+" e | e "*" e | "x"  from having one reading per bracketing.
            self.made[_begun(name)] = _with_last(base, name, rest)
            body = sequence(Reference(_begun(name)), repeat(_with_last(follow, name, rest), 0, None))
            self.made[_filled(name) if name in self.nullable else name] = body

    def non_empty(self, expression: Expression) -> Expression:
        """The texts of `expression` but the empty one."""
        if not _is_nullable(expression, self.nullable):
            return expression
        match expression:
            case Choice(parts):
                return choice(*[self.non_empty(part) for part in parts])
            case Sequence(parts):
                ways = [sequence(self.non_empty(part), *parts[i + 1 :]) for i, part in enumerate(parts)]
                return choice(*ways)
            case Repeat(inner, _, high):
                return repeat(self.non_empty(inner), 1, high)
            case Reference(name):
                self.wanted.append(name)
                return Reference(_filled(name))
        return NOTHING  # the empty literal

    def split(self, expression: Expression, members: frozenset[str]) -> tuple[Expression, _Follows]:
        """The non-empty texts of `expression`, by the member of the circle they begin with, if any."""
        if not _first_rules(expression, self.nullable) & members:
            return self.non_empty(expression), {}
        bases: list[Expression] = []
        follows: _Follows = {}

        def take(part: Expression, rest: Expression) -> None:
            base, inner = self.split(part, members)
            bases.append(sequence(base, rest))
            for name, follow in inner.items():
                follows[name] = choice(follows.get(name, NOTHING), sequence(follow, rest))

        match expression:
            case Reference(name):
                return NOTHING, {name: EMPTY}
            case Choice(parts):
                for part in parts:
                    take(part, EMPTY)
            case Sequence(parts):
                for i, part in enumerate(parts):
                    take(part, sequence(*parts[i + 1 :]))
                    if not _is_nullable(part, self.nullable):
                        break
            case Repeat(inner, low, high):
                take(inner, repeat(inner, max(low - 1, 0), None if high is None else high - 1))
        return choice(*bases), follows


def _filled(name: str) -> str:
    """The name of the rule of the non-empty texts of a rule; no name in a file holds a space."""
    return f"{name} but not empty"


def _begun(name: str) -> str:
    return f"{name} without what follows"


def _solved(
    target: str, circle: list[str], bases: Mapping[str, Expression], follows: Mapping[str, _Follows]
) -> tuple[Expression, Expression]:
    """(base, follow) such that target = base | target follow, the other rules of the circle put in."""
    base = dict(bases)
    system = {name: dict(follow) for name, follow in follows.items()}
    others = [name for name in circle if name != target]
    while others:
        check_deadline()
        cost = {
            name: len(system[name]) * sum(name in system[user] for user in (*others, target))
            for name in others
        }
        name = min(others, key=cost.__getitem__)
        others.remove(name)
        ways = system.pop(name)
        again = repeat(ways.pop(name, NOTHING), 0, None)
        base[name] = sequence(base[name], again)
        ways = {first: sequence(follow, again) for first, follow in ways.items()}
        for user in (*others, target):
            after = system[user].pop(name, None)
            if after is None:
                continue
            base[user] = choice(base[user], sequence(base[name], after))
            for first, follow in ways.items():
                system[user][first] = choice(system[user].get(first, NOTHING), sequence(follow, after))
        users = (*others, target)
        _check_size(circle, [part for user in users for part in (base[user], *system[user].values())])
    return base[target], system[target].get(target, NOTHING)


def _check_size(circle: list[str], stack: list[Expression]) -> None:
    room = MAX_NODES
    while stack:
        expression = stack.pop()
        room -= 1
        if room < 0:
            way = " -> ".join([*circle[:12], *(["..."] if len(circle) > 12 else []), circle[0]])
            raise InvalidGrammar(
                f"grammar: the rules {way} begin with one another in too many ways to be read from the "
                "left; write them so that a rule begins with a text of its own"
            )
        if isinstance(expression, Sequence | Choice):
            stack.extend(expression.parts)
        elif isinstance(expression, Repeat):
            stack.append(expression.inner)


def _with_last(expression: Expression, name: str, other: Expression) -> Expression:
    """`expression` with `other` instead of the rule `name` where that comes last."""
    match expression:
        case Reference(found) if found == name:
            return other
        case Sequence(parts):
            return sequence(*parts[:-1], _with_last(parts[-1], name, other))
        case Choice(parts):
            return choice(*[_with_last(part, name, other) for part in parts])
        case Repeat(inner, low, 1):
            return Repeat(_with_last(inner, name, other), low, 1)
    return expression


def _strongly_connected(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components (R. Tarjan, 1972), without recursion."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_names: list[str] = []
    is_open: set[str] = set()
    components: list[list[str]] = []
    for root in graph:
        if root in number:
            continue
        way = [(root, iter(graph[root]))]
        number[root] = lowest[root] = len(number)
        open_names.append(root)
        is_open.add(root)
        while way:
            name, targets = way[-1]
            for target in targets:
                if target not in number:
                    number[target] = lowest[target] = len(number)
                    open_names.append(target)
                    is_open.add(target)
                    way.append((target, iter(graph[target])))
                    break
                if target in is_open:
                    lowest[name] = min(lowest[name], number[target])
            else:
                way.pop()
                if way:
                    lowest[way[-1][0]] = min(lowest[way[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    at = open_names.index(name)
                    components.append(open_names[at:])
                    is_open.difference_update(open_names[at:])
                    del open_names[at:]
    return components
