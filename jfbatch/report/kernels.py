"""A word on the wait of a first start: numba compiles what it has no copy of, for up to a minute.

numba tells when it really compiles; what it loads from its cache it does not mention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

_COMPILING = "numba:compile"


class _Teller(event.Listener):  # type: ignore[misc]  # untyped base
    def __init__(self) -> None:
        self.told = False

    def on_start(self, event: Any) -> None:
        if not self.told:
            self.told = True
            text = "compiling kernels for this machine: once per installation, up to a minute"
            print(text, file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def telling_of_compilation(quiet: bool = False) -> Iterator[None]:
    """Inside, the first kernel that is compiled is announced on stderr by one line."""
    if quiet:
        yield
        return
    teller = _Teller()
    event.register(_COMPILING, teller)
    try:
        yield
    finally:
        event.unregister(_COMPILING, teller)
