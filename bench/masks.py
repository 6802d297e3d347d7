"""Time of fresh masks: `python bench/masks.py TOKENIZER.json[.gz] [SCHEMA.json]`.

Walks one valid output byte by byte through a new grammar and times every mask that was not known
yet, apart for states inside free strings and in the structure around them. Also: compile times.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from jfbatch.grammar import Grammar, Vocabulary

SCHEMA = Path(__file__).parents[1] / "data" / "samples" / "email.schema.json"
VALUE = {
    "sender_name": "Hannah Brooks",
    "sender_email": "hannah.brooks@northmail.example",
    "received_on": "2026-03-02",
    "category": "complaint",
    "priority": "high",
    "language": "en",
    "order_number": "HX-20418",
    "needs_reply": True,
    "summary": "The parcel arrived crushed; two of six glasses are broken and should be replaced.",
}
ROUNDS = 5


def fresh_masks(schema: Any, text: str, vocabulary: Vocabulary) -> tuple[list[float], list[float]]:
    """Microseconds of the masks in the structure and of those inside free strings."""
    structure: list[float] = []
    strings: list[float] = []
    for _ in range(ROUNDS):
        grammar = Grammar.from_json_schema(schema, vocabulary)
        automaton, masks = grammar.automaton, grammar.masks
        state = automaton.start
        for byte in text.encode():
            walks = masks.walks
            started = time.perf_counter()
            masks.mask(state)
            taken = (time.perf_counter() - started) * 1e6
            if masks.walks > walks:
                (strings if automaton.store.free_count[state] else structure).append(taken)
            state = automaton.advance(state, bytes([byte]))
            assert state >= 0, "the value does not fit the schema"
    return structure, strings


def compile_milliseconds(schema: Any, vocabulary: Vocabulary) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        Grammar.from_json_schema(schema, vocabulary).matcher().token_mask()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def main() -> None:
    vocabulary = Vocabulary.from_file(sys.argv[1])
    schema = json.loads(Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else SCHEMA.read_text())
    text = json.dumps(VALUE, ensure_ascii=False)
    fresh_masks(schema, text, vocabulary)  # compiled code is loaded, the vocabulary is split
    structure, strings = fresh_masks(schema, text, vocabulary)
    long = {"type": "string", "maxLength": 5000}
    grammar = Grammar.from_json_schema(long, vocabulary)
    state = grammar.automaton.advance(grammar.automaton.start, b'"')
    for _ in range(4800):
        grammar.masks.mask(state)
        state = grammar.automaton.advance(state, b"a")
    for name, times in (("structure", structure), ("inside a string", strings)):
        times.sort()
        print(f"{name:16} {len(times):5} fresh masks, median {statistics.median(times):7.0f} us, ", end="")
        print(f"p99 {times[int(len(times) * 0.99)]:7.0f} us, most {times[-1]:7.0f} us")
    print(f"first mask, this schema        {compile_milliseconds(schema, vocabulary):6.2f} ms")
    print(f"first mask, maxLength 5000     {compile_milliseconds(long, vocabulary):6.2f} ms")
    print(f"walks for 4,800 of 5,000 characters: {grammar.masks.walks}")


if __name__ == "__main__":
    main()
