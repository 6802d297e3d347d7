"""The command line: flags reach RunConfig, errors are one line, nothing heavy is imported for help."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import jfbatch
from jfbatch import cli
from jfbatch.config import RunConfig, settings
from jfbatch.errors import InputError, ModelError, OutputError, UsageError

ROOT = Path(__file__).parent.parent


def invoke(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the job that notes the configuration and answers as told."""
    told: Any = SimpleNamespace(seen=[], answer=0)

    def run(config: RunConfig, _surroundings: object = None) -> int:
        told.seen.append(config)
        if isinstance(told.answer, BaseException):
            raise told.answer
        return int(told.answer)

    monkeypatch.setattr("jfbatch.job.run", run)
    for variable in [name for name in os.environ if name.startswith("JFBATCH_")]:
        monkeypatch.delenv(variable)
    return told


def test_flags_reach_the_configuration(job: Any) -> None:
    code = invoke(
        *("run", "a.jsonl", "b.jsonl", "-o", "t.parquet", "--schema", "s.json", "--keep", "x,y", "--flatten"),
        *("--max-tokens", "99", "--jump", "off", "-m", "some/model", "--kv-memory", "1GiB", "-q", "--no-raw"),
    )
    assert code == 0
    (config,) = job.seen
    assert config == RunConfig(
        inputs=("a.jsonl", "b.jsonl"),
        output=Path("t.parquet"),
        schema_file=Path("s.json"),
        keep=("x", "y"),
        flatten=True,
        max_tokens=99,
        jump=False,
        model="some/model",
        kv_memory=2**30,
        quiet=True,
    )


def test_config_file_and_environment_reach_the_configuration(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("inputs: [a.jsonl]\noutput: t.parquet\nflatten: true\nseed: 1\n")
    monkeypatch.setenv("JFBATCH_SEED", "2")
    assert invoke("run", "--config", str(file), "--no-flatten") == 0
    (config,) = job.seen
    assert (config.inputs, config.seed, config.flatten) == (("a.jsonl",), 2, False)


@pytest.mark.parametrize("answer", [0, 1, 65, 143])
def test_the_jobs_exit_code_is_the_processs(job: Any, answer: int) -> None:
    job.answer = answer
    assert invoke("run", "a.jsonl", "-o", "t.parquet") == answer


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no schema file s.json"), 2),
        (ModelError("no model\nhere"), 2),
        (InputError("a.jsonl:3", "truncated"), 65),
        (OutputError("disk full"), 74),
    ],
)
def test_errors_are_one_line_on_stderr(
    job: Any, error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job.answer = error
    assert invoke("run", "a.jsonl", "-o", "t.parquet") == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jfbatch: ")
    assert " ".join(str(error).split()) in captured.err


def test_an_interrupt_exits_130_without_a_traceback(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job.answer = KeyboardInterrupt()
    assert invoke("run", "a.jsonl", "-o", "t.parquet") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_fault_of_the_program_is_not_hidden(job: Any) -> None:
    job.answer = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "a.jsonl", "-o", "t.parquet"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing command"),
        (["rum"], "rum"),
        (["run", "a", "--modle", "x"], "--model"),
        (["run", "a", "--max-tokens"], "--max-tokens"),
        (["run", "a", "-o", "t", "--max-tokens", "x"], "--max-tokens"),
        (["run", "-o", "t.parquet"], "no input"),
        (["run", "a.jsonl"], "-o"),
        (["run", "a", "-o", "t", "--config", "none.yaml"], "none.yaml"),
        (["show", "none.parquet"], "none.parquet"),
    ],
)
def test_usage_mistakes_are_one_line_and_exit_2(
    job: Any, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(*arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert job.seen == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("--version") == 0
    assert capsys.readouterr().out == f"jfbatch {jfbatch.__version__}\n"


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("run", "--help") == 0
    out = capsys.readouterr().out
    assert [setting.flag for setting in settings() if setting.flag not in out] == []


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom jfbatch import cli\ntry: cli.main(['run', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'numba', 'numpy', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    assert time.monotonic() - start < 3  # 0.3 s here; the margin is for a busy machine


# -- show ---------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    rows = [
        {
            "id": f"row-{i}",
            "status": "ok",
            "value": {"name": "[bold]Zoë", "n": i},
            "error": None,
            "sampled_tokens": 7,
        }
        for i in range(30)
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_show_prints_the_first_rows_on_stdout(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert invoke("show", str(table), "--rows", "3") == 0
    out = capsys.readouterr().out
    assert '{"name": "[bold]Zoë", "n": 2}' in out
    assert "row-3" not in out
    assert "3 of 30 rows" in out
    assert "sampled_tokens" not in out
    assert "error" not in out  # nothing in it


def test_show_prints_the_columns_asked_for(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("show", str(table), "--columns", "id,sampled_tokens") == 0
    out = capsys.readouterr().out
    assert "sampled_tokens" in out
    assert "status" not in out
    assert invoke("show", str(table), "--columns", "nope") == 2
    assert "no column 'nope'; the table has id, status" in capsys.readouterr().err


def test_show_takes_names_that_are_not_utf8(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = table.rename(os.fsdecode(os.fsencode(table.parent) + b"/t\xff.parquet"))
    assert invoke("show", str(odd), "--rows", "1") == 0
    assert capsys.readouterr().out


def test_show_of_something_else_is_an_input_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("no table")
    assert invoke("show", str(path)) == 65
    assert "cannot be read as a Parquet table" in capsys.readouterr().err


def test_show_of_an_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"id": pa.array([], pa.string())}), path)
    assert invoke("show", str(path)) == 0
    assert "0 of 0 rows" in capsys.readouterr().out
