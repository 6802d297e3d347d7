"""How an engine runs, and what a run did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    batch_size: most rows decoded together. kv_memory: bytes for K and V. prefill_chunk: most prompt
    tokens per step; None: what suits the runner. context_length: most tokens, prompt and output, of one
    row. jump: let the grammar's forced bytes become tokens. drafts: let the next step verify likely
    tokens. repetition_stop: end outputs that go round in circles. look_ahead: rows that wait, sorted,
    beyond those that run.
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


@dataclass
class EngineStatistics:
    """What a run did. Seconds are those of computing steps; a mixed step's are split by its tokens."""

    forward_passes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    shared_tokens: int = 0
    sampled_tokens: int = 0
    jumped_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    out_of_memory: int = 0

    def add_time(self, seconds: float, prefill: int, decode: int) -> None:
        """A step of so many tokens of prompts and of outputs took this long."""
        self.prefill_seconds += seconds * prefill / (prefill + decode)
        self.decode_seconds += seconds * decode / (prefill + decode)
