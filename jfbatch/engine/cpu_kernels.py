"""What runs compiled on a CPU: attention, normalisation, gates.

Storage is bfloat16 (as uint16) or float32, sums are float32, and so are factors but where the machine
multiplies bfloat16 by itself and the model computes in it. Every row of the output is computed from its own
row of the input alone, in one order: it does not depend on what shares its step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import overload
from numpy.typing import NDArray

from jfbatch.engine.vector_products import COLUMNS, HAS_DOTS, ROWS, multiply
from jfbatch.kernel_cache import Kernel, compiled, kept_under_the_source_of

NO_SINK = np.float32(-3e38)

_KEPT = kept_under_the_source_of(Path(__file__).parent, "vector_products", "cpu_kernels")
_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_ROUND = np.float32(3 << 22)  # adding it to a small number leaves no place for a fraction


def _jit(function: Kernel) -> Kernel:
    """Compiled once per machine; sums may be taken in any order, but always the same one."""
    return compiled(function, _KEPT, error_model="numpy", fastmath=True)


def _jit_in_order(function: Kernel) -> Kernel:
    """Compiled once per machine; every sum is taken in the order in which it is written."""
    freedoms = {"nnan", "ninf", "nsz", "arcp", "contract"}
    return compiled(function, _KEPT, error_model="numpy", fastmath=freedoms)


def _jit_exactly(function: Kernel) -> Kernel:
    """Compiled once per machine, with infinities and what is not a number as IEEE 754 has them."""
    return compiled(function, _KEPT)


def _widened(number: Any) -> Any:
    """A stored number (bfloat16 as uint16, or float32) as float32; for compiled code only."""
    raise NotImplementedError


@overload(_widened, inline="always")
def _widened_of(number):  # type: ignore[no-untyped-def]  # numba compares the signatures
    if isinstance(number, numba.types.Integer):
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


def _narrowed(number: Any, storage: Any) -> Any:
    """A float32 as an array stores it, to the nearest, ties to even; for compiled code only."""
    raise NotImplementedError


@overload(_narrowed, inline="always")
def _narrowed_to(number, storage):  # type: ignore[no-untyped-def]  # numba compares the signatures
    if isinstance(storage.dtype, numba.types.Integer):
        return lambda number, storage: np.uint16(_rounded_bits(number))
    return lambda number, storage: number


@_jit_in_order
def _rounded_bits(number: Any) -> Any:
    bits = np.uint32(np.float32(number).view(np.uint32))
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@_jit_exactly
def _ordered(bits: Any) -> Any:
    """The bits of a float32 as an int32 that is the larger, the larger the float; and back again."""
    return np.int32(bits ^ (np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_jit_in_order
def _exp(x: Any) -> Any:
    """exp(x) for x <= 0, to two units in the last place; unlike libm's it runs on whole vectors."""
    scaled = max(x, np.float32(-87.0)) * _LOG2E
    rounded = scaled + _ROUND
    rest = (scaled - (rounded - _ROUND)) * _LN2
    power = np.float32(1 / 5040) * rest + np.float32(1 / 720)
    power = power * rest + np.float32(1 / 120)
    power = power * rest + np.float32(1 / 24)
    power = power * rest + np.float32(1 / 6)
    power = power * rest + np.float32(1 / 2)
    power = power * rest + np.float32(1)
    power = power * rest + np.float32(1)
    exponent = np.int32(np.int32(np.float32(rounded).view(np.int32)) << np.int32(23))
    return np.int32(np.float32(power).view(np.int32) + exponent).view(np.float32)


def _as_factors(numbers: Any, computed: Any, storage: Any) -> Any:
    """An array like `numbers`, float32, for these as factors of what is stored; for compiled code only.

    `numbers` itself where factors are float32. computed: an array of the model's dtype.
    """
    raise NotImplementedError


@overload(_as_factors)
def _as_factors_of(numbers, computed, storage):  # type: ignore[no-untyped-def]  # numba compares the signatures
    if HAS_DOTS and computed.dtype == storage.dtype == types.uint16:
        return lambda numbers, computed, storage: np.zeros(numbers.shape, np.uint16)
    return lambda numbers, computed, storage: numbers


def _scale(numbers: Any, factor: Any, scaled: Any) -> None:
    """scaled = numbers * factor; scaled: what `_as_factors` gave for numbers; for compiled code only."""
    raise NotImplementedError


@overload(_scale)
def _scale_into(numbers, factor, scaled):  # type: ignore[no-untyped-def]  # numba compares the signatures
    def in_place(numbers, factor, scaled):  # type: ignore[no-untyped-def]
        for j in range(len(numbers)):
            numbers[j] *= factor

    def elsewhere(numbers, factor, scaled):  # type: ignore[no-untyped-def]
        for j in range(len(numbers)):
            scaled[j] = _narrowed(numbers[j] * factor, scaled)

    return in_place if numbers.dtype == scaled.dtype else elsewhere


