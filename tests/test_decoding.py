"""What a run needs once there is something to decode: the runner and the engine that settings ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jfbatch.config import load_config
from jfbatch.decoding import make_engine, make_runner, vocabulary_of
from jfbatch.engine import memory
from jfbatch.engine.memory import CPU_SHARE
from jfbatch.engine.model import load_model
from tests.run_command import invoke, write_lines
from tests.tiny_model import tiny_model  # noqa: F401 - a fixture


@pytest.mark.parametrize(
    ("setting", "dtype"), [("auto", torch.bfloat16), ("f32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_the_kv_cache_has_the_type_asked_for(tiny_model: Path, setting: str, dtype: torch.dtype) -> None:  # noqa: F811
    config = load_config({"kv_dtype": setting, "model": str(tiny_model)}, environment={})
    assert make_runner(config, load_model(config.model, "cpu")).pool.dtype == dtype


def test_the_kv_cache_may_take_what_is_free_or_what_was_said(
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {1 << 20} kB\n")
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    loaded = load_model(str(tiny_model), "cpu")
    vocabulary = vocabulary_of(loaded)
    for given, expected in (({}, int((1 << 30) * CPU_SHARE)), ({"kv_memory": "300MB"}, 300_000_000)):
        config = load_config({"model": str(tiny_model), **given}, environment={})
        engine = make_engine(config, loaded, make_runner(config, loaded), vocabulary)
        assert engine.config.kv_memory == expected


def test_another_type_of_kv_cache_does_not_join_rows_of_an_earlier_start(
    tiny_model: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"id": "a", "prompt": "red or green?"}])
    job = [
        *("run", str(tmp_path / "rows.jsonl"), "--choice", json.dumps("red") + ",green", "-q", "--raw"),
        *("-o", str(tmp_path / "out.parquet"), "--model", str(tiny_model), "--device", "cpu"),
    ]
    assert invoke(*job, "--kv-dtype", "f32") == 0
    assert invoke(*job, "--kv-dtype", "bf16") == 2
    assert "kv-dtype" in capsys.readouterr().err
