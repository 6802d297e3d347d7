"""The decimal numerals of the multiples of a step.

Where the step divides a power of ten, the last digits decide and are listed. Otherwise an explicit
automaton reads the digits and holds the residue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jfbatch.errors import GrammarTooLarge
from jfbatch.grammar.expression import (
    ByteSet,
    ExplicitAutomaton,
    Expression,
    Intersection,
    choice,
    literal,
    optional,
    repeat,
    sequence,
)

MAX_STATES = 20_000
MAX_ENDINGS = 1_000
MAX_DIGITS = 40
EXACT_DIGITS = 15  # decimals of so many digits are told apart by doubles

_DIGIT = ByteSet.span(0x30, 0x39)
_NONZERO = ByteSet.span(0x31, 0x39)

State = tuple[str, int, int, bool]  # phase, fraction digits, residue, whether only zeros were read


@lru_cache(maxsize=256)
def integer_multiples(step: int) -> tuple[Expression, Expression]:
    """The multiples of step from 0 on, and those from 1 on. Raises GrammarTooLarge for large odd steps."""
    listed = _by_endings(step)
    if listed is not None:
        return choice(literal("0"), listed), listed
    return _by_residues(step, _WHOLE, above_zero=False), _by_residues(step, _WHOLE, above_zero=True)


@lru_cache(maxsize=256)
def decimal_multiples(numerator: int, scale: int, every_spelling: bool) -> tuple[Expression, Expression]:
    """The multiples of numerator / 10**scale, plainly written: from 0 on, and those above 0.

    With at most `scale` fraction digits, integers also with ".0", and no more digits in all than a double
    holds exactly if there is a point; `every_spelling` allows any number of digits and trailing zeros.
    Raises GrammarTooLarge for steps with too many residues.
    """
    form = _Form(scale, point=True, every_spelling=every_spelling)
    if every_spelling:
        return _by_residues(numerator, form, above_zero=False), _by_residues(numerator, form, above_zero=True)
    if scale > 0:
        shape = sequence(
            repeat(_DIGIT, 1, max(1, EXACT_DIGITS - scale)),
            optional(sequence(literal("."), repeat(_DIGIT, 1, scale))),
        )
        return (
            Intersection((shape, _by_residues(numerator, form, above_zero=False))),
            Intersection((shape, _by_residues(numerator, form, above_zero=True))),
        )
    from_zero, above_zero = integer_multiples(numerator)
    return _with_point_zero(from_zero), _with_point_zero(above_zero)


def _with_point_zero(integers: Expression) -> Expression:
    short = Intersection((repeat(_DIGIT, 1, EXACT_DIGITS), integers))
    return choice(integers, sequence(short, literal(".0")))


def _by_endings(step: int) -> Expression | None:
    """The positive multiples of a step that divides a power of ten with few last digits, else None."""
    rest, twos, fives = step, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    digits = max(twos, fives)
    if rest != 1 or 10**digits // step > MAX_ENDINGS or digits > MAX_DIGITS // 2:
        return None
    if digits == 0:
        return sequence(_NONZERO, repeat(_DIGIT, 0, MAX_DIGITS - 1))
    endings = range(0, 10**digits, step)
    short = [literal(str(value)) for value in endings if value]
    long = choice(*(literal(f"{value:0{digits}}") for value in endings))
    return choice(*short, sequence(_NONZERO, repeat(_DIGIT, 0, MAX_DIGITS - digits - 1), long))


@dataclass(frozen=True, slots=True)
class _Form:
    """How multiples of step / 10**scale are written."""

    scale: int
    point: bool  # whether a fraction is allowed at all
    every_spelling: bool  # any number of trailing zeros


_WHOLE = _Form(0, point=False, every_spelling=False)


def _by_residues(step: int, form: _Form, above_zero: bool) -> Expression:
    """An automaton for the multiples of step / 10**scale (above_zero: without 0).

    The digits D with f of them after the point are a multiple exactly if D * 10**(scale - f) is divisible
    by step; those behind the first `scale` are zeros.
    """
    if step * (form.scale + 2) > MAX_STATES:
        raise GrammarTooLarge(f"multiples of {step}e-{form.scale} have more than {MAX_STATES:,} residues")
    start: State = ("start", 0, 0, True)
    rows: dict[State, dict[State, int]] = {}
    queue = [start]
    while queue:
        state = queue.pop()
        if state in rows:
            continue
        row: dict[State, int] = {}
        for byte, target in _moves(state, step, form):
            row[target] = row.get(target, 0) | 1 << byte
        rows[state] = row
        queue.extend(row)
    accepting = {
        state
        for state in rows
        if state[0] in ("zero", "whole", "fraction")
        and state[2] * 10 ** (form.scale - min(state[1], form.scale)) % step == 0
        and not (above_zero and state[3])
    }
    return _trimmed(rows, start, accepting)


def _moves(state: State, step: int, form: _Form) -> list[tuple[int, State]]:
    phase, places, residue, only_zeros = state
    moves: list[tuple[int, State]] = []
    if phase in ("zero", "whole") and form.point:
        moves.append((0x2E, ("point", 0, residue, only_zeros)))
    if phase == "zero":
        return moves
    for digit in range(10):
        if phase == "start" and digit == 0:
            moves.append((0x30, ("zero", 0, 0, True)))
        elif phase in ("start", "whole"):
            moves.append((0x30 + digit, ("whole", 0, (residue * 10 + digit) % step, False)))
        elif places < form.scale:
            value = (residue * 10 + digit) % step
            moves.append((0x30 + digit, ("fraction", places + 1, value, only_zeros and digit == 0)))
        elif digit == 0 and residue == 0 and (form.every_spelling or (form.scale == 0 and phase == "point")):
            moves.append((0x30, ("fraction", places, 0, only_zeros)))
    return moves


def _trimmed(rows: dict[State, dict[State, int]], start: State, accepting: set[State]) -> Expression:
    """The automaton without the states that cannot reach acceptance."""
    sources: dict[State, list[State]] = {state: [] for state in rows}
    for state, row in rows.items():
        for target in row:
            sources[target].append(state)
    live = set(accepting)
    queue = list(accepting)
    while queue:
        for source in sources[queue.pop()]:
            if source not in live:
                live.add(source)
                queue.append(source)
    if start not in live:
        return choice()
    ordered = [start, *(state for state in rows if state in live and state != start)]
    number = {state: index for index, state in enumerate(ordered)}
    transitions = tuple(
        tuple((bits, number[target]) for target, bits in rows[state].items() if target in live)
        for state in ordered
    )
    return ExplicitAutomaton(transitions, tuple(state in accepting for state in ordered))
