"""A time limit that the thread under it looks at: compiling stops itself, no thread is ever killed.

Code that may run long calls `check_deadline()` now and then; without a limit set it costs next to nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jfbatch.errors import GrammarTooLarge


class _Limit(threading.local):
    end: float | None = None
    seconds: float = 0.0


_limit = _Limit()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Within this block, in this thread, `check_deadline` raises once `seconds` have passed."""
    before = _limit.end, _limit.seconds
    _limit.end, _limit.seconds = time.monotonic() + seconds, seconds
    try:
        yield
    finally:
        _limit.end, _limit.seconds = before


def check_deadline() -> None:
    """Raise GrammarTooLarge if this thread's time is up."""
    if _limit.end is not None and time.monotonic() > _limit.end:
        raise GrammarTooLarge(f"compiling took longer than the limit of {_limit.seconds:g} s")
