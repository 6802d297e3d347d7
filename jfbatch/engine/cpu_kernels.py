"""What runs compiled on a CPU: attention, normalisation, gates. All in one file, because numba, which keeps
compiled functions on disk, looks at the file of a function only and not at those of the ones it calls.

Storage is bfloat16 (as uint16) or float32, arithmetic float32, and every row of the output is computed
from its own row of the input alone, in one order: it does not depend on what shares its step.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from jfbatch.kernel_cache import Kernel, compiled

NO_SINK = np.float32(-3e38)


def _registers() -> tuple[int, int]:
    """float32 numbers in a vector of this machine, and the rows of two sums each that its registers hold."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 9
    return (8, 4) if features.get("avx") else (4, 4)


_LANES, ROWS = _registers()
COLUMNS = 2 * _LANES

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_ROUND = np.float32(3 << 22)  # adding it to a small number leaves no place for a fraction


def _jit(function: Kernel) -> Kernel:
    """Compiled once per machine; sums may be taken in any order, but always the same one."""
    return compiled(function, error_model="numpy", fastmath=True)


def _jit_in_order(function: Kernel) -> Kernel:
    """Compiled once per machine; every sum is taken in the order in which it is written."""
    freedoms = {"nnan", "ninf", "nsz", "arcp", "contract"}
    return compiled(function, error_model="numpy", fastmath=freedoms)


def _jit_exactly(function: Kernel) -> Kernel:
    """Compiled once per machine, with infinities and what is not a number as IEEE 754 has them."""
    return compiled(function)


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


_FLOAT, _INTEGER, _ADDRESS = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_WORDS = ir.VectorType(_INTEGER, _LANES)


@intrinsic
def _multiply(context, storage, rows, columns, factors, places, ahead, sums, terms):  # type: ignore[no-untyped-def]
    """sums[i, c] = sum of factors[i, t] * stored[t, c] over t, for up to ROWS rows and COLUMNS columns.

    storage: the array of which `stored` is a part, for its dtype; its terms lie in groups (kv_layout.py),
    and `terms` counts these. factors, places (of `stored`), sums: the address of the first number and the
    distance of two rows in bytes. columns: COLUMNS or half of it. ahead: an address; what lies there as
    `stored` does is brought into the second-level cache.

    All sums are in vector registers from the first term to the last, and each is taken in the order of its
    terms, by the same operations wherever its column and its row lie.
    """
    grouped = isinstance(storage.dtype, types.Integer)
    pair = numba.typeof((0, 0))

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, rows, columns, factors, places, ahead, sums, terms = arguments
        pairs = [builder.extract_value(part, i) for part in (factors, places, sums) for i in range(2)]
        end = builder.append_basic_block("end")
        key = builder.add(builder.mul(rows, _ADDRESS(1024)), columns)
        cases = builder.switch(key, end)
        for count in range(1, ROWS + 1):
            for vectors in (1, 2):
                block = builder.append_basic_block("case")
                cases.add_case(_ADDRESS(1024 * count + _LANES * vectors), block)
                with builder.goto_block(block):
                    _emit_product(builder, count, vectors, grouped, pairs, ahead, terms)
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(storage, types.intp, types.intp, pair, pair, types.intp, pair, types.intp), generate


