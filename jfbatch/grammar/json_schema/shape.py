"""A shape: everything a conjunction of schemas says, sorted by the JSON type it speaks about.

Merging schemas is calling these methods one after the other. Each type's facts are a frozen value,
replaced on change, so that copying a shape for a branch costs a few references.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd
from typing import Any

from jfbatch.grammar.json_schema.resolve import SchemaNode

NULL, FALSE, TRUE, INTEGER, FRACTION, STRING, ARRAY, OBJECT = (1 << bit for bit in range(8))
BOOLEAN = FALSE | TRUE
NUMBER = INTEGER | FRACTION
ANY_TYPE = 255
TYPE_BITS = {
    "null": NULL,
    "boolean": BOOLEAN,
    "integer": INTEGER,
    "number": NUMBER,
    "string": STRING,
    "array": ARRAY,
    "object": OBJECT,
}

Atom = tuple[SchemaNode, bool]
"""A subschema that holds (True) or does not (False)."""

Conjunction = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class NumberFacts:
    """Bounds as (value, exclusive); `multiple` and `not_multiples` are positive steps.

    `characters`: how many an integer may have; what a table adds (`numbers.held_to_columns`).
    """

    lower: tuple[int | float, bool] | None = None
    upper: tuple[int | float, bool] | None = None
    multiple: Fraction | None = None
    not_multiples: tuple[Fraction, ...] = ()
    characters: int | None = None

    @property
    def is_empty(self) -> bool:
        if self.lower is None or self.upper is None:
            return False
        low, high = self.lower[0], self.upper[0]
        return low > high or (low == high and (self.lower[1] or self.upper[1]))


@dataclass(frozen=True, slots=True)
class StringFacts:
    """Lengths in characters; patterns by ECMA-262 search; formats by name."""

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    not_patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    not_formats: tuple[str, ...] = ()
    length_label: str = ""

    @property
    def has_length(self) -> bool:
        return self.min_length > 0 or self.max_length is not None

    @property
    def conditions(self) -> int:
        """How many patterns and formats there are to observe."""
        return len(self.patterns) + len(self.not_patterns) + len(self.formats) + len(self.not_formats)

    @property
    def is_empty(self) -> bool:
        return self.max_length is not None and self.max_length < self.min_length


@dataclass(frozen=True, slots=True)
class ItemScope:
    """What one schema says of items: the first ones by position, then all the rest."""

    prefix: tuple[Atom | None, ...]
    rest: Atom | None


@dataclass(frozen=True, slots=True)
class Contains:
    """From `low` to `high` of the items satisfy `atom`."""

    atom: Atom
    low: int
    high: int | None
    label: str


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """What a conjunction says of arrays."""

    scopes: tuple[ItemScope, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    unique: str | None = None
    contains: tuple[Contains, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.max_items is not None and self.max_items < self.min_items


@dataclass(frozen=True, slots=True)
class PropertyScope:
    """What one schema says of properties: by name, by pattern, and of the names neither covers."""

    properties: Mapping[str, Atom]
    patterns: tuple[tuple[str, Atom], ...] = ()
    additional: Atom | None = None


@dataclass(frozen=True, slots=True)
class SomeKey:
    """At least one property whose name is outside `names` and `not_patterns`, matches `patterns`,
    satisfies `key_atoms`, and whose value satisfies `atoms`. `undeclared`: by now it must be one that the
    shape does not declare."""

    names: frozenset[str]
    patterns: tuple[str, ...]
    not_patterns: tuple[str, ...]
    key_atoms: Conjunction
    atoms: Conjunction
    label: str
    undeclared: bool = False


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a conjunction says of objects."""

    scopes: tuple[PropertyScope, ...] = ()
    positions: tuple[tuple[int, ...], ...] = ()
    required: Mapping[str, None] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    min_properties: int = 0
    max_properties: int | None = None
    size_label: str = ""
    key_atoms: Conjunction = ()
    some_keys: tuple[SomeKey, ...] = ()

    @property
    def is_empty(self) -> bool:
        if self.max_properties is not None and self.max_properties < max(
            self.min_properties, len(self.required)
        ):
            return True
        return bool(self.forbidden) and not self.forbidden.isdisjoint(self.required)


_ANY_NUMBER, _ANY_STRING, _ANY_ARRAY, _ANY_OBJECT = NumberFacts(), StringFacts(), ArrayFacts(), ObjectFacts()


