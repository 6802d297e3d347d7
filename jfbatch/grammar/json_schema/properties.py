"""What a shape says of its properties: which are declared, in what order, and all that each must satisfy."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from jfbatch.grammar.json_schema.branch import Alternative, Fact, Split
from jfbatch.grammar.json_schema.shape import OBJECT, Conjunction, ObjectFacts, SomeKey
from jfbatch.grammar.json_schema.validation import holds, matches_pattern

if TYPE_CHECKING:
    from jfbatch.grammar.json_schema.merge import Merger


def property_conjunction(merger: Merger, facts: ObjectFacts, name: str) -> Conjunction:
    """All that is said of the value of one property; canonical."""
    if name in facts.forbidden:
        return (merger.never,)
    atoms = []
    for scope in facts.scopes:
        own = scope.properties.get(name)
        covered = own is not None
        if own is not None:
            atoms.append(own)
        for pattern, atom in scope.patterns:
            if matches_pattern(pattern, name):
                atoms.append(atom)
                covered = True
        if not covered and scope.additional is not None:
            atoms.append(scope.additional)
    if not all(holds(merger, atom, name) for atom in facts.key_atoms):
        return (merger.never,)
    return merger.canonical(tuple(atoms))


def declared_names(facts: ObjectFacts) -> list[str]:
    """The names in the order in which they are written: first mentioned first, required-only ones last."""
    names: dict[str, None] = {}
    for scope in facts.scopes:
        names.update(dict.fromkeys(scope.properties))
    names.update(facts.required)
    return [name for name in names if name not in facts.forbidden]


def split_some_key(merger: Merger, facts: ObjectFacts, some: SomeKey) -> Split:
    """A demand for some property: one of the declared ones answers it, or an undeclared one."""
    alternatives: list[Alternative] = []
    for name in declared_names(facts):
        fits = (
            name not in some.names
            and all(matches_pattern(pattern, name) for pattern in some.patterns)
            and not any(matches_pattern(pattern, name) for pattern in some.not_patterns)
            and all(holds(merger, atom, name) for atom in some.key_atoms)
        )
        if fits:
            values = tuple(Fact("property_holds", (name, atom)) for atom in some.atoms)
            alternatives.append((Fact("require", (name,)), *values))
    if not _is_closed(facts):
        alternatives.append((Fact("some_key", (replace(some, undeclared=True),)),))
    return Split(some.label, OBJECT, tuple(alternatives), None, 4)


def _is_closed(facts: ObjectFacts) -> bool:
    """Whether some schema rules out every undeclared property."""
    return any(
        not scope.patterns and scope.additional is not None and scope.additional[0].schema is False
        for scope in facts.scopes
    )


_FIXED_START = re.compile(r"\^((?:[\w:/ @#,-]|\\[-./_:])*)(?=([*?{]?)(\$?))", re.ASCII)


def patterns_exclude_each_other(left: str, right: str) -> bool:
    """Whether no text matches both, proven by the fixed texts that they start with."""
    one, other = _fixed_start(left), _fixed_start(right)
    if one is None or other is None:
        return False
    (first, first_whole), (second, second_whole) = one, other
    if first_whole and second_whole:
        return first != second
    if first_whole:
        return not first.startswith(second)
    if second_whole:
        return not second.startswith(first)
    return not (first.startswith(second) or second.startswith(first))


def _fixed_start(pattern: str) -> tuple[str, bool] | None:
    """The literal text after a leading ^, and whether it is the whole pattern."""
    found = _FIXED_START.match(pattern)
    if found is None or "|" in pattern:
        return None
    text = re.sub(r"\\(.)", r"\1", found[1])
    if found[2]:
        return text[:-1], False
    return text, found[3] == "$" and found.end(1) + 1 == len(pattern)