def _emit_product(
    builder: ir.IRBuilder, rows: int, vectors: int, grouped: bool, pairs: list[Any], ahead: Any, terms: Any
) -> None:
    """The instructions of `_multiply` for so many rows, and vectors of columns."""
    factors, factors_step, places, places_step, sums, sums_step = pairs
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), _INTEGER, _INTEGER, _INTEGER])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")

    def pointer(address: Any, offset: int, kind: Any) -> Any:
        return builder.inttoptr(builder.add(address, _ADDRESS(offset)), kind.as_pointer())

    def row(address: Any, step: Any, index: Any) -> Any:
        return builder.add(address, builder.mul(step, index))

    totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(rows)]
    for total in (total for line in totals for total in line):
        builder.store(ir.Constant(_VECTOR, None), total)
    with cgutils.for_range(builder, terms) as loop:
        columns = []
        for vector in range(vectors):
            offset = 4 * _LANES * vector
            near = pointer(row(ahead, places_step, loop.index), offset, byte)
            builder.call(
                prefetch, [near, _INTEGER(0), _INTEGER(2), _INTEGER(1)]
            )  # to read, second level, data
            words = builder.load(pointer(row(places, places_step, loop.index), offset, _WORDS), align=4)
            columns.append(_widened_words(builder, words, grouped))
        group = len(columns[0])
        for i in range(rows):
            own = row(row(factors, factors_step, _ADDRESS(i)), _ADDRESS(4 * group), loop.index)
            for member in range(group):
                factor = _in_every_lane(builder, builder.load(pointer(own, 4 * member, _FLOAT)))
                for vector in range(vectors):
                    product = builder.fmul(factor, columns[vector][member], flags=("contract",))
                    total = builder.load(totals[i][vector])
                    builder.store(builder.fadd(total, product, flags=("contract",)), totals[i][vector])
    for i in range(rows):
        for vector in range(vectors):
            place = pointer(row(sums, sums_step, _ADDRESS(i)), 4 * _LANES * vector, _VECTOR)
            builder.store(builder.load(totals[i][vector]), place, align=4)


def _widened_words(builder: ir.IRBuilder, words: Any, grouped: bool) -> list[Any]:
    """Vectors of float32: of the lower and of the upper bfloat16 of each word, or of the word itself."""
    if not grouped:
        return [builder.bitcast(words, _VECTOR)]
    lower = builder.shl(words, ir.Constant(_WORDS, [16] * _LANES))
    upper = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * _LANES))
    return [builder.bitcast(half, _VECTOR) for half in (lower, upper)]


def _in_every_lane(builder: ir.IRBuilder, number: Any) -> Any:
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, number, _INTEGER(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_WORDS, [0] * _LANES))


