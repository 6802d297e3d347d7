"""A stream that outlasts what is behind it: what can no longer be told does not end a run.

A log on a disk that is full, a terminal that was closed, a pipe that nobody reads any more.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TextIO, cast


class _LastingStream:
    """Writes to a stream until that fails; from then on nowhere. All else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


def lasting(stream: TextIO) -> TextIO:
    """The stream, whose writes no longer fail."""
    return cast(TextIO, _LastingStream(stream))


def silence(stream: TextIO) -> None:
    """From now on the stream goes nowhere, what is in its buffer too: Python's end would fail on that."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
