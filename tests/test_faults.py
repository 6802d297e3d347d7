"""Whole runs with something broken under them: the device, the compiler's threads, the cache, the disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jfbatch import decoding
from jfbatch.engine.runner import Runner
from jfbatch.grammar.compiler import Compiler
from jfbatch.grammar.grammar import Grammar
from tests.run_command import ROOT, Job, invoke, wait_until, write_lines

PROMPTS = [{"id": f"r{number}", "prompt": f"Who is number {number}?"} for number in range(12)]
REGEX = ("--regex", "[A-Z][a-z]{6,12} [a-z]{4,9}")
Fault = Callable[[int, int, Callable[[], torch.Tensor]], torch.Tensor]


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return Job(tmp_path, tiny_model, tmp_path / "cache")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], list[int]]:
    """Puts a fault under the engine: fault(step, rows, run) stands for each step's forward pass."""

    def install(fault: Fault) -> list[int]:
        rows: list[int] = []

        class FaultyRunner(Runner):
            def __init__(self, *arguments: Any, **settings: Any) -> None:
                self.ready = False  # the runner tries the model on its own first
                super().__init__(*arguments, **settings)
                self.ready = True

            def forward(self, segments: Any) -> torch.Tensor:
                if not self.ready:
                    return super().forward(segments)
                rows.append(len(segments))
                return fault(len(rows), len(segments), lambda: super(FaultyRunner, self).forward(segments))

        monkeypatch.setattr(decoding, "Runner", FaultyRunner)
        return rows

    return install


def texts(job: Job) -> dict[str, str]:
    return {row["id"]: row["text"] for row in job.rows()}


def undisturbed(job: Job) -> dict[str, str]:
    """What the same command gives when nothing is broken; removes its output."""
    job.run(PROMPTS, *REGEX)
    found = texts(job)
    job.output.unlink()
    job.output.with_name("table.parquet.journal").unlink()
    return found


def test_a_row_with_logits_that_are_no_numbers_fails_and_is_named(
    job: Job, faulty: Callable[[Fault], list[int]]
) -> None:
    expected = undisturbed(job)

    def fault(step: int, rows: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        logits = run()
        if step == 3:
            logits[-1] = float("nan")
        return logits

    faulty(fault)
    rows = job.run(None, *REGEX, code=1)
    (bad,) = [row for row in rows if row["status"] != "ok"]
    assert bad["status"] == "failed" and bad["value"] is None
    assert bad["error"].startswith(f"{job.input}:{bad['row'] + 1}: ") and "not numbers" in bad["error"]
    good = {row["id"]: row["text"] for row in rows if row["status"] == "ok"}
    assert good == {key: text for key, text in expected.items() if key != bad["id"]}


def test_memory_that_runs_out_halves_the_batch_and_changes_no_output(
    job: Job, faulty: Callable[[Fault], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    expected = undisturbed(job)

    def fault(step: int, rows: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        if step == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run()

    seen = faulty(fault)
    job.run(None, *REGEX)
    assert texts(job) == expected
    assert max(seen[4:]) <= seen[3] // 2
    assert "memory ran out" in caplog.text


def test_a_row_for_which_memory_runs_out_twice_alone_fails_and_the_others_do_not(
    job: Job, faulty: Callable[[Fault], list[int]]
) -> None:
    seen = faulty(lambda step, rows, run: _out_of_memory() if step in (2, 3) else run())
    rows = job.run(PROMPTS[:4], *REGEX, "--batch-size", "1", code=1)
    (bad,) = [row for row in rows if row["status"] != "ok"]
    assert bad["status"] == "failed" and "memory ran out twice" in bad["error"]
    assert seen[1] == seen[2] == 1


def _out_of_memory() -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_compiling_thread_that_dies_costs_its_pattern_only(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Grammar.from_pattern
    died: list[BaseException | None] = []

    def dying(kind: str, text: str, *rest: Any) -> Grammar:
        if text == "deadly":
            raise SystemExit
        return real(kind, text, *rest)

    monkeypatch.setattr(Grammar, "from_pattern", staticmethod(dying))
    monkeypatch.setattr(threading, "excepthook", lambda told: died.append(told.exc_value))
    lines = [{"prompt": "a", "regex": text} for text in ("x", "deadly", "y{2}", "deadly", "z")]
    rows = job.run(lines, code=1)
    assert [row["status"] for row in rows] == ["ok", "unsupported_schema", "ok", "unsupported_schema", "ok"]
    assert "thread died" in rows[1]["error"]


@pytest.mark.parametrize("wreck", ["removed", "garbage"])
def test_a_cache_that_vanishes_while_the_run_goes_on_costs_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, wreck: str
) -> None:
    real = Compiler._compile
    compiled = 0

    def compile_and_wreck(compiler: Compiler, pattern: Any) -> Grammar:
        nonlocal compiled
        compiled += 1
        if compiled == 2:
            shutil.rmtree(job.cache)
            if wreck == "garbage":
                job.cache.write_bytes(b"a file where the directory was")
        return real(compiler, pattern)

    monkeypatch.setattr(Compiler, "_compile", compile_and_wreck)
    lines = [{"prompt": "a", "regex": f"x{{{number}}}[ab]"} for number in range(1, 8)]
    rows = job.run(lines)
    assert compiled == 7 and [row["status"] for row in rows] == ["ok"] * 7


# -- the disk: processes of their own ----------------------------------------------------------------------

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv[1:2] = []
from jfbatch.cli import main
main()
"""


def with_file_size_limit(job: Job, limit: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(limit), *job.arguments(*flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_full_disk_is_exit_code_74_and_the_same_command_continues(job: Job) -> None:
    expected = undisturbed(job)  # which also fills the cache: nothing but parts is written below
    flags = (*REGEX, "--keep", "note", "--flush-rows", "4", "--batch-size", "4", "--quiet")
    notes = ["" if number != 9 else os.urandom(9000).hex() for number in range(len(PROMPTS))]
    noted = [{**row, "note": note} for row, note in zip(PROMPTS, notes, strict=True)]
    write_lines(job.input, noted)
    told = with_file_size_limit(job, 12_000, *flags)
    assert told.returncode == 74, told.stderr
    complaint = told.stderr.splitlines()[-1]
    assert "File too large" in complaint and "run the same command again" in complaint
    assert "Traceback" not in told.stderr and not job.output.exists()
    kept = sorted(job.parts.glob("part-*.parquet"))
    assert kept, "what was committed before is intact"
    summary = job.directory / "summary.json"
    job.run(None, *flags, "--summary-json", summary)
    assert json.loads(summary.read_text())["statistics"]["rows_kept"] >= 4
    assert texts(job) == expected


def test_a_place_where_nothing_can_be_written_is_exit_code_74(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.directory = Path("/proc/1")
    arguments = [argument if argument != "/proc/1/rows.jsonl" else "-" for argument in job.arguments(*REGEX)]
    assert invoke(*arguments) == 74
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "/proc/1/table.parquet" in captured.err


@pytest.mark.slow
def test_a_second_process_on_the_same_output_is_refused_and_the_first_goes_on(job: Job) -> None:
    write_lines(job.input, [{"prompt": f"{number}"} for number in range(60)])
    flags = (*REGEX, "--batch-size", "2", "--flush-rows", "5")
    # The lock is there from the first second on: the model is still being loaded.
    first = job.process(*flags)
    try:
        wait_until(lambda: (job.parts / "lock").exists() or first.poll() is not None)
        assert job.start(None, *flags) == 2
        _, stderr = first.communicate(timeout=120)
    finally:
        first.kill()
    assert first.returncode == 0, stderr
    assert len(job.rows()) == 60
