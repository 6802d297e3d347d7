"""How an engine runs, and what a run did."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jfbatch.engine.scheduler import Planned
    from jfbatch.engine.sequence import Sequence


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    batch_size: most rows decoded together. kv_memory: bytes for K and V. prefill_chunk: most prompt
    tokens per step; None: what suits the runner. context_length: most tokens, prompt and output, of one
    row. jump: let the grammar's forced bytes become tokens. drafts: let the next step verify likely
    tokens. repetition_stop: end outputs that go round in circles. look_ahead: rows that wait, sorted,
    beyond those that run. ahead: launch a pass before the choices that it goes on with are read (ahead.py);
    None: on a device of its own, where it pays.
    """

    batch_size: int = 64
    kv_memory: int = 4 << 30
    prefill_chunk: int | None = None
    context_length: int = 2048
    jump: bool = True
    drafts: bool = True
    repetition_stop: bool = True
    log_probabilities: bool = False
    look_ahead: int = 256
    ahead: bool | None = None


@dataclass
class EngineStatistics:
    """What a run did. Seconds are those of computing steps; a mixed step's are split by its tokens.

    rows_ahead: parts of passes that were launched before the token they compute was read; rows_in_vain:
    those of them whose logits decided nothing; chosen_early: those whose next token the device chose without
    waiting for the host.
    """

    forward_passes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    shared_tokens: int = 0
    sampled_tokens: int = 0
    jumped_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    out_of_memory: int = 0
    rows_ahead: int = 0
    rows_in_vain: int = 0
    chosen_early: int = 0

    def account(self, planned: Iterable[Planned], late: Collection[Sequence]) -> tuple[int, int]:
        """How many tokens of prompts and of outputs a pass computes.

        The rows hear of theirs, but for the `late` ones among them.
        """
        self.forward_passes += 1
        prefill = decode = 0
        for part in planned:
            sequence, count = part.sequence, len(part.segment.token_ids)
            if sequence in late:
                decode += count
                continue
            sequence.computes(part.segment.token_ids)
            if sequence.sampled_tokens:
                decode += count
            else:
                prefill += count
            if part.decides or sequence.sampled_tokens:
                sequence.forward_passes += 1
            self.drafted_tokens += max(len(part.segment.logits) - 1, 0)
        return prefill, decode

    def add_time(self, seconds: float, prefill: int, decode: int) -> None:
        """A step of so many tokens of prompts and of outputs took this long."""
        self.prefill_seconds += seconds * prefill / (prefill + decode)
        self.decode_seconds += seconds * decode / (prefill + decode)
