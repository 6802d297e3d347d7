"""Starting `jfbatch run` from tests, in this process or in one of its own, and reading what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfbatch import cli

ROOT = Path(__file__).parent.parent
COLUMNS = [
    "id",
    "row",
    "status",
    "text",
    "value",
    "error",
    "prompt_tokens",
    "completion_tokens",
    "sampled_tokens",
    "jumped_tokens",
    "forward_passes",
    "backend",
]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """A JSONL file; texts are written as they are, so that they may be no JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def invoke(*arguments: str | Path) -> int:
    """The exit code of the command line, run in this process."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@dataclass
class Job:
    """A directory with an input, an output and the settings that every start shares."""

    directory: Path
    model: Path | str
    cache: Path

    @property
    def input(self) -> Path:
        return self.directory / "rows.jsonl"

    @property
    def output(self) -> Path:
        return self.directory / "table.parquet"

    @property
    def parts(self) -> Path:
        return self.directory / "table.parquet.parts"

    def arguments(self, *flags: str | Path) -> list[str]:
        settings = ["--model", self.model, "--cache-dir", self.cache, "--threads", "1"]
        return ["run", str(self.input), "-o", str(self.output), *map(str, [*settings, *flags])]

    def start(self, rows: Sequence[Any] | None, *flags: str | Path) -> int:
        """Write the rows (None: as they lie there), run them in this process, return the exit code."""
        if rows is not None:
            write_lines(self.input, rows)
        return invoke(*self.arguments(*flags))

    def run(self, rows: Sequence[Any] | None, *flags: str | Path, code: int = 0) -> list[dict[str, Any]]:
        """As `start`, and the rows of the table it wrote."""
        assert self.start(rows, *flags) == code
        return self.rows()

    def process(self, *flags: str | Path) -> subprocess.Popen[str]:
        """The same command as a process of its own."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JFBATCH_")}
        return subprocess.Popen(
            [sys.executable, "-m", "jfbatch", *self.arguments(*flags)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def table(self) -> pa.Table:
        with self.output.open("rb") as file:  # pyarrow takes no name that is not UTF-8
            return pq.read_table(file)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table().to_pylist()
        return rows


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Return once the condition holds; fails the test if that takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
