"""The end summary on stderr: what became of the rows, what it took, and where the table is."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from jfbatch.errors import OutputError
from jfbatch.report.progress import LastingConsole, format_seconds
from jfbatch.report.statistics import GOOD_STATUSES, RunStatistics


def summary_lines(statistics: RunStatistics, output: Path | None) -> list[tuple[str, str]]:
    """The summary as (what, figures) pairs, in the order shown."""
    counts = sorted(
        statistics.status_counts.items(), key=lambda item: (item[0] not in GOOD_STATUSES, -item[1])
    )
    rows = f"{statistics.rows_done:,}"
    if counts:
        rows += ": " + ", ".join(f"{count:,} {status}" for status, count in counts)
    if statistics.rows_kept:
        rows += f" ({statistics.rows_kept:,} kept from an earlier start)"
    completion = statistics.completion_tokens
    patterns = (
        f"{statistics.patterns_compiled:,} compiled, {statistics.patterns_loaded:,} loaded from the cache"
    )
    if statistics.patterns_failed:
        patterns += f", {statistics.patterns_failed:,} failed"
    sampled, jumped = f"{statistics.sampled_tokens:,} sampled", f"{statistics.jumped_tokens:,} jumped"
    times = (
        f"compiling {format_seconds(statistics.compile_seconds)} (in the background)",
        f"prefilling {format_seconds(statistics.prefill_seconds)}",
        f"decoding {format_seconds(statistics.decode_seconds)}",
    )
    lines = [
        ("rows", rows),
        ("patterns", patterns),
        ("prompt tokens", f"{statistics.prompt_tokens:,}"),
        ("output tokens", f"{completion:,}: {sampled}, {jumped} ({statistics.jumped_share:.0%})"),
        ("steps", f"{statistics.forward_passes:,} forward passes of the batch"),
        ("time", f"{format_seconds(statistics.elapsed_seconds)}: {', '.join(times)}"),
        ("speed", f"{statistics.rows_per_second:.2f} rows/s, {statistics.tokens_per_second:.0f} tokens/s"),
    ]
    if statistics.unheeded:
        told = ", ".join(f"{name} in {count:,} rows" for name, count in statistics.unheeded.items())
        lines.append(("without effect", told))
    if output is not None:
        lines.append(("output", str(output)))
    return lines


def write_summary(
    path: Path,
    statistics: RunStatistics,
    settings: Mapping[str, Any],
    rows: Mapping[str, int],
    exit_code: int,
    finished: bool = True,
) -> None:
    """Counts, timings and settings as one JSON file. Raises OutputError.

    `finished`: whether there is a table; if not, `rows` counts by status what this start settled.
    """
    document = {
        "exit_code": exit_code,
        "finished": finished,
        "rows": dict(rows),
        "statistics": {name: getattr(statistics, name) for name in statistics.__dataclass_fields__},
        "settings": dict(settings),
    }
    try:
        path.write_text(json.dumps(document, indent=2, default=dict) + "\n", encoding="utf-8")
    except OSError as error:
        state = "the table is complete" if finished else "what was committed is kept"
        raise OutputError(f"{path} cannot be written: {error.strerror or error}; {state}") from None


def print_summary(
    statistics: RunStatistics, output: Path | None, *, quiet: bool = False, stream: TextIO | None = None
) -> None:
    """Print the summary to `stream` (stderr) unless quiet. `output` is None where no table was written."""
    if quiet:
        return
    console = LastingConsole(
        file=stream if stream is not None else sys.stderr, highlight=False, soft_wrap=True
    )
    for what, figures in summary_lines(statistics, output):
        console.print(Text.assemble((f"{what:<15}", "bold"), figures))