class Shape:
    """The merged facts of one branch. `values` is the finite list of candidates, if there is one.

    `position` is where in the schema the reader is.
    """

    __slots__ = (
        "array",
        "excluded",
        "number",
        "object",
        "position",
        "string",
        "types",
        "unenforced",
        "values",
    )

    def __init__(self) -> None:
        self.types = ANY_TYPE
        self.values: tuple[Any, ...] | None = None
        self.excluded: tuple[tuple[Any, str], ...] = ()
        self.number = _ANY_NUMBER
        self.string = _ANY_STRING
        self.array = _ANY_ARRAY
        self.object = _ANY_OBJECT
        self.unenforced: tuple[tuple[int, str], ...] = ()
        self.position: tuple[int, ...] = ()

    def copy(self) -> Shape:
        new = Shape.__new__(Shape)
        new.types = self.types
        new.values = self.values
        new.excluded = self.excluded
        new.number = self.number
        new.string = self.string
        new.array = self.array
        new.object = self.object
        new.unenforced = self.unenforced
        new.position = self.position
        return new

    def settle(self) -> bool:
        """Take away the types whose facts contradict each other; whether any type is left."""
        if self.types & NUMBER and self.number.is_empty:
            self.types &= ~NUMBER
        if self.types & STRING and self.string.is_empty:
            self.types &= ~STRING
        if self.types & ARRAY and self.array.is_empty:
            self.types &= ~ARRAY
        if self.types & OBJECT and self.object.is_empty:
            self.types &= ~OBJECT
        if self.values is not None and not self.values:
            self.types = 0
        return self.types != 0

    def limit_types(self, mask: int) -> None:
        self.types &= mask

    def limit_values(self, values: tuple[Any, ...]) -> None:
        if self.values is None:
            self.values = values
        else:
            mine = {value_key(value) for value in values}
            self.values = tuple(value for value in self.values if value_key(value) in mine)

    def exclude(self, value: Any, label: str) -> None:
        if value is None:
            self.types &= ~NULL
        elif value is True:
            self.types &= ~TRUE
        elif value is False:
            self.types &= ~FALSE
        elif value == []:
            self.min_items(1)
        elif value == {}:
            self.min_properties(1, label)
        else:
            self.excluded += ((value, label),)

    def unenforce(self, mask: int, label: str) -> None:
        """Note a constraint on the types of `mask` that is left to the check afterwards."""
        self.unenforced += ((mask, label),)

    # numbers

    def minimum(self, value: int | float, exclusive: bool) -> None:
        lower = self.number.lower
        if lower is None or value > lower[0] or (value == lower[0] and exclusive):
            self.number = replace(self.number, lower=(value, exclusive))

    def maximum(self, value: int | float, exclusive: bool) -> None:
        upper = self.number.upper
        if upper is None or value < upper[0] or (value == upper[0] and exclusive):
            self.number = replace(self.number, upper=(value, exclusive))

    def multiple_of(self, step: Fraction) -> None:
        old = self.number.multiple
        self.number = replace(self.number, multiple=step if old is None else least_common_multiple(old, step))

    def not_multiple_of(self, step: Fraction) -> None:
        self.number = replace(self.number, not_multiples=(*self.number.not_multiples, step))

    # strings

    def min_length(self, length: int, label: str) -> None:
        if length > self.string.min_length:
            self.string = replace(self.string, min_length=length, length_label=label)

    def max_length(self, length: int, label: str) -> None:
        if self.string.max_length is None or length < self.string.max_length:
            self.string = replace(self.string, max_length=length, length_label=label)

    def pattern(self, pattern: str, positive: bool) -> None:
        facts = self.string
        if positive:
            self.string = replace(facts, patterns=_with(facts.patterns, pattern))
        else:
            self.string = replace(facts, not_patterns=_with(facts.not_patterns, pattern))

    def format(self, name: str, positive: bool) -> None:
        facts = self.string
        if positive:
            self.string = replace(facts, formats=_with(facts.formats, name))
        else:
            self.string = replace(facts, not_formats=_with(facts.not_formats, name))

    # arrays

    def items(self, scope: ItemScope) -> None:
        self.array = replace(self.array, scopes=(*self.array.scopes, scope))

    def min_items(self, count: int) -> None:
        if count > self.array.min_items:
            self.array = replace(self.array, min_items=count)

    def max_items(self, count: int) -> None:
        if self.array.max_items is None or count < self.array.max_items:
            self.array = replace(self.array, max_items=count)

    def unique_items(self, label: str) -> None:
        self.array = replace(self.array, unique=label)

    def contains(self, contains: Contains) -> None:
        self.array = replace(self.array, contains=(*self.array.contains, contains))

    # objects

    def properties(self, scope: PropertyScope) -> None:
        """Scopes stay in the order in which the schema mentions them, whenever they are read."""
        place = bisect_right(self.object.positions, self.position)
        scopes, positions = list(self.object.scopes), list(self.object.positions)
        scopes.insert(place, scope)
        positions.insert(place, self.position)
        self.object = replace(self.object, scopes=tuple(scopes), positions=tuple(positions))

    def property_holds(self, name: str, atom: Atom) -> None:
        self.properties(PropertyScope({name: atom}))

    def require(self, *names: str) -> None:
        if any(name not in self.object.required for name in names):
            self.object = replace(self.object, required={**self.object.required, **dict.fromkeys(names)})

    def forbid(self, name: str) -> None:
        self.object = replace(self.object, forbidden=self.object.forbidden | {name})

    def min_properties(self, count: int, label: str) -> None:
        if count > self.object.min_properties:
            self.object = replace(self.object, min_properties=count, size_label=label)

    def max_properties(self, count: int, label: str) -> None:
        if self.object.max_properties is None or count < self.object.max_properties:
            self.object = replace(self.object, max_properties=count, size_label=label)

    def property_names(self, atom: Atom) -> None:
        self.object = replace(self.object, key_atoms=(*self.object.key_atoms, atom))

    def some_key(self, some: SomeKey) -> None:
        self.object = replace(self.object, some_keys=(*self.object.some_keys, some))


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return names if name in names else (*names, name)


def least_common_multiple(left: Fraction, right: Fraction) -> Fraction:
    """The smallest positive number that is a whole multiple of both."""
    numerator = left.numerator * right.numerator // gcd(left.numerator, right.numerator)
    return Fraction(numerator, gcd(left.denominator, right.denominator))


def value_key(value: Any) -> Any:
    """A hashable stand-in that is equal where JSON Schema has the values equal: 1 is 1.0, true is not 1."""
    if isinstance(value, bool) or value is None:
        return (value,)
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, list):
        return ("[]", *(value_key(item) for item in value))
    return ("{}", frozenset((name, value_key(item)) for name, item in value.items()))


def type_of(value: Any) -> int:
    """The type bit of a JSON value; 1.0 is an integer."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, int):
        return INTEGER
    if isinstance(value, float):
        return INTEGER if value.is_integer() else FRACTION
    if isinstance(value, str):
        return STRING
    return ARRAY if isinstance(value, list) else OBJECT
