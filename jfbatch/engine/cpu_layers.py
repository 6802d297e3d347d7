"""All decoder layers of a step on a CPU in one call of each thread.

Between two layers nothing is left to Python, nor to threads that must be woken: each does its share of the
columns, or of the rows where there are many, and they wait for each other five times a layer (barrier.py).
How a row's numbers are computed does not depend on how the work is shared.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from jfbatch.engine.barrier import wait
from jfbatch.engine.cpu_kernels import attend, gate_row, normalise, place_of
from jfbatch.engine.vector_products import PANEL, TILE_COLUMNS, TILE_ROWS, project
from jfbatch.kernel_cache import Kernel, compiled, kept_under_the_source_of

# Rows whose numbers stay in the second-level cache while the weights pass by.
BLOCK = 21 * TILE_ROWS
# Where each thread gets so many rows, it does not need a share of the columns to be busy.
_BY_ROWS = 48
_LONG = ir.IntType(64)

_KEPT = kept_under_the_source_of(
    Path(__file__).parent, "vector_products", "barrier", "cpu_kernels", "cpu_layers"
)

PARTS = ("norm", "linear", "attention", "gated linear", "waiting")
"""What the time of a call goes to."""
_NORM, _LINEAR, _ATTENTION, _GATED, _WAITING, _SINCE, _MET = range(len(PARTS) + 2)


class Panels(NamedTuple):
    """A linear layer of every decoder layer. What is bfloat16 comes as uint16, in pairs of terms."""

    weights: Any  # [layers, panels, terms / group, PANEL, group]
    biases: Any  # float32 [layers, columns]


class Layers(NamedTuple):
    """What the decoder layers are made of."""

    qkv: Panels
    output: Panels
    gated: Panels  # panels of gates and of what they gate, in turn
    down: Panels
    norms: Any  # float32 [layers, 2, width]: before attention, before the gates
    query_norms: Any  # float32 [layers, head dim or 0]
    key_norms: Any
    epsilons: Any  # float32 [layers, 3]: of these, the last for Q and K
    scaling: Any  # float32 [layers]
    windows: Any  # int64 [layers]
    softcaps: Any  # float32 [layers]
    sinks: Any  # float32 [0]: none


class Step(NamedTuple):
    """What the threads of a step share."""

    rows: Any  # [tokens, width]: what goes through the layers
    projected: Any  # [tokens, Q K V]
    attended: Any  # [tokens, heads, head dim]
    inner: Any  # [tokens, gates]
    cosines: Any  # float32 [tokens, head dim]
    sines: Any
    keys: Any  # of one layer, for their kind and shape
    values: Any
    addresses: Any  # int64 [layers, 2]: where K and V of each are
    wanted: Any  # int64, ascending: the tokens that are of interest after the last layer
    barrier: Any  # the numbers of a Barrier


class Worker(NamedTuple):
    """One of the threads, and what is its worker."""

    member: int  # which of them it is
    members: int
    spans: Any  # as `attend` has them
    normed: Any  # [tokens, width]
    both: Any  # [BLOCK, 2 * PANEL]
    spent: Any  # int64 [PARTS + 2]: nanoseconds of each, then when the last one ended, and how often all met


def _jit(function: Kernel) -> Kernel:
    return compiled(function, _KEPT, error_model="numpy")


@intrinsic
def _numbers_at(context, address, like):  # type: ignore[no-untyped-def]
    """A pointer to numbers of the kind that the array `like` holds."""
    kind = types.CPointer(like.dtype)  # type: ignore[attr-defined]

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(address, like), generate


@intrinsic
def _now(context):  # type: ignore[no-untyped-def]
    """Nanoseconds of a clock that only goes forward."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pair = ir.ArrayType(_LONG, 2)
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), pair.as_pointer()])
        read = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        place = cgutils.alloca_once(builder, pair)
        builder.call(read, [ir.IntType(32)(time.CLOCK_MONOTONIC), place])
        seconds, rest = (builder.extract_value(builder.load(place), index) for index in range(2))
        return builder.add(builder.mul(seconds, _LONG(1_000_000_000)), rest)

    return types.int64(), generate


@_jit
def _spend(worker: Worker, part: int) -> None:
    """Count the time since the last part for this one."""
    now = _now()
    worker.spent[part] += now - worker.spent[_SINCE]
    worker.spent[_SINCE] = now


@_jit
def _meet(step: Step, worker: Worker) -> bool:
    """Wait for all threads. False where another one gave up."""
    worker.spent[_MET] += worker.members
    all_here = worker.members == 1 or wait(step.barrier, worker.spent[_MET])
    _spend(worker, _WAITING)
    return all_here


@_jit
def _share(count: int, member: int, members: int) -> Any:
    return count * member // members, count * (member + 1) // members


@_jit
def _work(count: int, worker: Worker) -> Any:
    """What of a linear layer of so many rows is this thread's, as `linear` takes it."""
    if count >= _BY_ROWS * worker.members:
        first, end = _share(count, worker.member, worker.members)
        return first, end, 0, 1
    return 0, count, worker.member, worker.members


@_jit
def linear(weights: Any, biases: Any, inputs: Any, output: Any, work: Any, accumulate: bool) -> None:
    """A thread's share of output = inputs W^T + biases, on top of what it holds if `accumulate`.

    weights, biases: a layer's of Panels; inputs [tokens, terms], output [tokens, columns]. work: the first
    and the end of the rows, which share of the panels is meant, and of how many.
    """
    first, last = _share(len(weights), work[2], work[3])
    for base in range(work[0], work[1], BLOCK):
        end = min(base + BLOCK, work[1])
        for panel in range(first, last):
            column = PANEL * panel
            _panel(inputs[base:end], weights[panel], biases[column:], output[base:end, column:], accumulate)


