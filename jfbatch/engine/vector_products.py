"""Products of a few rows with KV storage and with packed weights, as instructions for this machine's vectors.

LLVM, left to itself, keeps sums in memory or takes one vector at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic


def _features() -> set[str]:
    """What the machine has that numba compiles for: this one, but for what numba was told to leave out."""
    return set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def _registers() -> tuple[int, int, int]:
    """float32 numbers in a vector of this machine; of its registers, the rows of two sums each that they hold
    beside those in use, and the vectors of columns of which they hold six rows."""
    features = _features()
    if "+avx512f" in features:
        return 16, 9, 4
    return (8, 4, 2) if "+avx" in features else (4, 4, 2)


LANES, ROWS, _VECTORS = _registers()
COLUMNS = 2 * LANES
PANEL = 64  # columns of packed weights that lie side by side
TILE_COLUMNS = _VECTORS * LANES  # columns that `project` takes
TILE_ROWS = 6  # rows that it takes at most
HAS_DOTS = LANES == 16 and "+avx512bf16" in _features()
HAS_AMX = "+amx-bf16" in _features()  # which oneDNN uses, and nothing here does

_FLOAT, _INTEGER, _ADDRESS = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_INTEGER, LANES)
_SIXTEEN = ir.Constant(_WORDS, [16] * LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def multiply(context, storage, kind, rows, columns, factors, places, ahead, sums, terms):  # type: ignore[no-untyped-def]
    """sums[i, c] = sum of factors[i, t] * stored[t, c] over t, for up to ROWS rows and COLUMNS columns.

    storage: the array of which `stored` is a part, for its dtype; its terms lie in groups (kv_layout.py),
    and `terms` counts these. kind: an array of the factors' dtype. factors, places (of `stored`), sums: the
    address of the first number and the distance of two rows in bytes. columns: COLUMNS or half of it.
    ahead: an address; what lies there as `stored` does is brought into the second-level cache.

    All sums are in vector registers from the first term to the last, and each is taken in the order of its
    terms, by the same operations wherever its column and its row lie.
    """
    is_word = isinstance(storage.dtype, types.Integer), isinstance(kind.dtype, types.Integer)
    pair = numba.typeof((0, 0))

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, rows, columns, factors, places, ahead, sums, terms = arguments
        pairs = [builder.extract_value(part, i) for part in (factors, places, sums) for i in range(2)]
        end = builder.append_basic_block("end")
        key = builder.add(builder.mul(rows, _ADDRESS(1024)), columns)
        cases = builder.switch(key, end)
        for count in range(1, ROWS + 1):
            for vectors in (1, 2):
                block = builder.append_basic_block("case")
                cases.add_case(_ADDRESS(1024 * count + LANES * vectors), block)
                with builder.goto_block(block):
                    _emit_product(builder, count, vectors, is_word, pairs, ahead, terms)
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    numbers = types.intp, types.intp, pair, pair, types.intp, pair, types.intp
    return types.void(storage, kind, *numbers), generate


def _emit_product(
    builder: ir.IRBuilder,
    rows: int,
    vectors: int,
    is_word: tuple[bool, bool],
    pairs: list[Any],
    ahead: Any,
    terms: Any,
) -> None:
    """The instructions of `multiply` for so many rows, and vectors of columns.

    is_word: whether what is stored, and the factors, are bfloat16, two in a word.
    """
    factors, factors_step, places, places_step, sums, sums_step = pairs
    byte = ir.IntType(8)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), _INTEGER, _INTEGER, _INTEGER])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")

    pointer, row = partial(_pointer, builder), partial(_row, builder)
    totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(rows)]
    for total in (total for line in totals for total in line):
        builder.store(ir.Constant(_VECTOR, None), total)
    with cgutils.for_range(builder, terms) as loop:
        columns = []
        for vector in range(vectors):
            offset = 4 * LANES * vector
            near = pointer(row(ahead, places_step, loop.index), offset, byte)
            how = _INTEGER(0), _INTEGER(2), _INTEGER(1)  # to read, second level, data
            builder.call(prefetch, [near, *how])
            words = builder.load(pointer(row(places, places_step, loop.index), offset, _WORDS), align=4)
            columns.append([words] if is_word[1] else _widened_words(builder, words, is_word[0]))
        members = len(columns[0])
        for i in range(rows):
            own = row(row(factors, factors_step, _ADDRESS(i)), _ADDRESS(4 * members), loop.index)
            for member in range(members):
                factor = _in_every_lane(builder, builder.load(pointer(own, 4 * member, _INTEGER)))
                for vector in range(vectors):
                    total = builder.load(totals[i][vector])
                    added = _added(builder, total, factor, columns[vector][member], is_word[1])
                    builder.store(added, totals[i][vector])
    for i in range(rows):
        for vector in range(vectors):
            place = pointer(row(sums, sums_step, _ADDRESS(i)), 4 * LANES * vector, _VECTOR)
            builder.store(builder.load(totals[i][vector]), place, align=4)


@intrinsic
def project(context, packed, rows, factors, weights, terms, start, output, accumulate):  # type: ignore[no-untyped-def]
    """output[i, c] = start[c] + sum of factors[i, t] * weights[t, c] over t, for up to TILE_ROWS rows.

    packed: the array of which `weights` is a part, [terms / group, PANEL, group]; factors and output are of
    its dtype. There are TILE_COLUMNS columns. factors, output: the address of the first number and the
    distance of two rows in bytes; weights, start (float32): the address of the first number. terms: groups of
    them. accumulate: whether what the output holds is added.

    All sums are in vector registers from the first term to the last, and each is taken in the order of its
    terms, by the same operations wherever its column and its row lie.
    """
    is_word = isinstance(packed.dtype, types.Integer)
    pair = numba.typeof((0, 0))

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, rows, factors, weights, terms, start, output, accumulate = arguments
        places = [builder.extract_value(part, i) for part in (factors, output) for i in range(2)]
        end = builder.append_basic_block("end")
        cases = builder.switch(rows, end)
        for count in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block("case")
            cases.add_case(_ADDRESS(count), block)
            with builder.goto_block(block):
                totals = _emit_projection(builder, count, is_word, places[:2], weights, terms, start)
                _emit_results(builder, totals, is_word, places[2:], accumulate)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    numbers = types.intp, pair, types.intp, types.intp, types.intp, pair, types.boolean
    return types.void(packed, *numbers), generate


def _emit_projection(
    builder: ir.IRBuilder, rows: int, is_word: bool, factors: list[Any], weights: Any, terms: Any, start: Any
) -> list[list[Any]]:
    """The instructions of `project` for so many rows, as far as its sums: where they are, of each row.

    is_word: whether what is multiplied is bfloat16, two in a word.
    """
    pointer, row = partial(_pointer, builder), partial(_row, builder)
    totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(_VECTORS)] for _ in range(rows)]
    for vector in range(_VECTORS):
        first = builder.load(pointer(start, 4 * LANES * vector, _VECTOR), align=4)
        for line in totals:
            builder.store(first, line[vector])
    with cgutils.for_range(builder, terms) as loop:
        here = row(weights, _ADDRESS(4 * PANEL), loop.index)
        loaded = [builder.load(pointer(here, 4 * LANES * v, _WORDS), align=4) for v in range(_VECTORS)]
        columns = [_to_multiply(builder, words, is_word) for words in loaded]
        for i, line in enumerate(totals):
            own = row(row(factors[0], factors[1], _ADDRESS(i)), _ADDRESS(4), loop.index)
            word = _in_every_lane(builder, builder.load(pointer(own, 0, _INTEGER), align=4))
            for member, factor in enumerate(_to_multiply(builder, word, is_word)):
                for column, total in zip(columns, line, strict=True):
                    held = builder.load(total)
                    builder.store(_added(builder, held, factor, column[member], is_word and HAS_DOTS), total)
    return totals


def _emit_results(
    builder: ir.IRBuilder, totals: list[list[Any]], is_word: bool, output: list[Any], accumulate: Any
) -> None:
    """Store the sums of rows, as bfloat16 if `is_word`, on top of what is there if `accumulate`."""
    width, kind = (2, _HALVES) if is_word else (4, _VECTOR)
    for i, line in enumerate(totals):
        own = _row(builder, output[0], output[1], _ADDRESS(i))
        for vector, total in enumerate(line):
            place = _pointer(builder, own, width * LANES * vector, kind)
            with builder.if_then(accumulate):
                held = builder.load(place, align=width)
                if is_word:
                    held = builder.bitcast(builder.shl(builder.zext(held, _WORDS), _SIXTEEN), _VECTOR)
                builder.store(builder.fadd(builder.load(total), held), total)
            number = builder.load(total)
            builder.store(_rounded(builder, number) if is_word else number, place, align=width)


def _to_multiply(builder: ir.IRBuilder, words: Any, is_word: bool) -> list[Any]:
    """A vector's words as the machine multiplies them: both numbers of one at once, or one by one."""
    return [words] if is_word and HAS_DOTS else _widened_words(builder, words, is_word)


