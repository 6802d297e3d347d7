"""The grammar backends on the sample schemas: `python bench/backends.py [--data DIR] [--backend NAME ...]`.

Prints a Markdown table for docs/backends.md (below its marker): per backend, tokenizer and schema the time
from a pattern to its first mask, the time of fresh masks on realistic outputs, and the share of their bytes
that is forced. Each case runs in a process of its own, because an engine's compile cannot be interrupted.
DIR (default $JFBATCH_TEST_DATA) holds tokenizers/llama3 and tokenizers/qwen3.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jfbatch.errors import GrammarError, InvalidGrammar
from jfbatch.grammar import Grammar, Vocabulary
from jfbatch.grammar.backends import BACKENDS, is_installed, open_backend
from jfbatch.grammar.backends.protocol import BackendName, CompiledGrammar
from jfbatch.grammar.compiler import warm_up

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
TOKENIZERS = {"llama3": "Llama 3", "qwen3": "Qwen 3"}
STYLE = "compact"  # the one that all have
WARMING = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}'
OUTPUTS: dict[str, list[Any]] = {
    "email": [
        {
            "sender_name": "Hannah Brooks",
            "sender_email": "hannah.brooks@northmail.example",
            "received_on": "2026-03-02",
            "category": "complaint",
            "priority": "high",
            "language": "en",
            "order_number": "HX-20418",
            "needs_reply": True,
            "summary": "The parcel arrived crushed; two of six glasses are broken and should be replaced.",
        },
        {
            "sender_name": "Jürgen Weiß",
            "sender_email": "j.weiss@example.org",
            "received_on": "2025-11-30",
            "category": "order",
            "priority": "low",
            "language": "de",
            "order_number": None,
            "needs_reply": False,
            "summary": "Bestellt zwölf Gläser nach und bittet um Lieferung bis Ende der Woche.",
        },
    ],
    "invoice": [
        {
            "invoice_number": "2026-00417",
            "issued_on": "2026-01-14",
            "due_on": "2026-02-13",
            "seller": {"name": "Lindqvist Möbler AB", "city": "Göteborg"},
            "currency": "SEK",
            "lines": [
                {"description": "Desk lamp, brass", "quantity": 4, "unit_price": 895},
                {"description": "Delivery", "quantity": 1, "unit_price": 250},
            ],
            "total": 3830,
            "paid": False,
        },
        {
            "invoice_number": "R-77",
            "issued_on": "2025-06-01",
            "due_on": None,
            "seller": {"name": "Café du Port", "city": "Marseille"},
            "currency": "EUR",
            "lines": [{"description": "Catering for thirty guests", "quantity": 30, "unit_price": 42}],
            "total": 1260,
            "paid": True,
        },
    ],
    "review": [
        {
            "product": "Trailhead 30 backpack",
            "rating": 4,
            "sentiment": "positive",
            "aspects": [
                {"aspect": "quality", "opinion": "positive"},
                {"aspect": "price", "opinion": "negative"},
            ],
            "recommends": True,
            "language": "en",
            "reason": "Comfortable and well made, though dearer than similar packs.",
        },
        {
            "product": "Bouilloire Vapeur",
            "rating": 2,
            "sentiment": "negative",
            "aspects": [{"aspect": "delivery", "opinion": "mixed"}],
            "recommends": False,
            "language": "fr",
            "reason": "Le couvercle ferme mal et l'eau déborde.",
        },
    ],
}


@dataclass
class Measured:
    """One case. Times: seconds for compiling (each round), microseconds for masks; bytes of the outputs."""

    compile_seconds: list[float] = field(default_factory=list)
    mask_microseconds: list[float] = field(default_factory=list)
    forced: int = 0
    total: int = 0
    refused: int = 0  # outputs that the matcher did not take to their end
    error: str | None = None


def compile_pattern(name: BackendName, backend: Any, text: str, vocabulary: Vocabulary) -> CompiledGrammar:
    if name == "fsm":
        return Grammar.from_pattern("schema", text, vocabulary, STYLE)
    grammar: CompiledGrammar = backend.compile("schema", text, STYLE, "closed")
    return grammar


def measure(name: BackendName, tokenizer_file: Path, schema: str, rounds: int) -> Measured:
    """Run one case in this process."""
    import tokenizers

    vocabulary = Vocabulary.from_file(tokenizer_file)
    tokenizer = tokenizers.Tokenizer.from_str(gzip.decompress(tokenizer_file.read_bytes()).decode())
    texts = [json.dumps(output, ensure_ascii=False, separators=(",", ":")) for output in OUTPUTS[schema]]
    pattern = (SAMPLES / f"{schema}.schema.json").read_text(encoding="utf-8")
    single = {data[0]: token for token, data in enumerate(vocabulary.token_bytes) if data and len(data) == 1}
    warm_up()
    backend = None if name == "fsm" else open_backend(name, vocabulary)
    if name != "outlines":  # whose compile takes so long that what only the first call costs is nothing
        warming = [single[byte] for byte in b'{"a":"xy"}']
        walk(compile_pattern(name, backend, WARMING, vocabulary), warming, [])
    measured = Measured()
    for _ in range(rounds):
        started = time.perf_counter()
        try:
            grammar = compile_pattern(name, backend, pattern, vocabulary)
            grammar.matcher().token_mask()
        except InvalidGrammar as error:
            measured.error = str(error)
            return measured
        measured.compile_seconds.append(time.perf_counter() - started)
        measured.refused = 0
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            measured.refused += not walk(grammar, ids, measured.mask_microseconds)
    for text in texts:
        measured.forced += forced_bytes(grammar, text.encode(), single)
        measured.total += len(text.encode())
    return measured


def walk(grammar: CompiledGrammar, ids: list[int], times: list[float]) -> bool:
    """Time the mask before each token; whether all were accepted."""
    matcher = grammar.matcher()
    for token_id in ids:
        started = time.perf_counter()
        matcher.token_mask()
        times.append((time.perf_counter() - started) * 1e6)
        try:
            matcher.accept_token(token_id)
        except GrammarError:
            return False
    return matcher.is_accepting()


def forced_bytes(grammar: CompiledGrammar, text: bytes, single: dict[int, int]) -> int:
    """How many bytes of an output are forced, the others being chosen one by one."""
    matcher = grammar.matcher()
    place = forced = 0
    while place < len(text):
        piece = matcher.forced_bytes()
        piece = piece if text.startswith(piece, place) else b""
        forced += len(piece)
        try:
            for byte in piece or text[place : place + 1]:
                matcher.accept_token(single[byte])
        except GrammarError:
            break
        place += len(piece) or 1
    return forced


def in_a_process(name: str, tokenizer_file: Path, schema: str, rounds: int, seconds: float) -> Measured:
    """One case in a process of its own, ended after `seconds`."""
    command = [sys.executable, __file__, "--case", name, str(tokenizer_file), schema, str(rounds)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Measured(error=f"not done in {seconds:g} s")
    if done.returncode:
        return Measured(error=f"ended with {done.returncode}")
    return Measured(**json.loads(done.stdout))


def row(name: str, tokenizer: str, schema: str, measured: Measured) -> str:
    """A line of the table."""
    if measured.error is not None:
        return f"| `{name}` | {tokenizer} | {schema} | {measured.error} | | | |"
    masks = sorted(measured.mask_microseconds)
    compiling = statistics.median(measured.compile_seconds) * 1e3
    cells = (
        f"`{name}`",
        tokenizer,
        schema,
        f"{compiling:,.1f}",
        f"{masks[len(masks) // 2]:,.0f}",
        f"{masks[int(len(masks) * 0.99)]:,.0f}",
        f"{100 * measured.forced / measured.total:.0f} %" + (" (1)" if measured.refused else ""),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("JFBATCH_TEST_DATA"))
    parser.add_argument("--backend", nargs="*", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=5, help="new grammars per case (outlines: one)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one case")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        name, file, schema, rounds = arguments.case
        print(json.dumps(asdict(measure(name, Path(file), schema, int(rounds)))))
        return
    if arguments.data is None:
        parser.error("give --data DIR or set JFBATCH_TEST_DATA")
    print("| backend | tokenizer | schema | compile, ms | mask p50, us | mask p99, us | forced |")
    print("|---|---|---|---|---|---|---|")
    refused = False
    for name in arguments.backend:
        for tokenizer, title in TOKENIZERS.items():
            file = Path(arguments.data) / "tokenizers" / tokenizer / "tokenizer.json.gz"
            for schema in OUTPUTS:
                if not is_installed(name):
                    measured = Measured(error="not installed")
                else:
                    rounds = 1 if name == "outlines" else arguments.rounds
                    measured = in_a_process(name, file, schema, rounds, arguments.timeout)
                refused = refused or measured.refused > 0
                print(row(name, title, schema, measured), flush=True)
    print()
    print(
        "Compile: from the pattern to its first mask, median. Masks: each is the first of its state in a new"
    )
    print(
        f"grammar unless an engine remembers it. JSON in the {STYLE} style. Forced: the share of the outputs'"
    )
    print("bytes that the grammar determines, the others being chosen one by one.")
    if refused:
        print("(1) The engine does not take a sample output to its end.")


if __name__ == "__main__":
    main()
