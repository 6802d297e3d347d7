"""The runs on one model: constrained and free, jumping and drafts on and off, and how busy the device is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench.first  # noqa: F401 - before torch

# isort: split

import torch
from torch.profiler import ProfilerActivity, profile

from bench import workload
from bench.decoding import PATTERN, Bench, Measured
from bench.hardware import Hardware, Shape
from jfbatch.engine.engine import EngineConfig
from jfbatch.engine.memory import spare_memory
from jfbatch.feed import FREE_TEXT


@dataclass(frozen=True)
class Case:
    """One run's settings."""

    rows: int
    constrained: bool = True
    jump: bool = True
    drafts: bool = True

    @property
    def title(self) -> str:
        if not self.constrained:
            return f"free text, drafts {'on' if self.drafts else 'off'}"
        switches = ("jump", self.jump), ("drafts", self.drafts)
        return "schema, " + ", ".join(f"{name} {'on' if on else 'off'}" for name, on in switches)


def cases(rows: int) -> list[Case]:
    """What is run at one number of rows, what matters most first."""
    return [
        Case(rows),
        Case(rows, drafts=False),
        Case(rows, jump=False, drafts=False),
        Case(rows, constrained=False, drafts=False),
        Case(rows, constrained=False),
        Case(rows, jump=False),
    ]


@dataclass(frozen=True)
class Figures:
    """A run: milliseconds of a decode step, the floor's share of it, the share of its positions that held
    nothing, the share of all steps that were replayed as graphs, the graphs recorded for that and the
    seconds it took, and what came out."""

    model: str
    case: str
    rows: int
    rows_per_second: float
    tokens_per_second: float
    steps: int
    passes_per_token: float | None
    step_ms: float
    floor: float | None
    padding: float | None
    replayed: float | None
    graphs: int | None
    recording_seconds: float | None
    valid: int | None


def run_case(bench: Bench, case: Case, hardware: Hardware, max_tokens: int, file: Path) -> Figures:
    """Run a case on a file of rows."""
    measured = run(bench, case, max_tokens, file)
    decode = measured.decode_steps or measured.steps
    spent = sum(step.seconds for step in decode)
    shape = Shape.of(bench.loaded.model, bench.dtype, bench.runner.pool.bytes_per_token)
    return Figures(
        model=bench.loaded.name,
        case=case.title,
        rows=case.rows,
        rows_per_second=measured.rows_per_second,
        tokens_per_second=measured.tokens_per_second,
        steps=len(measured.steps),
        passes_per_token=measured.passes_per_token,
        step_ms=1e3 * spent / len(decode),
        floor=sum(shape.work(step.segments).seconds(hardware) for step in decode) / spent,
        padding=measured.padding if measured.decode_steps else None,
        replayed=measured.counts.replayed / measured.counts.steps,
        graphs=measured.counts.recorded,
        recording_seconds=measured.counts.recording_seconds,
        valid=measured.valid if case.constrained else None,
    )


def run(bench: Bench, case: Case, max_tokens: int, file: Path) -> Measured:
    """The rows of a file under a case's settings."""
    settings = EngineConfig(
        batch_size=case.rows,
        kv_memory=spare_memory(bench.runner.device),
        context_length=bench.loaded.context_length,
        jump=case.jump,
        drafts=case.drafts,
        repetition_stop=False,  # random weights repeat themselves
    )
    workload.write_rows(file, case.rows)
    return bench.run_file(file, settings, case.rows, max_tokens, PATTERN if case.constrained else FREE_TEXT)


def waiting_share(action: Callable[[], object], device: torch.device) -> float:
    """The share of an action's time in which no kernel ran on the device (on a CPU: no operator)."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        started = time.perf_counter()
        action()
        seconds = time.perf_counter() - started
    attribute = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    busy = sum(getattr(event, attribute) for event in recorded.key_averages()) * 1e-6
    return max(1 - busy / seconds, 0.0)


def transformers_with_xgrammar(loaded: Any, rows: int, max_tokens: int) -> Figures | None:
    """transformers' generate with XGrammar on the same model and rows; None where it is not installed.

    Run it before the model is given to a Runner, which changes its attention.
    """
    xgrammar: Any = None
    with suppress(ImportError):
        import xgrammar
        import xgrammar.contrib.hf
    if xgrammar is None:
        return None
    model, tokenizer = loaded.model, loaded.tokenizer
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    inputs = tokenizer(workload.questions(rows), return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}

    def generate(tokens: int) -> Any:
        compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        grammar = compiler.compile_json_schema(
            json.dumps(workload.SCHEMA), any_whitespace=False, separators=(",", ":"), strict_mode=True
        )
        with torch.inference_mode():
            return model.generate(
                **inputs,
                max_new_tokens=tokens,
                do_sample=False,
                logits_processor=[xgrammar.contrib.hf.LogitsProcessor(grammar)],
            )

    generate(2)
    started = time.perf_counter()
    output = generate(max_tokens)[:, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - started
    tokens = int((output != tokenizer.pad_token_id).sum())
    return Figures(
        model=loaded.name,
        case="transformers + XGrammar",
        rows=rows,
        rows_per_second=rows / seconds,
        tokens_per_second=tokens / seconds,
        steps=output.shape[1],
        passes_per_token=None,
        step_ms=1e3 * seconds / output.shape[1],
        floor=None,
        padding=None,
        replayed=None,
        graphs=None,
        recording_seconds=None,
        valid=None,
    )