@_jit
def _panel(inputs: Any, weights: Any, biases: Any, output: Any, accumulate: bool) -> None:
    """`linear` for all rows and one panel."""
    first, row = place_of(inputs)
    result, step = place_of(output)
    for few in range(0, len(inputs), TILE_ROWS):
        factors = first + few * row, row
        for column in range(0, PANEL, TILE_COLUMNS):
            goal = result + few * step + column * output.itemsize, step
            place, start = place_of(weights)[0] + 4 * column, place_of(biases)[0] + 4 * column
            count = min(TILE_ROWS, len(inputs) - few)
            project(weights, count, factors, place, len(weights), start, goal, accumulate)


@_jit
def _gate(weights: Any, biases: Any, inputs: Any, output: Any, work: Any, both: Any) -> None:
    """A thread's share of output = silu(gates) * numbers, whose panels a linear layer has in turn.

    As `linear`; both: scratch [BLOCK, 2 * PANEL].
    """
    first, last = _share(len(weights) // 2, work[2], work[3])
    for base in range(work[0], work[1], BLOCK):
        end = min(base + BLOCK, work[1])
        for panel in range(first, last):
            for half in range(2):
                source = 2 * panel + half
                bias, target = biases[PANEL * source :], both[: end - base, PANEL * half :]
                _panel(inputs[base:end], weights[source], bias, target, False)
            for row in range(end - base):
                place = place_of(output[base + row :, PANEL * panel :])[0]
                goal = numba.carray(_numbers_at(place, output), (PANEL,))
                gate_row(both[row, :PANEL], both[row, PANEL:], goal)


@_jit
def _attend(layers: Layers, step: Step, worker: Worker, layer: int) -> None:
    """Store K and V of this thread's spans and let them attend: projected -> attended."""
    heads, head_dim = step.attended.shape[1], step.attended.shape[2]
    kv_heads = step.keys.shape[1]
    attend(
        (step.projected, step.projected, step.projected),
        (np.int64(0), heads * head_dim, (heads + kv_heads) * head_dim),
        (step.cosines, step.sines),
        (layers.query_norms[layer], layers.key_norms[layer]),
        layers.epsilons[layer, 2],
        head_dim,
        numba.carray(_numbers_at(step.addresses[layer, 0], step.keys), step.keys.shape),
        numba.carray(_numbers_at(step.addresses[layer, 1], step.values), step.values.shape),
        worker.spans,
        layers.scaling[layer],
        layers.windows[layer],
        layers.softcaps[layer],
        layers.sinks,
        step.attended,
    )


@_jit
def _before_attention(layers: Layers, step: Step, worker: Worker, layer: int) -> bool:
    """The first half of a layer: norm, Q K V, attention. False where another thread gave up."""
    work = _work(len(step.rows), worker)
    part = slice(work[0], work[1])
    normalise(layers.norms[layer, 0], layers.epsilons[layer, 0], step.rows[part], worker.normed[part])
    _spend(worker, _NORM)
    linear(layers.qkv.weights[layer], layers.qkv.biases[layer], worker.normed, step.projected, work, False)
    _spend(worker, _LINEAR)
    if not _meet(step, worker):
        return False
    _attend(layers, step, worker, layer)
    _spend(worker, _ATTENTION)
    return _meet(step, worker)


@_jit
def _after_attention(layers: Layers, step: Step, worker: Worker, layer: int, count: int) -> bool:
    """The second half: output + rows, norm, gates, down + rows; for so many rows. False as above."""
    work = _work(count, worker)
    part = slice(work[0], work[1])
    linear(layers.output.weights[layer], layers.output.biases[layer], _flat(step), step.rows, work, True)
    _spend(worker, _LINEAR)
    if not _meet(step, worker):
        return False
    normalise(layers.norms[layer, 1], layers.epsilons[layer, 1], step.rows[part], worker.normed[part])
    _spend(worker, _NORM)
    _gate(
        layers.gated.weights[layer], layers.gated.biases[layer], worker.normed, step.inner, work, worker.both
    )
    _spend(worker, _GATED)
    if not _meet(step, worker):
        return False
    linear(layers.down.weights[layer], layers.down.biases[layer], step.inner, step.rows, work, True)
    _spend(worker, _LINEAR)
    return _meet(step, worker)


@_jit
def _flat(step: Step) -> Any:
    """What was attended, [tokens, heads * head dim]."""
    return step.attended.reshape((len(step.rows), step.attended.shape[1] * step.attended.shape[2]))


@_jit
def _keep_wanted(step: Step) -> None:
    """The rows that are wanted, in front of all others."""
    for numbers in (step.rows, _flat(step)):
        for place in range(len(step.wanted)):
            for column in range(numbers.shape[1]):
                numbers[place, column] = numbers[step.wanted[place], column]


@_jit
def run_layers(layers: Layers, step: Step, worker: Worker, first: int, end: int) -> bool:
    """Take a step's rows through layers, in place. False where another thread gave up.

    first, end: a range of halves of layers. What comes after the attention of the last layer is computed for
    what is `wanted` alone, which ends in the first rows. Every thread calls it as its worker, and for what
    follows of the same step as the same.
    """
    worker.spent[_SINCE] = _now()
    count, last = len(step.rows), 2 * len(layers.epsilons) - 1
    for half in range(first, end):
        if half % 2 == 0:
            if not _before_attention(layers, step, worker, half // 2):
                return False
            continue
        if half == last and len(step.wanted) < count:
            count = len(step.wanted)
            if worker.member == 0:
                _keep_wanted(step)
            if not _meet(step, worker):
                return False
        if not _after_attention(layers, step, worker, half // 2, count):
            return False
    return True