@_jit
def attend(
    projected: tuple[Any, Any, Any],  # Q, K and V: [tokens, columns], as the model computes
    columns: tuple[int | np.int64, int, int],  # where in these the heads begin
    rotation: tuple[NDArray[np.float32], NDArray[np.float32]],  # cosines, sines [tokens, head dim or 0]
    factors: tuple[NDArray[np.float32], NDArray[np.float32]],  # of the norms of Q and K: [head dim] or empty
    epsilon: np.float32,
    key_dim: int,
    keys: Any,  # [slots, kv heads, key dim / group, length, group]; group: 2 of bfloat16, 1 of float32
    values: Any,  # [slots, kv heads, length / group, value dim, group]; value dim padded to vectors
    spans: NDArray[np.int64],  # [spans, 7]: as cpu_attention.attend has them
    scaling: np.float32,
    window: int,
    softcap: np.float32,  # 0 for none
    sinks: NDArray[np.float32],  # [heads] or empty
    output: Any,  # [tokens, heads, value dim], as the model computes
) -> None:
    """Store the spans' K and V, then attend; queries that do not are left in `output` as they would.

    While one head attends, K and V of the next one are fetched: a layer's rows are more than the caches hold.
    """
    kv_heads, value_dim, group = keys.shape[1], output.shape[2], keys.shape[4]
    share = output.shape[1] // kv_heads
    rows = np.zeros((ROWS, keys.shape[2] * keys.shape[4]), np.float32)
    scores = np.empty((ROWS, keys.shape[3]), np.float32)
    queries = _as_factors(rows, projected[0], keys)
    weights = _as_factors(scores, projected[0], values)
    sums = np.empty((ROWS, values.shape[3]), np.float32)
    for index in range(len(spans)):
        slot, start, first, count, attends, member, members = spans[index]
        last = kv_heads * (member + 1) // members
        for kv in range(kv_heads * member // members, last):
            past = keys[slot, kv], values[slot, kv]
            for token in range(first, first + count):
                place = start + token - first
                turn = rotation[0][token], rotation[1][token]
                source = projected[1][token, columns[1] + kv * key_dim :]
                _prepare(source, factors[1], epsilon, turn, rows[0, :key_dim])
                _store_key(rows[0], past[0][:, place])
                source = projected[2][token, columns[2] + kv * value_dim :]
                _move(source, past[1][place // group, :value_dim, place % group])
            coming = (slot, kv + 1) if kv + 1 < last else _beginning(spans, index + 1, kv_heads)
            ahead = keys[coming], values[coming]
            # The queries of this kv head, all heads of a token and then the next token's, so many at a time.
            parts = (count * share + ROWS - 1) // ROWS
            for part in range(parts):
                begin, end = count * share * part // parts, count * share * (part + 1) // parts
                for row in range(begin, end):
                    token, head = first + row // share, kv * share + row % share
                    turn = rotation[0][token], rotation[1][token]
                    source = projected[0][token, columns[0] + head * key_dim :]
                    _prepare(source, factors[0], epsilon, turn, rows[row - begin, :key_dim])
                    if attends:
                        _scale(rows[row - begin], np.float32(1), queries[row - begin])
                    else:
                        _move(rows[row - begin], output[token, head, :key_dim])
                if attends:
                    limits = start, begin, end, share, window
                    rules = scaling, softcap, sinks[kv * share : (kv + 1) * share]
                    scratch = queries, scores, weights, sums
                    _attend_rows(past, ahead, limits, rules, scratch)
                    ahead = past
                    for row in range(begin, end):
                        _move(sums[row - begin], output[first + row // share, kv * share + row % share])


@_jit
def _beginning(spans: Any, index: int, kv_heads: int) -> Any:
    """The slot and the first kv head of a span, or of the last one."""
    span = spans[min(index, len(spans) - 1)]
    return span[0], kv_heads * span[5] // span[6]


@_jit_exactly
def place_of(array: Any) -> Any:
    """The address of an array's first number and the distance of its rows, in bytes."""
    return np.int64(array.ctypes.data), np.int64(array.strides[0])


@_jit
def _attend_rows(
    past: tuple[Any, Any],
    ahead: tuple[Any, Any],
    limits: tuple[int, int, int, int, int],
    rules: tuple[Any, Any, Any],
    scratch: tuple[Any, Any, Any, Any],
) -> None:
    """sums[i] = what queries[i] gets from its slot's keys and values, for up to ROWS queries.

    past: K and V of one slot and kv head; ahead: others to fetch on the way. limits: where the span begins in
    its row, the first and the end of the queries among those of the span and kv head, how many of these a
    token has, and the window. rules: scaling, softcap, sinks. scratch: queries, scores, weights (perhaps in
    place of the scores) and sums.
    """
    keys, values = past
    queries, scores, weights, sums = scratch
    start, first, end, share, window = limits
    scaling, softcap, sinks = rules
    stop = start + (end - 1) // share + 1
    begin = max(start + first // share + 1 - window, 0) // COLUMNS * COLUMNS
    ahead_keys, ahead_values = place_of(ahead[0])[0], place_of(ahead[1])[0]
    address, step = place_of(keys)
    target, target_step = place_of(scores)
    for base in range(begin, stop, COLUMNS):  # lengths are whole multiples of these
        part, goal = (address + 4 * base, step), (target + 4 * base, target_step)
        near = ahead_keys + 4 * base
        multiply(keys, queries, end - first, COLUMNS, place_of(queries), part, near, goal, len(keys))
    group = values.shape[2]
    low, high = begin // group, (stop + group - 1) // group
    for row in range(first, end):
        own_stop = start + row // share + 1
        sink = sinks[row % share] if len(sinks) else NO_SINK
        own = begin, max(own_stop - window, 0), own_stop
        _softmax(scores[row - first], own, (scaling, softcap, sink), weights[row - first, : group * high])
    address, step = place_of(values[low:])
    source = place_of(weights[:, begin:])
    target, target_step = place_of(sums)
    for base in range(0, values.shape[1], COLUMNS):
        wide = min(COLUMNS, values.shape[1] - base)
        part, goal = (address + 4 * base, step), (target + 4 * base, target_step)
        near = ahead_values + step * low + 4 * base
        multiply(values, weights, end - first, wide, source, part, near, goal, high - low)


@_jit_in_order
def _move(source: Any, target: Any) -> None:
    """Fill `target` with the beginning of `source`, in its own kind of number."""
    for d in range(len(target)):
        target[d] = _narrowed(_widened(source[d]), target)


@_jit_in_order
def _store_key(source: Any, target: Any) -> None:
    """Fill `target` [dimensions / group, group] with `source`, in its own kind of number."""
    group = target.shape[1]
    for d in range(len(target)):
        for member in range(group):
            target[d, member] = _narrowed(source[d * group + member], target)


@_jit_in_order
def _prepare(source: Any, factors: Any, epsilon: Any, turn: Any, head: Any) -> None:
    """One head of a token as it attends: head = rotated(normalised(source)).

    factors: [head dim] of a root mean square normalisation, or empty; turn: cosines and sines [head dim] of
    the token's rotary embedding, by which the halves of a head turn against each other, or empty.
    """
    width = len(head)
    for d in range(width):
        head[d] = _widened(source[d])
    if len(factors):
        total = np.float32(0)
        for d in range(width):
            total += head[d] * head[d]
        share = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for d in range(width):
            head[d] = head[d] * share * factors[d]
    cosines, sines = turn
    if len(cosines):
        half = width // 2
        for d in range(half):
            left, right = head[d], head[half + d]
            head[d] = left * cosines[d] - right * sines[d]
            head[half + d] = right * cosines[half + d] + left * sines[half + d]


@_jit
def _softmax(scores: Any, limits: tuple[int, int, int], rules: tuple[Any, Any, Any], weights: Any) -> None:
    """Scores -> weights, with one more logit that carries no value; the scores are overwritten.

    limits: the first number of interest, and the first and the end of those that have weight. The others
    get zeros. rules: scaling, softcap, sink.
    """
    begin, own_begin, own_stop = limits
    scaling, softcap, sink = rules
    row = scores[own_begin:own_stop]
    for j in range(len(row)):
        row[j] *= scaling
    if softcap > 0:
        for j in range(len(row)):
            row[j] = np.tanh(row[j] / softcap) * softcap
    order = _ordered(np.float32(sink).view(np.int32))
    for j in range(len(row)):  # among floats LLVM would look for it one after the other
        order = max(order, _ordered(np.float32(row[j]).view(np.int32)))
    most = np.int32(_ordered(order)).view(np.float32)
    total = np.float32(0)
    for j in range(len(row)):
        row[j] = _exp(row[j] - most)
    for j in range(len(row)):
        total += row[j]
    if sink != NO_SINK:
        total += _exp(sink - most)
    _scale(row, np.float32(1) / total, weights[own_begin:own_stop])
    weights[begin:own_begin] = 0
    weights[own_stop:] = 0


@_jit
def normalise(weight: NDArray[np.float32], epsilon: np.float32, rows: Any, output: Any) -> None:
    """Root mean square normalisation: output = rows / sqrt(mean(rows^2) + epsilon) * weight.

    rows, output: [tokens, width], as stored; weight [width].
    """
    for index in range(len(rows)):
        row, result = rows[index], output[index]
        total = np.float32(0)
        for j in range(len(row)):
            number = _widened(row[j])
            total += number * number
        scale = np.float32(1) / np.sqrt(total / np.float32(len(row)) + epsilon)
        for j in range(len(result)):
            result[j] = _narrowed(_widened(row[j]) * scale * weight[j], output)


@_jit
def gate(both: Any, output: Any) -> None:
    """`gate_row` for every row. both: [tokens, gates and rows side by side]."""
    width = output.shape[1]
    for index in range(len(both)):
        gate_row(both[index, :width], both[index, width:], output[index])


@_jit
def gate_row(gates: Any, row: Any, output: Any) -> None:
    """output = silu(gates) * row, where silu(x) = x / (1 + exp(-x))."""
    for j in range(len(output)):
        number = _widened(gates[j])
        power = _exp(-abs(number))
        share = (np.float32(1) if number >= 0 else power) / (np.float32(1) + power)
        output[j] = _narrowed(number * share * _widened(row[j]), output)
