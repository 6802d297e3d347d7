"""A RequestSource over a list, for tests."""

from __future__ import annotations

from jfbatch.engine.sequence import Request


class ListSource:
    """Hands out its requests; with `at_once`, only so many per call, and none on every other call."""

    def __init__(self, requests: list[Request], at_once: int | None = None) -> None:
        self.requests = list(requests)
        self.at_once = at_once
        self.calls = 0
        self.waits = 0

    def take(self, limit: int) -> list[Request]:
        self.calls += 1
        if self.at_once is not None:
            limit = 0 if self.calls % 2 else min(limit, self.at_once)
        taken, self.requests = self.requests[:limit], self.requests[limit:]
        return taken

    def exhausted(self) -> bool:
        return not self.requests

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.waits += 1
