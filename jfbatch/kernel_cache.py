"""Kernels that numba compiles: kept on disk where that can be, compiled at every start where it cannot.

A home that is full or read-only, as on the nodes of some clusters, costs time then, and not the run.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import serialize

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

logger = logging.getLogger("jfbatch")
# What a full or vanished disk raises, and what it left after a crash.
_TROUBLE = (OSError, EOFError, serialize.pickle.UnpicklingError)
_told: list[str] = []


def kept_under_the_source_of(directory: Path, *modules: str) -> Path:
    """Where kernels are kept that call each other: a directory named by the source of their modules.

    numba looks only at the file of a function, not at those of the functions it calls, and would go on
    using a caller compiled with an older callee.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in modules:
        digest.update((directory / f"{name}.py").read_bytes())
    return directory / "__pycache__" / f"kernels-{digest.hexdigest()[:16]}"


def compiled(function: Kernel, kept: Path | None = None, **options: Any) -> Kernel:
    """`function` compiled on its first call, without the GIL.

    kept: the directory for it; or one of its name, in $NUMBA_CACHE_DIR where that is set, else in the user's
    cache where nothing can be written. None: what numba chooses. options: of numba.njit.
    """
    given = numba.config.CACHE_DIR
    if kept is not None:
        numba.config.CACHE_DIR = _place_of(kept, given)
    try:
        return _compiled(function, options)
    finally:
        numba.config.CACHE_DIR = given


@cache
def _place_of(kept: Path, given: str) -> str:
    """The first of the places for `kept` that can be written to; "" where there is none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [kept, Path(home) / "jfbatch" / kept.name]
    for place in [Path(given) / kept.name, *places] if given else places:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK):
                return str(place)
    return ""


def _compiled(function: Kernel, options: dict[str, Any]) -> Kernel:
    try:
        kernel: Kernel = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError as error:  # numba has found no directory to write to
        _tell(error)
        in_memory: Kernel = numba.njit(nogil=True, **options)(function)
        return in_memory
    on_disk = getattr(kernel, "_cache", None)  # there is none where NUMBA_DISABLE_JIT is set
    if on_disk is not None:
        on_disk.load_overload = _unless_the_disk_refuses(on_disk.load_overload)
        on_disk.save_overload = _unless_the_disk_refuses(on_disk.save_overload)
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
