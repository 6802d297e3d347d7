"""How an engine runs, and what a run did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    batch_size: most rows decoded together. kv_memory: bytes for K and V. prefill_chunk: most prompt
    tokens per step. context_length: most tokens, prompt and output, of one row. jump: let the
    grammar's forced bytes become tokens. drafts: let the next step verify likely tokens.
    repetition_stop: end outputs that go round in circles. look_ahead: rows that wait, sorted, beyond
    those that run.
    """

    batch_size: int = 64
    kv_memory: int = 4 << 30
    prefill_chunk: int = 1024
    context_length: int = 2048
    jump: bool = True
    drafts: bool = True
    repetition_stop: bool = True
    log_probabilities: bool = False
    look_ahead: int = 256


@dataclass
class EngineStatistics:
    """What a run did. Seconds are wall time; a mixed step's time is split by its tokens."""

    forward_passes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    shared_tokens: int = 0
    sampled_tokens: int = 0
    jumped_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    out_of_memory: int = 0