@_jit
def attend(
    projected: tuple[Any, Any, Any],  # Q, K and V: [tokens, columns], as the model computes
    columns: tuple[int, int, int],  # where in these the heads begin
    rotation: tuple[NDArray[np.float32], NDArray[np.float32]],  # cosines, sines [tokens, head dim or 0]
    factors: tuple[NDArray[np.float32], NDArray[np.float32]],  # of the norms of Q and K: [head dim] or empty
    epsilon: np.float32,
    key_dim: int,
    keys: Any,  # [slots, kv heads, key dim / group, length, group]; group: 2 of bfloat16, 1 of float32
    values: Any,  # [slots, kv heads, length / group, value dim, group]; value dim padded to vectors
    spans: NDArray[np.int64],  # [spans, 5]: slot, start, first token, count, whether they attend
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
    weights = np.empty((ROWS, keys.shape[3]), np.float32)
    sums = np.empty((ROWS, values.shape[3]), np.float32)
    for index in range(len(spans)):
        slot, start, first, count, attends = spans[index]
        for kv in range(kv_heads):
            past = keys[slot, kv], values[slot, kv]
            for token in range(first, first + count):
                place = start + token - first
                turn = rotation[0][token], rotation[1][token]
                source = projected[1][token, columns[1] + kv * key_dim :]
                _prepare(source, factors[1], epsilon, turn, np.float32(1), rows[0, :key_dim])
                _store_key(rows[0], past[0][:, place])
                source = projected[2][token, columns[2] + kv * value_dim :]
                _move(source, past[1][place // group, :value_dim, place % group])
            coming = spans[min(index + (kv + 1) // kv_heads, len(spans) - 1)][0]
            ahead = keys[coming, (kv + 1) % kv_heads], values[coming, (kv + 1) % kv_heads]
            # The queries of this kv head, all heads of a token and then the next token's, so many at a time.
            parts = (count * share + ROWS - 1) // ROWS
            for part in range(parts):
                begin, end = count * share * part // parts, count * share * (part + 1) // parts
                for row in range(begin, end):
                    token, head = first + row // share, kv * share + row % share
                    turn = rotation[0][token], rotation[1][token]
                    source = projected[0][token, columns[0] + head * key_dim :]
                    scale = scaling if attends else np.float32(1)
                    _prepare(source, factors[0], epsilon, turn, scale, rows[row - begin, :key_dim])
                    if not attends:
                        _move(rows[row - begin], output[token, head, :key_dim])
                if attends:
                    own_sinks = sinks[kv * share : (kv + 1) * share]
                    limits = start, begin, end, share, window
                    _attend_rows(past, ahead, limits, softcap, own_sinks, (rows, weights, sums))
                    ahead = past
                    for row in range(begin, end):
                        _move(sums[row - begin], output[first + row // share, kv * share + row % share])


@_jit_exactly
def _place(array: Any) -> Any:
    """The address of an array's first number and the distance of its rows, in bytes."""
    return np.int64(array.ctypes.data), np.int64(array.strides[0])


@_jit
def _attend_rows(
    past: tuple[Any, Any],
    ahead: tuple[Any, Any],
    limits: tuple[int, int, int, int, int],
    softcap: Any,
    sinks: Any,
    scratch: tuple[Any, Any, Any],
) -> None:
    """sums[i] = what query rows[i] gets from its slot's keys and values, for up to ROWS queries.

    past: K and V of one slot and kv head; ahead: others to fetch on the way. limits: where the span begins in
    its row, the first and the end of the queries among those of the span and kv head, how many of these a
    token has, and the window. scratch: rows, weights and those sums.
    """
    keys, values = past
    rows, weights, sums = scratch
    start, first, end, share, window = limits
    stop = start + (end - 1) // share + 1
    begin = max(start + first // share + 1 - window, 0) // COLUMNS * COLUMNS
    ahead_keys, ahead_values = _place(ahead[0])[0], _place(ahead[1])[0]
    address, step = _place(keys)
    target, target_step = _place(weights)
    for base in range(begin, stop, COLUMNS):  # lengths are whole multiples of these
        part, goal = (address + 4 * base, step), (target + 4 * base, target_step)
        near = ahead_keys + 4 * base
        _multiply(keys, end - first, COLUMNS, _place(rows), part, near, goal, len(keys))
    group = values.shape[2]
    low, high = begin // group, (stop + group - 1) // group
    for row in range(first, end):
        own_stop = start + row // share + 1
        sink = sinks[row % share] if len(sinks) else NO_SINK
        own = weights[row - first, : group * high]
        _softmax(own, begin, max(own_stop - window, 0), own_stop, softcap, sink)
    address, step = _place(values)
    source = target + 4 * begin, target_step
    target, target_step = _place(sums)
    for base in range(0, values.shape[1], COLUMNS):
        wide = min(COLUMNS, values.shape[1] - base)
        part, goal = (address + step * low + 4 * base, step), (target + 4 * base, target_step)
        near = ahead_values + step * low + 4 * base
        _multiply(values, end - first, wide, source, part, near, goal, high - low)


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
def _prepare(source: Any, factors: Any, epsilon: Any, turn: Any, scale: Any, head: Any) -> None:
    """One head of a token as it attends: head = rotated(normalised(source)) * scale.

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
    for d in range(width):
        head[d] *= scale


@_jit
def _softmax(weights: Any, begin: int, own_begin: int, own_stop: int, softcap: Any, sink: Any) -> None:
    """Scores -> the weights of own_begin to own_stop, with one more logit that carries no value.

    Zeros from `begin` to there, and after it.
    """
    row = weights[own_begin:own_stop]
    if softcap > 0:
        for j in range(len(row)):
            row[j] = np.tanh(row[j] / softcap) * softcap
    most = sink
    for j in range(len(row)):
        most = row[j] if row[j] > most else most
    total = np.float32(0)
    for j in range(len(row)):
        row[j] = _exp(row[j] - most)
    for j in range(len(row)):
        total += row[j]
    if sink != NO_SINK:
        total += _exp(sink - most)
    portion = np.float32(1) / total
    for j in range(len(row)):
        row[j] *= portion
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
    """output = silu(gates) * rows, where silu(x) = x / (1 + exp(-x)). both: [tokens, gates and rows]."""
    width = output.shape[1]
    for index in range(len(both)):
        gates, rows, result = both[index, :width], both[index, width:], output[index]
        for j in range(width):
            number = _widened(gates[j])
            power = _exp(-abs(number))
            share = (np.float32(1) if number >= 0 else power) / (np.float32(1) + power)
            result[j] = _narrowed(number * share * _widened(rows[j]), output)
