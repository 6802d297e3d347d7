"""docs/backends.md, made from what the backends say of themselves and from the known disagreements."""

from __future__ import annotations

from collections.abc import Callable

from jfbatch.grammar.backends import BACKENDS
from jfbatch.grammar.backends.disagreements import DISAGREEMENTS, Disagreement
from jfbatch.grammar.backends.protocol import KINDS, Capabilities

MARKER = "<!-- measured: what stands below is kept -->\n"

_INTRODUCTION = """\
# Backends

Which texts an output may be is decided by a grammar engine. Ours is `fsm`; three others can take its place,
for a whole run (`--backend NAME`) or for a row (`"backend": "NAME"`). The default, `auto`, is `fsm`, and
`llguidance`, where it is installed, for patterns that `fsm` refuses. The table's `backend` column says
which made a row's grammar. Rows of one batch may differ.

Two cases are not handed on by `auto`: schemas under `--strict`, and regular expressions that Python's `re`
does not know either.

    pip install 'jfbatch[llguidance]'    # or xgrammar, outlines

Every engine gets the bytes of each token id from us, so that duplicates, control tokens, padded ids and
several end tokens are treated alike. Whatever an engine lets through is checked again: JSON against its
schema, the rest against our own automaton where it can read the pattern. An output that fails is sampled
again up to `--retries` times, then its status is `invalid`.

An engine compiles in the same background threads and under the same `--compile-timeout` as ours. Where it
passes the limit, its rows get the reason and the run goes on; the engine itself cannot be interrupted and
works on until it is done.

llguidance and XGrammar have no call for the shortest ending that finishes an output in time. It is looked
for: the ending known before the last tokens, our own automaton, a bounded search, each confirmed by the
engine. Where none is found the row takes the last ending that was known.
"""


def backends_page() -> str:
    """The page up to and including MARKER."""
    parts = [_INTRODUCTION, "## What each can do\n", _capability_table(), _notes(), _disagreements()]
    parts.append("This page is made: `python -m jfbatch.grammar.backends docs/backends.md`.\n")
    return "\n".join(parts) + f"\n{MARKER}"


def _capability_table() -> str:
    backends = list(BACKENDS.values())
    lines = [_row("", *(f"`{backend.name}`" for backend in backends)), _row(*["---"] * (len(backends) + 1))]
    facts: list[tuple[str, Callable[[Capabilities], str]]] = [
        ("engine", lambda backend: backend.title),
        ("tested with", lambda backend: backend.tested_version or "this version"),
        *((kind, _kind(kind)) for kind in KINDS),
        ("JSON styles", lambda backend: ", ".join(backend.styles)),
        ("recursion", lambda backend: backend.recursion),
        ("undeclared properties", lambda backend: backend.undeclared_properties),
        ("names what it leaves out", lambda backend: "yes" if backend.vouches else "no"),
        ("forced bytes", lambda backend: backend.forced_bytes),
        ("endings", lambda backend: backend.endings),
        ("rollback", lambda backend: backend.rollback),
    ]
    lines += [_row(name, *(fact(backend) for backend in backends)) for name, fact in facts]
    return "\n".join(lines) + "\n"


def _kind(kind: str) -> Callable[[Capabilities], str]:
    def fact(backend: Capabilities) -> str:
        return backend.kinds[kind] or "yes" if kind in backend.kinds else "no"

    return fact


def _notes() -> str:
    return "".join(f"* `{backend.name}`: {note}\n" for backend in BACKENDS.values() for note in backend.notes)


def _disagreements() -> str:
    lines = [
        "## Known disagreements\n",
        "A test holds each of these, and that random texts of each backend are accepted by the others where",
        "nothing of the kind is in the way. Who accepts and who does not name a text that stands for many;",
        "a backend in neither column refuses the pattern. JSON is in the compact style.\n",
        _row("kind", "pattern", "text", "accept it", "do not", "right", "why"),
        _row(*["---"] * 7),
    ]
    return "\n".join([*lines, *map(_disagreement, DISAGREEMENTS)]) + "\n"


def _disagreement(entry: Disagreement) -> str:
    right = {"accept": "to accept", "refuse": "not to", "either": "both: a choice of spelling"}[entry.right]
    plain = entry.text.isascii() and entry.text.decode().isprintable()
    text = entry.text.decode() if plain else _escaped(entry.text)
    pattern = entry.pattern.replace("\n", "\\n")
    return _row(
        entry.kind,
        _code(pattern),
        _code(text),
        ", ".join(entry.accepted),
        ", ".join(entry.refused),
        right,
        entry.why,
    )


def _escaped(data: bytes) -> str:
    """Text as Python would write its characters, or its bytes where they are no text."""
    try:
        return ascii(data.decode())[1:-1]
    except UnicodeDecodeError:
        return repr(data)[2:-1]


def _code(text: str) -> str:
    return f"`{text}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
