"""Merging: a conjunction of subschemas becomes a list of shapes, any of which may hold.

One pass works like a tableau: keywords either narrow the branch's shape, add further subschemas to
the conjunction ($ref, allOf), or split it (anyOf, oneOf, not, if, dependencies). A subschema already
in the conjunction adds nothing, which is what makes recursion end. Where the branches would become
too many, a split is left out, and the shapes say so as `unenforced`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from jfbatch.errors import GrammarTooLarge, UnsupportedSchema
from jfbatch.grammar.json_schema.branch import Alternative, Branch, Fact, Position, Split
from jfbatch.grammar.json_schema.keywords import POSITIVE, active_keywords
from jfbatch.grammar.json_schema.negation import NEGATIVE
from jfbatch.grammar.json_schema.properties import property_conjunction, split_some_key
from jfbatch.grammar.json_schema.resolve import Resolver, SchemaNode
from jfbatch.grammar.json_schema.shape import (
    ANY_TYPE,
    OBJECT,
    STRING,
    Atom,
    Conjunction,
    ItemScope,
    PropertyScope,
    Shape,
    value_key,
)
from jfbatch.grammar.json_schema.values import remaining_values, strings_are_empty

BRANCH_LIMIT = 300
"""Branches of one conjunction beyond which splits are left to the check afterwards."""

WIDEST_SPLIT = 2_000
"""Alternatives of a single split that are all followed, where nothing multiplies them."""

LOOK_AHEAD = 4
"""How deep one emptiness question may ask others."""

QUESTION_STEPS = 400
"""Branches that may be looked at for one such question, before it counts as not proven."""

ALL_QUESTION_STEPS = 12_000
"""The same for all the questions about one document."""

NODE_LIMIT = 20_000
"""Subschemas that one conjunction may take in, all branches together."""


Answer = TypeVar("Answer")
PositiveKeyword = Callable[["Merger", SchemaNode, Any, Branch], None]
NegativeKeyword = Callable[["Merger", SchemaNode, Any], list[Alternative]]


class _TooManyBranches(Exception):
    """Internal: carries the labels of the splits that could be left out, the dearest first."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels


class _TooFarAhead(Exception):
    """Internal: a question about emptiness takes more work than its answer is worth."""


