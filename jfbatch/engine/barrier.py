"""Where compiled threads wait for each other, as they do between two layers: by looking, for microseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from jfbatch.kernel_cache import compiled, kept_under_the_source_of

# How often a thread looks before it lets others run in its place.
_PATIENCE = 4000
_APART = 8  # numbers of a cache line
_LONG = ir.IntType(64)


class Barrier:
    """Counts arrivals, for one call of a kernel by several threads."""

    def __init__(self) -> None:
        self.numbers: NDArray[np.int64] = np.zeros(2 * _APART, np.int64)

    def abort(self) -> None:
        """Let those who wait go, and tell them that it is broken."""
        self.numbers[_APART] = 1


@intrinsic
def _arrive(context, address):  # type: ignore[no-untyped-def]
    """Add one to the number there, so that others see all that was written before."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(arguments[0], _LONG.as_pointer())
        builder.atomic_rmw("add", place, _LONG(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def _load(context, address):  # type: ignore[no-untyped-def]
    """The number there, as others have left it."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(address), generate


@intrinsic
def _let_others_run(context):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _wait(numbers: Any, expected: Any) -> bool:
    """Arrive, and wait until `expected` have arrived in all. False where it was aborted.

    numbers: a Barrier's.
    """
    address = np.int64(numbers.ctypes.data)
    _arrive(address)
    looks = 0
    while _load(address) < expected:
        if _load(address + 8 * _APART) != 0:
            return False
        looks += 1
        if looks > _PATIENCE:
            _let_others_run()
    return True


wait = compiled(_wait, kept_under_the_source_of(Path(__file__).parent, "barrier"))
