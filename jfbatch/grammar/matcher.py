"""One row's position in its grammar: the protocol every backend implements."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

new_serial: Callable[[], int] = count().__next__
"""A number for a grammar, which no other grammar of this process has or had."""


class Matcher(Protocol):
    """What the engine may ask of a grammar, for one row.

    A matcher starts before the first output token. Masks are read-only and may be shared by rows.
    """

    def token_mask(self) -> NDArray[np.uint32]:
        """uint32[ceil(V/32)]: bit t = token t may come next. End tokens' bits only where accepting."""
        ...

    def state_key(self) -> Hashable | None:
        """What the position is: equal keys mean the same mask, now and after any tokens.

        None where that cannot be said. Keys of different grammars differ; a key holds no grammar alive.
        """
        ...

    def accept_token(self, token_id: int) -> None:
        """Move past one token. Raises GrammarError on a token outside the mask.

        An end token is accepted in an accepting state and finishes the matcher.
        """
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens. Raises GrammarError past the start."""
        ...

    def forced_bytes(self) -> bytes:
        """The bytes every continuation starts with; b"" if there is a choice or the text may end here."""
        ...

    def is_accepting(self) -> bool:
        """Whether the output so far is complete as it stands."""
        ...

    def is_finished(self) -> bool:
        """Whether nothing may follow: an end token was taken, or accepting with no continuation."""
        ...

    def shortest_ending(self) -> bytes:
        """A shortest text that completes the output from here (b"" where accepting)."""
        ...