class Merger:
    """Expands conjunctions of one document's nodes; remembers what it found."""

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self.never: Atom = (resolver.never, True)
        self._positive = POSITIVE
        self._negative = NEGATIVE
        self._keywords: dict[SchemaNode, tuple[str, ...]] = {}
        self._canonical: dict[SchemaNode, Conjunction] = {}
        self._negations: dict[SchemaNode, list[Alternative]] = {}
        self._empty: dict[frozenset[Atom], bool] = {}
        self._shapes: dict[frozenset[Atom], list[Shape]] = {}
        self._emptiness_depth = 0
        self._question_steps = 0
        self._all_question_steps = ALL_QUESTION_STEPS
        self._observes_evaluation: bool | None = None
        self.patterns: dict[str, str] = {}
        self._enum_keys: dict[SchemaNode, frozenset[Any]] = {}
        self.property_scopes: dict[SchemaNode, PropertyScope] = {}
        self.item_scopes: dict[SchemaNode, ItemScope] = {}

    @property
    def observes_evaluation(self) -> bool:
        """Whether the document asks anywhere what other keywords have evaluated."""
        if self._observes_evaluation is None:
            self._observes_evaluation = self.resolver.mentions("unevaluatedProperties", "unevaluatedItems")
        return self._observes_evaluation

    def enum_keys(self, node: SchemaNode) -> frozenset[Any]:
        """The values of a node's enum, as they compare in JSON."""
        found = self._enum_keys.get(node)
        if found is None:
            values = node.schema["enum"]
            if not isinstance(values, list):
                raise node.fail("enum", "must be a list of values")
            found = self._enum_keys[node] = frozenset(value_key(value) for value in values)
        return found

    def keywords(self, node: SchemaNode) -> tuple[str, ...]:
        """The keywords of a node that constrain anything in its draft, in the order written."""
        found = self._keywords.get(node)
        if found is None:
            found = active_keywords(self.resolver, node)
            self._keywords[node] = found
        return found

    def canonical(self, conjunction: Conjunction) -> Conjunction:
        """The same conjunction without what adds nothing: bare $refs and allOfs replaced by what they say."""
        if len(conjunction) == 1 and conjunction[0][1]:
            return self._canonical_node(conjunction[0][0])
        atoms: dict[Atom, None] = {}
        for node, positive in conjunction:
            if positive:
                atoms.update(dict.fromkeys(self._canonical_node(node)))
            elif node.schema is False or (isinstance(node.schema, dict) and self._is_nothing(node)):
                atoms[(node, False)] = None
            elif node.schema is True:
                return (self.never,)
            else:
                atoms[(node, False)] = None
        if self.never in atoms or self._contradicts(atoms):
            return (self.never,)
        return tuple(atoms)

    def _is_nothing(self, node: SchemaNode) -> bool:
        return self._canonical_node(node) == (self.never,)

    def _contradicts(self, atoms: dict[Atom, None]) -> bool:
        negative = [node for node, positive in atoms if not positive]
        if not negative:
            return False
        positive_nodes = [node for node, positive in atoms if positive]
        for node in negative:
            meaning = self._canonical_node(node)
            if not meaning:
                return True
            if all((part, True) in atoms for part, _ in meaning):
                return True
            for other in positive_nodes:
                if other.base == node.base and other.draft == node.draft and other.schema == node.schema:
                    return True
        return False

    def _canonical_node(self, node: SchemaNode) -> Conjunction:
        found = self._canonical.get(node)
        if found is not None:
            return found
        atoms: dict[Atom, None] = {}
        seen: set[SchemaNode] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            if current.schema is False:
                atoms = {self.never: None}
                break
            if current in seen or current.schema is True:
                continue
            seen.add(current)
            keywords = self.keywords(current)
            if not all(keyword in ("$ref", "allOf", "$dynamicRef", "$recursiveRef") for keyword in keywords):
                atoms[(current, True)] = None
                continue
            below: list[SchemaNode] = []
            for keyword in keywords:
                if keyword == "allOf":
                    parts = current.schema["allOf"]
                    if not isinstance(parts, list):
                        raise current.fail("allOf", "must be a list of schemas")
                    below += [
                        self.resolver.child(current, part, "allOf", str(i)) for i, part in enumerate(parts)
                    ]
                else:
                    below.append(self.resolver.reference(current, keyword))
            pending.extend(reversed(below))
        result = tuple(atoms)
        self._canonical[node] = result
        return result

    def shapes(self, conjunction: Conjunction) -> list[Shape]:
        """The shapes of a canonical conjunction; none if nothing satisfies it."""
        key = frozenset(conjunction)
        found = self._shapes.get(key)
        if found is None:
            found = self.expand(Branch.of(conjunction))
            self._shapes[key] = found
        return found

    def expand(self, start: Branch) -> list[Shape]:
        """All branches of `start` taken apart. Leaves out the dearest splits when there are too many."""
        left_out: set[str] = set()
        at_once = 1
        while True:
            try:
                return self._expand(start.copy(), left_out)
            except _TooManyBranches as overflow:
                left_out.update(overflow.labels[:at_once])
                at_once *= 2

    def _expand(self, start: Branch, left_out: set[str]) -> list[Shape]:
        results: list[Shape] = []
        stack = [start]
        steps = 0
        dearest: dict[str, int] = {}
        limit = BRANCH_LIMIT
        while stack:
            branch = stack.pop()
            steps += 1
            if self._emptiness_depth:
                work = 1 + (len(branch.visited) + len(branch.splits)) // 32
                self._question_steps -= work
                self._all_question_steps -= work
                if self._question_steps < 0 or self._all_question_steps < 0:
                    raise _TooFarAhead
            if not self._read(branch):
                continue
            chosen = None if self._decided_by_values(branch) else self._next_split(branch, left_out)
            if chosen is None:
                results.append(branch.shape)
            else:
                position, split = chosen
                branches = self._take_apart(branch, position, split)
                if branches is None:
                    left_out.add(split.label)
                    branch.shape.unenforce(split.mask, split.label)
                    stack.append(branch)
                    continue
                stack.extend(reversed(branches))
                if len(branches) <= WIDEST_SPLIT:
                    limit = max(limit, len(branches) + BRANCH_LIMIT // 10)
                if len(branches) > 1:
                    dearest[split.label] = dearest.get(split.label, 0) + len(branches) * (1 + 4 * split.cost)
            if len(results) + len(stack) > limit or steps > 8 * limit:
                raise _TooManyBranches(sorted(dearest, key=lambda label: -dearest[label]))
        return results

    def _decided_by_values(self, branch: Branch) -> bool:
        """With a finite list of candidates the rest is evaluated value by value."""
        return branch.shape.values is not None

    def _read(self, branch: Branch) -> bool:
        """Read all that is pending into the shape; False if the branch turns out dead."""
        shape, visited = branch.shape, branch.visited
        while branch.pending:
            current, branch.pending = branch.pending, []
            for position, formula in current:
                branch.position = shape.position = position
                if isinstance(formula, Fact):
                    getattr(shape, formula.method)(*formula.arguments)
                elif isinstance(formula, Split):
                    branch.add_split(formula)
                elif formula not in visited:
                    visited.add(formula)
                    if not self._read_atom(branch, formula):
                        return False
            if not shape.types:
                return False
            if len(visited) > NODE_LIMIT:
                raise GrammarTooLarge(f"more than {NODE_LIMIT} subschemas apply to one value at once")
        return shape.settle() and not self._contradicts_by_properties(shape)

    def _read_atom(self, branch: Branch, atom: Atom) -> bool:
        node, positive = atom
        if (node, not positive) in branch.visited:
            return False
        if isinstance(node.schema, bool):
            return node.schema == positive
        if not positive:
            alternatives = self.negated(node)
            if len(alternatives) == 1:
                branch.add(*alternatives[0])
            elif alternatives:
                label = f"#{node.path}: not"
                branch.add_split(Split(label, ANY_TYPE, tuple(alternatives), None, 1, node))
            return bool(alternatives)
        start = branch.position
        for index, keyword in enumerate(self.keywords(node)):
            branch.position = branch.shape.position = (*start, index)
            self._positive[keyword](self, node, node.schema[keyword], branch)
        return True

    def negated(self, node: SchemaNode) -> list[Alternative]:
        """The ways not to satisfy a node, one keyword each."""
        found = self._negations.get(node)
        if found is None:
            found = []
            for keyword in self.keywords(node):
                found.extend(self._negative[keyword](self, node, node.schema[keyword]))
            self._negations[node] = found
        return found

    def _next_split(self, branch: Branch, left_out: set[str]) -> tuple[Position, Split] | None:
        best: int | None = None
        kept: list[tuple[Position, Split]] = []
        for position, split in branch.splits:
            if not split.mask & branch.shape.types:
                continue
            if split.label in left_out:
                branch.shape.unenforce(split.mask, split.label)
                continue
            kept.append((position, split))
            if best is None or split.cost < kept[best][1].cost:
                best = len(kept) - 1
        branch.splits = kept
        return self._some_key_split(branch) if best is None else kept.pop(best)

    def _some_key_split(self, branch: Branch) -> tuple[Position, Split] | None:
        """At the end of a branch: a demand for some property becomes a choice of which one answers it."""
        facts = branch.shape.object
        if not facts.some_keys or not branch.shape.types & OBJECT:
            return None
        for index, some in enumerate(facts.some_keys):
            if not some.undeclared:
                rest = facts.some_keys[:index] + facts.some_keys[index + 1 :]
                branch.shape.object = replace(facts, some_keys=rest)
                return (), split_some_key(self, branch.shape.object, some)
        return None

    def _take_apart(self, branch: Branch, position: Position, split: Split) -> list[Branch] | None:
        if split.excluded is not None and not self._may_hold(branch, split.excluded):
            return [branch]
        alternatives: Any = split.alternatives
        if split.expand is not None:
            alternatives = split.expand(branch)
            if alternatives is None:
                return None
        branches: list[Branch] = []
        outside = branch.shape.types & ~split.mask
        if outside:
            other = branch.copy()
            other.shape.limit_types(outside)
            branches.append(other)
            branch.shape.limit_types(split.mask)
        for index, alternative in enumerate(alternatives):
            taken = branch if index == len(alternatives) - 1 else branch.copy()
            taken.position = (*position, index)
            taken.add(*alternative)
            branches.append(taken)
        return branches

    def _may_hold(self, branch: Branch, node: SchemaNode) -> bool:
        visited = branch.visited - {(node, False)}
        parts = ((node, True),)
        return self.is_possible(Branch.of(parts, branch.shape.copy(), visited), parts)

    # Emptiness: whether a conjunction provably has no instance. False means "not proven".

    def is_empty(self, conjunction: Conjunction) -> bool:
        conjunction = self.canonical(conjunction)
        if not conjunction:
            return False
        if conjunction == (self.never,):
            return True
        key = frozenset(conjunction)
        found = self._empty.get(key)
        if found is None:
            self._empty[key] = False  # taken as true of itself while being worked out
            found = self._ahead(lambda: self._is_empty(conjunction), unknown=False)
            self._empty[key] = found
        return found

    def _is_empty(self, conjunction: Conjunction) -> bool:
        return all(self.shape_is_empty(shape, conjunction) for shape in self.shapes(conjunction))

    def shapes_ahead(self, conjunction: Conjunction) -> list[Shape] | None:
        """The shapes of a conjunction, asked for while another is being expanded; None: too far."""
        return self._ahead(lambda: self.shapes(self.canonical(conjunction)), unknown=None)

    def is_possible(self, branch: Branch, parts: Conjunction) -> bool:
        """Whether a branch to which `parts` have been added may have an instance; False is proven.

        Candidate values are held against the parts only: what else the branch has read may contain the
        very split that asks.
        """

        def question() -> bool:
            return not all(self.shape_is_empty(shape, parts) for shape in self.expand(branch))

        return self._ahead(question, unknown=True)

    def _ahead(self, question: Callable[[], Answer], unknown: Answer) -> Answer:
        """The answer to a question that needs other conjunctions expanded, within a budget of work."""
        if self._emptiness_depth >= LOOK_AHEAD or self._all_question_steps <= 0:
            return unknown
        is_outermost = self._emptiness_depth == 0
        if is_outermost:
            self._question_steps = QUESTION_STEPS
        self._emptiness_depth += 1
        try:
            return question()
        except (_TooFarAhead, UnsupportedSchema) as error:
            if isinstance(error, UnsupportedSchema) or is_outermost:
                return unknown
            raise
        finally:
            self._emptiness_depth -= 1

    def shape_is_empty(self, shape: Shape, conjunction: Conjunction) -> bool:
        """Whether no value provably has this shape; `conjunction` is what it was made from."""
        if shape.values is not None:
            return not remaining_values(self, shape, conjunction)
        if shape.types == STRING:
            excluded = tuple(value for value, _ in shape.excluded if isinstance(value, str))
            return strings_are_empty(shape.string, excluded)
        return not shape.types

    def _contradicts_by_properties(self, shape: Shape) -> bool:
        """Take away the object type where a required property can have no value; True if nothing is left."""
        if not shape.types & OBJECT or not shape.object.required or not shape.object.scopes:
            return False
        if self._emptiness_depth >= LOOK_AHEAD:
            return False
        for name in shape.object.required:
            conjunction = property_conjunction(self, shape.object, name)
            worth_asking = len(conjunction) > 1 or conjunction == (self.never,)
            if worth_asking and self.is_empty(conjunction):
                shape.types &= ~OBJECT
                break
        return not shape.types
