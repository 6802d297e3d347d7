"""Which ready grammars stay in memory: those met last, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MEASURED_EVERY = 256
"""Grammars grow while rows are decoded: after so many new ones all are measured again."""


class KeptKeys:
    """Keys in the order in which they were last met, with their sizes in bytes. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._added = 0

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def clear(self) -> None:
        self._sizes.clear()
        self.bytes = 0

    def meet(self, key: str) -> None:
        """The key is wanted again; nothing happens to one that is not kept."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def add(self, key: str, size_of: Callable[[str], int]) -> list[str]:
        """Keep a key, the newest; returns the keys that must go for it, those met longest ago first.

        The newest stays even if it is larger than the limit. Amortised O(1) calls of `size_of`.
        """
        self._added += 1
        self._set(key, size_of(key))
        self._sizes.move_to_end(key)
        if self._added % MEASURED_EVERY == 0:
            for known in list(self._sizes):
                self._set(known, size_of(known))
        dropped = []
        while self.bytes > self.limit and len(self._sizes) > 1:
            oldest, size = self._sizes.popitem(last=False)
            self.bytes -= size
            dropped.append(oldest)
        return dropped

    def _set(self, key: str, size: int) -> None:
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
