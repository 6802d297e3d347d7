"""Taking out what can match nothing: optional properties without a value, branches that never end.

A fixpoint over the rules finds those that derive some text; references to the others become NOTHING.
"""

from __future__ import annotations

from jfbatch.grammar.expression import (
    NOTHING,
    Choice,
    Expression,
    Reference,
    Repeat,
    RuleSet,
    Sequence,
    choice,
    repeat,
    sequence,
)


def prune(rules: RuleSet) -> RuleSet | None:
    """The same language without unproductive rules; None if it is empty.

    What Intersection and Difference leave is not looked into here: only the automaton knows.
    """
    productive: set[str] = set()
    users: dict[str, list[str]] = {}
    plain: set[int] = set()
    for name, body in rules.rules.items():
        for used in _references(body, plain):
            users.setdefault(used, []).append(name)
    pending = list(rules.rules)
    while pending:
        name = pending.pop()
        if name not in productive and _produces(rules.rules[name], productive):
            productive.add(name)
            pending.extend(users.get(name, ()))
    if not _produces(rules.start, productive):
        return None
    if len(productive) == len(rules.rules):
        return rules
    return RuleSet(
        _without(rules.start, productive),
        {name: _without(body, productive) for name, body in rules.rules.items() if name in productive},
    )


def _references(expression: Expression, plain: set[int]) -> list[str]:
    """The rules named in an expression. `plain` remembers by identity the parts that name none."""
    kind = type(expression)
    if kind is Reference:
        return [expression.name]  # type: ignore[union-attr]
    if kind is Sequence or kind is Choice:
        parts: tuple[Expression, ...] = expression.parts  # type: ignore[union-attr]
    elif kind is Repeat:
        parts = (expression.inner,)  # type: ignore[union-attr]
    else:
        return []
    if id(expression) in plain:
        return []
    found = [name for part in parts for name in _references(part, plain)]
    if not found:
        plain.add(id(expression))
    return found


def _produces(expression: Expression, productive: set[str]) -> bool:
    if isinstance(expression, Reference):
        return expression.name in productive
    if isinstance(expression, Sequence):
        return all(_produces(part, productive) for part in expression.parts)
    if isinstance(expression, Choice):
        return any(_produces(part, productive) for part in expression.parts)
    if isinstance(expression, Repeat):
        return expression.low == 0 or _produces(expression.inner, productive)
    return True


def _without(expression: Expression, productive: set[str]) -> Expression:
    if isinstance(expression, Reference):
        return expression if expression.name in productive else NOTHING
    if isinstance(expression, Sequence):
        return sequence(*(_without(part, productive) for part in expression.parts))
    if isinstance(expression, Choice):
        return choice(*(_without(part, productive) for part in expression.parts))
    if isinstance(expression, Repeat):
        return repeat(_without(expression.inner, productive), expression.low, expression.high)
    return expression
