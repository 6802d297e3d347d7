"""The measurements themselves: the same rows for everyone, floors that follow from the work, sound counts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import ahead, workload
from bench.decoding import Bench
from bench.hardware import Hardware, Shape, Work, _interpolated
from bench.peers.__main__ import Contestant, contestants, medians_of, table
from bench.peers.meter import Meter, Outcome
from bench.scaling import write_input
from jfbatch.engine.engine import EngineConfig
from jfbatch.engine.runner import Segment
from tests.run_command import ROOT
from tests.tiny_model import tiny_model  # noqa: F401 - a fixture


def test_the_rows_are_those_that_the_figures_are_of() -> None:
    digest = hashlib.sha256("\n".join(workload.prompts()).encode()).hexdigest()
    assert digest[:16] == "b894bcb1de31acd4"
    assert workload.documents(100)[:64] == workload.documents()


@pytest.mark.skipif("JFBATCH_TEST_DATA" not in os.environ, reason="JFBATCH_TEST_DATA is not set")
def test_the_rows_are_those_that_peers_were_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path(os.environ["JFBATCH_TEST_DATA"]) / "peers"
    if not (directory / "workload.py").is_file():
        pytest.skip("the test data has no peers")
    import importlib.util

    monkeypatch.setenv("MODEL_HF", "")
    spec = importlib.util.spec_from_file_location("peers_workload", directory / "workload.py")
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers_workload", theirs)
    spec.loader.exec_module(theirs)
    assert theirs.prompts_plain() == workload.prompts()
    assert theirs.SCHEMA == workload.SCHEMA


def test_a_step_takes_its_multiplications_or_its_weights_and_the_reading_of_its_past() -> None:
    shape = Shape(layer_weights=1000, head_weights=500, weight_bytes=4, kv_bytes_per_token=8)
    work = shape.work([Segment(0, 10, [1, 2], [1]), Segment(1, 5, [1])])
    assert work == Work(flops=2 * (3 * 1000 + 500), weight_bytes=6000, kv_bytes=(12 + 6) * 8)
    slow_arithmetic, slow_memory = Hardware(100, 1e9), Hardware(1e9, 100)
    assert work.seconds(slow_arithmetic) == pytest.approx(70, rel=1e-3)
    assert work.seconds(slow_memory) == pytest.approx(60 + 1.44, rel=1e-3)
    assert shape.work([Segment(0, 0, [1, 2])]).weight_bytes == 4000  # no logits, no LM head


def test_times_between_measured_token_counts_are_interpolated() -> None:
    known = {1: 1.0, 3: 2.0, 5: 10.0}
    assert [_interpolated(known, count) for count in (1, 2, 3, 4, 5, 10)] == [1, 1.5, 2, 6, 10, 20]


def test_a_measured_run_counts_what_it_did(tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    bench = Bench.load(str(tiny_model), "f32")
    write_input(tmp_path / "rows.jsonl", 10, 3)
    settings = EngineConfig(batch_size=4, context_length=bench.loaded.context_length)
    first, again = (bench.run_file(tmp_path / "rows.jsonl", settings, 10, 60) for _ in range(2))
    assert first.valid == 10 and all(first.texts)
    assert first.texts == again.texts  # a run leaves nothing behind that changes the next
    assert len(first.steps) == first.statistics.forward_passes == first.counts.steps
    assert 0 < first.passes_per_token <= 1
    assert 0 <= first.padding < 1
    assert sum(step.seconds for step in first.steps) < first.seconds
    assert all(0 < step.forward_seconds < step.seconds for step in first.steps)
    assert all(step.tokens >= step.logits for step in first.steps)
    assert bench.runner.pool.slots == 0


def test_the_floor_of_a_model_counts_its_weights(tiny_model: Path) -> None:  # noqa: F811
    bench = Bench.load(str(tiny_model), "f32")
    shape = Shape.of(bench.loaded.model, torch.float32, 1)
    assert shape.layer_weights == 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert shape.head_weights == 64 * 480


def outcome(seconds: float, texts: list[str]) -> Outcome:
    return Outcome(seconds, 2 * seconds, 0.0, 10, texts, {})


def test_peers_are_compared_by_medians_and_their_worst_round_counts_for_validity() -> None:
    good = (
        '{"name":"a","email":"b","company":"c","category":"sales","priority":"low","order_id":"AB-123456",'
        '"amount_usd":1,"needs_reply":true,"summary":"s"}'
    )
    ours = medians_of([outcome(seconds, [good, good]) for seconds in (1.0, 9.0, 2.0)])
    theirs = medians_of([outcome(6.0, [good, good]), outcome(6.0, [good, "{}"]), outcome(7.0, [good, good])])
    assert (ours.seconds, ours.valid, theirs.seconds, theirs.valid) == (2.0, 2, 6.0, 1)
    lines = table({Contestant("jfbatch", "f32"): ours, Contestant("vllm", "f32"): theirs}, 2)
    assert "| vLLM (CPU build), f32 | 6.0 | 0.33 | 12.0 | 10 | 1/2 | 3.00 | 3.00 |" in lines[-1]


def test_llama_runs_its_own_weights_and_the_others_each_type() -> None:
    found = contestants(["vllm", "llama"], ["f32", "bf16"])
    assert [(each.name, each.dtype) for each in found] == [
        *(("jfbatch", "f32"), ("jfbatch", "bf16"), ("vllm", "f32"), ("vllm", "bf16"), ("llama", "q4_1")),
    ]


def test_an_outcome_survives_its_file(tmp_path: Path) -> None:
    measured = Meter().stop(["ä"], 3, {"torch": "1"})
    measured.write(tmp_path / "outcome.json")
    assert Outcome.read(tmp_path / "outcome.json") == measured
    assert measured.seconds > 0 and measured.cpu_seconds >= 0


def test_beside_a_device_of_its_own_the_host_goes_ahead_and_writes_the_same() -> None:
    grammar = ahead.schema_grammar()
    _, alone, expected = ahead.run(grammar, ahead.Device(1e-4), False, True, 12)
    _, engine, outputs = ahead.run(grammar, ahead.Device(1e-4), True, True, 12)
    assert outputs == expected and len(outputs) == 12
    assert engine.statistics.rows_ahead > 100 and alone.statistics.rows_ahead == 0


@pytest.mark.parametrize("mode", [(), ("1", "noise"), ("40",)])
def test_memory_is_measured_with_stand_ins_that_the_job_can_use(mode: tuple[str, ...]) -> None:
    command = [sys.executable, "bench/memory.py", "200", *mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exit code 0; 200 rows")
