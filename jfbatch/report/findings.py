"""What `jfbatch check` has found, as values, as text for people and as JSON for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jfbatch.report.progress import LastingConsole

Verdict = Literal["enforced", "checked", "refused"]

_SHOWN_PATTERNS = 100
_SHOWN_FAULTS = 50


@dataclass
class PatternFinding:
    """One distinct pattern.

    `label` names it for people, `first` is the first row that has it. "enforced": no output can break
    it. "checked": the grammar lets through more, `unenforced` says where, and outputs are checked after.
    "refused": its rows cannot run; `pointer` and `keyword` say where where it is known, `reason` why.
    `states` is how many automaton states were looked at, `complete` whether those are all;
    `forced_share` the share of bytes, 0 to 1, that were determined in a few random texts.
    """

    kind: str
    label: str
    fingerprint: str
    first: str
    rows: int = 0
    backend: str | None = None  # which made its grammar
    verdict: Verdict = "enforced"
    reason: str | None = None
    pointer: str | None = None
    keyword: str | None = None
    unenforced: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    states: int | None = None
    complete: bool | None = None
    forced_share: float | None = None
    shortest_bytes: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class RowFinding:
    """A row that would not run, with the status and the reason that a run would give it."""

    place: str
    id: str | None
    status: str
    reason: str


@dataclass
class Findings:
    """All that was found. `faults` has the first rows that would fail; `fault_counts` counts all of them.

    `unheeded` counts rows by the fields they ask for that have no effect.
    """

    rows: int = 0
    patterns: list[PatternFinding] = field(default_factory=list)
    faults: list[RowFinding] = field(default_factory=list)
    fault_counts: Counter[str] = field(default_factory=Counter)
    damage: str | None = None
    unheeded: Counter[str] = field(default_factory=Counter)

    @property
    def rows_failing(self) -> int:
        return sum(self.fault_counts.values())

    def document(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "rows": self.rows,
            "rows_failing": self.rows_failing,
            "failing_by_status": dict(self.fault_counts),
            "patterns": [asdict(pattern) for pattern in self.patterns],
            "failing": [asdict(fault) for fault in self.faults],
            "failing_left_out": self.rows_failing - len(self.faults),
            "damage": self.damage,
            "without_effect": dict(self.unheeded),
        }


def print_findings(findings: Findings, console: Console | None = None) -> None:
    """Print a table of the patterns, remarks on them, the rows that would fail, and one line on it all."""
    console = console or LastingConsole(highlight=False)
    # Those with something to say come first; where all are fine, the order of the input stays.
    order = {"refused": 0, "checked": 1, "enforced": 2}
    ranked = sorted(
        enumerate(findings.patterns, 1),
        key=lambda item: (order[item[1].verdict], not item[1].warnings),
    )
    shown = ranked[:_SHOWN_PATTERNS]
    if shown:
        console.print(_pattern_table(shown))
    for number, pattern in shown:
        for remark in _remarks(pattern):
            console.print(Text(f"pattern {number} (first at {pattern.first}) {remark}"), soft_wrap=True)
    if len(ranked) > len(shown):
        console.print(f"{len(ranked) - len(shown):,} more patterns; --json lists all of them")
    for name, count in findings.unheeded.most_common():
        console.print(
            Text(f"warning: {name} has no effect here, though {count:,} rows ask for it"), soft_wrap=True
        )
    for fault in findings.faults[:_SHOWN_FAULTS]:
        console.print(Text(f"{fault.status}: {fault.reason}"), soft_wrap=True)
    if (left := findings.rows_failing - len(findings.faults[:_SHOWN_FAULTS])) > 0:
        console.print(f"{left:,} more rows would fail")
    console.print(Text(_last_line(findings), "bold"), soft_wrap=True)


def _pattern_table(numbered: Sequence[tuple[int, PatternFinding]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("pattern")  # the one that gives way on a narrow screen
    for name in ("rows", "verdict", "states", "forced"):
        table.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True)
    for number, pattern in numbered:
        states = "" if pattern.states is None else f"{pattern.states:,}{'' if pattern.complete else '+'}"
        forced = "" if pattern.forced_share is None else f"{pattern.forced_share:.0%}"
        name = f"{pattern.kind} {pattern.label}".rstrip()
        cells = (f"{pattern.rows:,}", pattern.verdict, states, forced)
        table.add_row(str(number), Text(name, no_wrap=True, overflow="ellipsis"), *cells)
    return table


def _remarks(pattern: PatternFinding) -> list[str]:
    remarks = [f"refused: {pattern.reason}"] if pattern.verdict == "refused" else []
    remarks += [f"checked after decoding: {place}" for place in pattern.unenforced]
    return remarks + [f"warning: {warning}" for warning in pattern.warnings]


def _last_line(findings: Findings) -> str:
    line = f"{findings.rows:,} rows, {len(findings.patterns):,} patterns"
    if not findings.rows_failing:
        return f"{line}: nothing would fail"
    counts = ", ".join(f"{count:,} {status}" for status, count in findings.fault_counts.most_common())
    return f"{line}: {findings.rows_failing:,} rows would fail ({counts})"