def _rounded(builder: ir.IRBuilder, numbers: Any) -> Any:
    """float32 -> bfloat16, to the nearest, ties to even."""
    bits = builder.bitcast(numbers, _WORDS)
    last = builder.and_(builder.lshr(bits, _SIXTEEN), ir.Constant(_WORDS, [1] * LANES))
    raised = builder.add(builder.add(bits, ir.Constant(_WORDS, [0x7FFF] * LANES)), last)
    return builder.trunc(builder.lshr(raised, _SIXTEEN), _HALVES)


def _pointer(builder: ir.IRBuilder, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, _ADDRESS(offset)), kind.as_pointer())


def _row(builder: ir.IRBuilder, address: Any, step: Any, index: Any) -> Any:
    return builder.add(address, builder.mul(step, index))


def _added(builder: ir.IRBuilder, total: Any, factor: Any, column: Any, is_word: bool) -> Any:
    """total + factor * column, all of them vectors; of words the sum of both products."""
    if is_word:
        kind = ir.FunctionType(_VECTOR, [_VECTOR, _WORDS, _WORDS])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(dot, [total, factor, column])
    product = builder.fmul(builder.bitcast(factor, _VECTOR), column, flags=("contract",))
    return builder.fadd(total, product, flags=("contract",))


def _widened_words(builder: ir.IRBuilder, words: Any, grouped: bool) -> list[Any]:
    """Vectors of float32: of the lower and of the upper bfloat16 of each word, or of the word itself."""
    if not grouped:
        return [builder.bitcast(words, _VECTOR)]
    lower = builder.shl(words, _SIXTEEN)
    upper = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    return [builder.bitcast(half, _VECTOR) for half in (lower, upper)]


def _in_every_lane(builder: ir.IRBuilder, word: Any) -> Any:
    nothing = ir.Constant(_WORDS, ir.Undefined)
    first = builder.insert_element(nothing, word, _INTEGER(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_WORDS, [0] * LANES))
