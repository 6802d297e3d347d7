"""Kernels that numba compiles: kept on disk where that can be, compiled at every start where it cannot.

A home that is full or read-only, as on the nodes of some clusters, costs time then, and not the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import serialize

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

logger = logging.getLogger("jfbatch")
# What a full or vanished disk raises, and what it left after a crash.
_TROUBLE = (OSError, EOFError, serialize.pickle.UnpicklingError)
_told: list[str] = []


def compiled(function: Kernel, **options: Any) -> Kernel:
    """`function` compiled on its first call, without the GIL; `options` are those of numba.njit."""
    try:
        kernel: Kernel = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError as error:  # numba has found no directory to write to
        _tell(error)
        in_memory: Kernel = numba.njit(nogil=True, **options)(function)
        return in_memory
    cache = getattr(kernel, "_cache", None)  # there is none where NUMBA_DISABLE_JIT is set
    if cache is not None:
        cache.load_overload = _unless_the_disk_refuses(cache.load_overload)
        cache.save_overload = _unless_the_disk_refuses(cache.save_overload)
    return kernel


def _unless_the_disk_refuses(action: Callable[..., Any]) -> Callable[..., Any]:
    """The action; None where the disk refuses it, as the kernel is in memory all the same."""

    def guarded(*arguments: Any) -> Any:
        try:
            return action(*arguments)
        except _TROUBLE as error:
            _tell(error)
            return None

    return guarded


def _tell(error: Exception) -> None:
    """Say so, once in a process."""
    if not _told:
        _told.append(" ".join(str(error).split()))
        logger.warning(
            "compiled kernels cannot be kept (%s): they are compiled at every start, for up to a minute; "
            "NUMBA_CACHE_DIR may name a directory that can be written",
            *_told,
        )
