"""What runs compiled on a CPU: attention, normalisation, gates. All in one file, because numba, which keeps
compiled functions on disk, looks at the file of a function only and not at those of the ones it calls.

Storage is bfloat16 (as uint16) or float32, arithmetic float32, and every row of the output is computed
from its own row of the input alone, in one order: it does not depend on what shares its step.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from jfbatch.kernel_cache import Kernel, compiled

NO_SINK = np.float32(-3e38)

# Positions scored in one go, for four queries: 8 KiB, which stay in the first-level cache. Also the
# largest head dimension.
BLOCK = 512

# Unsigned, because numba makes a signed index that may be negative wrap round, which ends vectorising;
# and distances known when compiling, because else every two arrays might overlap.
_U = np.uint64
_U0, _U1, _U2, _U3 = _U(0), _U(BLOCK), _U(2 * BLOCK), _U(3 * BLOCK)

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


@intrinsic
def _prefetch_line(context, address):  # type: ignore[no-untyped-def]  # numba's own calling convention
    """Ask for the cache line at an address to be brought into the second-level cache; never faults."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.inttoptr(arguments[0], pointer)
        read, second_level, data = (ir.Constant(number, constant) for constant in (0, 2, 1))
        builder.call(function, [place, read, second_level, data])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


@_jit_exactly
def _fetch(rows: Any, done: int, whole: int) -> None:
    """Prefetch the rows of a matrix that come up after `done` of `whole` units of other work, by fours."""
    for row in range(len(rows) * done // whole, len(rows) * (done + 4) // whole):
        address = _U(rows[row].ctypes.data)
        for offset in range(_U0, _U(rows.shape[1] * rows.itemsize), _U(64)):
            _prefetch_line(address + offset)


@_jit_exactly
def _share_of(rows: Any, index: int, count: int) -> Any:
    """The rows of a matrix that are the index-th of `count` shares."""
    return rows[len(rows) * index // count : len(rows) * (index + 1) // count]


@_jit
def attend(
    projected: tuple[Any, Any, Any],  # Q, K and V: [tokens, columns], as the model computes
    columns: tuple[int, int, int],  # where in these the heads begin
    rotation: tuple[NDArray[np.float32], NDArray[np.float32]],  # cosines, sines [tokens, head dim or 0]
    factors: tuple[NDArray[np.float32], NDArray[np.float32]],  # of the norms of Q and K: [head dim] or empty
    epsilon: np.float32,
    keys: Any,  # [slots, kv heads, head dim, length]
    values: Any,  # [slots, kv heads, length, value dim]
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
    kv_heads, key_dim = keys.shape[1], keys.shape[2]
    share = output.shape[1] // kv_heads
    rows = np.empty((4, key_dim), np.float32)
    scores = np.empty(4 * BLOCK, np.float32)
    weights = np.empty((4, keys.shape[3] + 4), np.float32)
    sums = np.empty(4 * BLOCK, np.float32)
    for index in range(len(spans)):
        slot, start, first, count, attends = spans[index]
        for kv in range(kv_heads):
            past_keys, past_values = keys[slot, kv], values[slot, kv]
            for token in range(first, first + count):
                place = start + token - first
                turn = rotation[0][token], rotation[1][token]
                source = projected[1][token, columns[1] + kv * key_dim :]
                _prepare(source, factors[1], epsilon, turn, np.float32(1), rows[0])
                _move(rows[0], past_keys[:, place])
                _move(projected[2][token, columns[2] + kv * values.shape[3] :], past_values[place])
            next_keys, next_values = past_keys[:0], past_values[:0]
            if kv + 1 < kv_heads or index + 1 < len(spans):
                coming = spans[index if kv + 1 < kv_heads else index + 1]
                low, high = max(coming[1] + 1 - window, 0), coming[1] + coming[3]
                next_keys = keys[coming[0], (kv + 1) % kv_heads][:, low:high]
                next_values = values[coming[0], (kv + 1) % kv_heads][low:high]
            # The queries of this kv head, all heads of a token and then the next token's, by fours;
            # what is missing to four repeats the last one.
            groups = (count * share + 3) // 4
            for group in range(groups):
                last = min(4 * group + 3, count * share - 1)
                for i in range(4):
                    row = min(4 * group + i, last)
                    token, head = first + row // share, kv * share + row % share
                    turn = rotation[0][token], rotation[1][token]
                    source = projected[0][token, columns[0] + head * key_dim :]
                    scale = scaling if attends else np.float32(1)
                    _prepare(source, factors[0], epsilon, turn, scale, rows[i])
                    if not attends:
                        _move(rows[i], output[token, head, :key_dim])
                if attends:
                    own_sinks = sinks[kv * share : (kv + 1) * share]
                    ahead = _share_of(next_keys, group, groups), _share_of(next_values, group, groups)
                    limits = start, 4 * group, last, share, window
                    scratch = scores, weights, sums
                    _attend_four(rows, past_keys, past_values, limits, softcap, own_sinks, ahead, scratch)
                    for row in range(4 * group, last + 1):
                        token, head = first + row // share, kv * share + row % share
                        _move(sums[row % 4 * BLOCK : (row % 4 + 1) * BLOCK], output[token, head])


@_jit
def _attend_four(
    rows: Any,
    keys: Any,
    values: Any,
    limits: tuple[int, int, int, int, int],
    softcap: Any,
    sinks: Any,
    ahead: tuple[Any, Any],
    scratch: tuple[Any, Any, Any],
) -> None:
    """sums[i * BLOCK + d] = what query rows[i] gets from its slot's keys and values, for four queries.

    limits: where the span begins in its row, the first and the last of the queries among those of the span
    and kv head, how many of these a token has, and the window. ahead: two matrices to fetch on the way.
    scratch: scores, weights and those sums.
    """
    scores, weights, sums = scratch
    start, first, last, share, window = limits
    stop = start + last // share + 1
    begin = max(start + first // share + 1 - window, 0) // 4 * 4
    next_keys, next_values = ahead
    for base in range(begin, stop, BLOCK):
        size = min(BLOCK, stop - base)
        _score(rows, keys, base, size, scores, next_keys)
        next_keys = next_keys[:0]
        for i in range(4):
            weights[i, base : base + size] = scores[i * BLOCK : i * BLOCK + size]
    for i in range(4):
        row = min(first + i, last)
        own_stop = start + row // share + 1
        sink = sinks[row % share] if len(sinks) else NO_SINK
        _softmax(weights[i], begin, max(own_stop - window, 0), own_stop, softcap, sink)
    for i in range(4):
        sums[i * BLOCK : i * BLOCK + values.shape[1]] = 0
    _add_values(weights, values, begin, (stop + 3) // 4 * 4, sums, next_values)


@_jit_in_order
def _move(source: Any, target: Any) -> None:
    """Fill `target` with the beginning of `source`, in its own kind of number."""
    for d in range(len(target)):
        target[d] = _narrowed(_widened(source[d]), target)


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


@_jit_in_order
def _score(rows: Any, keys: Any, base: int, size: int, scores: Any, ahead: Any) -> None:
    """scores[i * BLOCK + j] = rows[i] . keys[:, base + j] for four rows and `size` positions.

    Product after product is added, so that there is one way only to fuse them: `size` decides which
    positions are computed by vectors and which one by one, and both must round alike.

    Fetches `ahead` on the way.
    """
    columns = _U(size)
    for j in range(columns):
        scores[j] = 0
        scores[_U1 + j] = 0
        scores[_U2 + j] = 0
        scores[_U3 + j] = 0
    whole = keys.shape[0] // 4 * 4
    for d in range(0, whole, 4):
        _fetch(ahead, d, whole)
        p0, p1, p2, p3 = rows[0, d], rows[0, d + 1], rows[0, d + 2], rows[0, d + 3]
        q0, q1, q2, q3 = rows[1, d], rows[1, d + 1], rows[1, d + 2], rows[1, d + 3]
        r0, r1, r2, r3 = rows[2, d], rows[2, d + 1], rows[2, d + 2], rows[2, d + 3]
        s0, s1, s2, s3 = rows[3, d], rows[3, d + 1], rows[3, d + 2], rows[3, d + 3]
        keys0, keys1 = keys[d, base : base + size], keys[d + 1, base : base + size]
        keys2, keys3 = keys[d + 2, base : base + size], keys[d + 3, base : base + size]
        for j in range(columns):
            k0, k1, k2, k3 = _widened(keys0[j]), _widened(keys1[j]), _widened(keys2[j]), _widened(keys3[j])
            scores[j] = (((scores[j] + p0 * k0) + p1 * k1) + p2 * k2) + p3 * k3
            scores[_U1 + j] = (((scores[_U1 + j] + q0 * k0) + q1 * k1) + q2 * k2) + q3 * k3
            scores[_U2 + j] = (((scores[_U2 + j] + r0 * k0) + r1 * k1) + r2 * k2) + r3 * k3
            scores[_U3 + j] = (((scores[_U3 + j] + s0 * k0) + s1 * k1) + s2 * k2) + s3 * k3
    for d in range(whole, keys.shape[0]):
        keys0 = keys[d, base : base + size]
        p0, q0, r0, s0 = rows[0, d], rows[1, d], rows[2, d], rows[3, d]
        for j in range(columns):
            k0 = _widened(keys0[j])
            scores[j] += p0 * k0
            scores[_U1 + j] += q0 * k0
            scores[_U2 + j] += r0 * k0
            scores[_U3 + j] += s0 * k0


@_jit
def _softmax(weights: Any, begin: int, own_begin: int, own_stop: int, softcap: Any, sink: Any) -> None:
    """Scores -> the weights of own_begin to own_stop, with one more logit that carries no value.

    Zeros from `begin` to there, and after it up to the next multiple of four.
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
    weights[own_stop : (own_stop + 6) // 4 * 4] = 0


@_jit_in_order
def _add_values(weights: Any, values: Any, begin: int, end: int, sums: Any, ahead: Any) -> None:
    """sums[i * BLOCK + d] += weights[i, j] * values[j, d] for four rows, four positions at a time.

    Fetches `ahead` on the way.
    """
    columns = _U(values.shape[1])
    for j in range(begin, end, 4):
        _fetch(ahead, j - begin, end - begin)
        p0, p1, p2, p3 = weights[0, j], weights[0, j + 1], weights[0, j + 2], weights[0, j + 3]
        q0, q1, q2, q3 = weights[1, j], weights[1, j + 1], weights[1, j + 2], weights[1, j + 3]
        r0, r1, r2, r3 = weights[2, j], weights[2, j + 1], weights[2, j + 2], weights[2, j + 3]
        s0, s1, s2, s3 = weights[3, j], weights[3, j + 1], weights[3, j + 2], weights[3, j + 3]
        values0, values1, values2, values3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        for d in range(columns):
            v0, v1 = _widened(values0[d]), _widened(values1[d])
            v2, v3 = _widened(values2[d]), _widened(values3[d])
            sums[d] = (((sums[d] + p0 * v0) + p1 * v1) + p2 * v2) + p3 * v3
            sums[_U1 + d] = (((sums[_U1 + d] + q0 * v0) + q1 * v1) + q2 * v2) + q3 * v3
            sums[_U2 + d] = (((sums[_U2 + d] + r0 * v0) + r1 * v1) + r2 * v2) + r3 * v3
            sums[_U3 + d] = (((sums[_U3 + d] + s0 * v0) + s1 * v1) + s2 * v2) + s3 * v3


@_jit
def normalise(rows: Any, weight: NDArray[np.float32], epsilon: np.float32, output: Any) -> None:
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


@_jit_exactly
def best_allowed(
    logits: NDArray[np.float32],  # [positions, vocabulary]
    bits: NDArray[np.uint32],  # the same memory
    positions: NDArray[np.int64],  # [rows], indices into logits
    masks: NDArray[np.uint32],  # [rows, words]
    token_ids: NDArray[np.int64],  # [rows], out: the first best allowed token, -1 if none is above -inf
    faults: NDArray[np.bool_],  # [rows], out: whether an allowed logit is no number
) -> None:
    """Masked argmax: 32 running maxima, one per bit of a mask word; about 8 us a row of 50,000 logits."""
    width = logits.shape[1]
    best = np.empty(32, np.float32)
    where = np.empty(32, np.int32)
    wrong = np.empty(32, np.uint32)
    for index in range(len(positions)):
        row, raw, mask = logits[positions[index]], bits[positions[index]], masks[index]
        best[:] = -np.inf
        where[:] = -1
        wrong[:] = 0
        for word in range(min(len(mask), (width + 31) // 32)):
            allowed = mask[word]
            if allowed == 0:
                continue
            numbers, codes = row[32 * word : 32 * word + 32], raw[32 * word : 32 * word + 32]
            if len(numbers) == 32:
                for j in range(32):
                    may = (allowed >> np.uint32(j)) & np.uint32(1)
                    wrong[j] |= may & np.uint32((codes[j] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000))
                    better = (may != 0) & (numbers[j] > best[j])
                    best[j] = numbers[j] if better else best[j]
                    where[j] = word if better else where[j]
            else:  # the vocabulary ends within this word
                for j in range(len(numbers)):
                    if (allowed >> np.uint32(j)) & np.uint32(1):
                        wrong[j] |= np.uint32(np.isnan(numbers[j]))
                        if numbers[j] > best[j]:
                            best[j] = numbers[j]
                            where[j] = word
        top = np.max(best)
        token = np.int64(-1)
        for j in range(32):
            if where[j] >= 0 and best[j] == top:
                found = np.int64(where[j]) * 32 + j
                token = found if token < 0 or found < token else token
        token_ids[index] = token
        faults[index] = np.any(wrong) or top == np.inf
