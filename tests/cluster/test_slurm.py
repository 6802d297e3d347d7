"""`jfbatch slurm` and jobs that have themselves requeued, against pretended commands of Slurm.

What Slurm itself makes of the scripts is looked at by `make test-slurm`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jfbatch.cluster.requeue import MOST_IDLE_RESTARTS, job_id, requeue
from jfbatch.cluster.slurm import SlurmRequest, seconds_of
from jfbatch.cluster.start import with_files_of_the_shard
from jfbatch.config import RunConfig
from jfbatch.errors import UsageError
from jfbatch.rows.row import Row
from jfbatch.rows.shard import Shard
from tests.rows.jobs import answer, open_store
from tests.run_command import ROOT, invoke, write_lines

ELEMENT = {"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "37", "SLURM_ARRAY_TASK_ID": "4"}


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of pretended commands before all others; each writes its arguments to calls.jsonl."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def pretend(commands: Path, name: str, says: str = "", code: int = 0) -> None:
    script = f"""#!{sys.executable}
import json, sys
open({str(commands / "calls.jsonl")!r}, "a").write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
print({says!r})
sys.exit({code})
"""
    (commands / name).write_text(script)
    (commands / name).chmod(0o755)


def calls(commands: Path) -> list[list[str]]:
    path = commands / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def directives(script: Path) -> list[list[str]]:
    """The options in a script's #SBATCH lines; sbatch splits them as a shell would."""
    lines = script.read_text().splitlines()
    return [shlex.split(line.removeprefix("#SBATCH ")) for line in lines if line.startswith("#SBATCH ")]


def scripts_of(directory: Path, *flags: str, output: str = "t.parquet", code: int = 0) -> Path:
    """Write the scripts of a small job; the directory they are in."""
    write_lines(directory / "rows.jsonl", [{"prompt": "a"}])
    arguments = ["slurm", str(directory / "rows.jsonl"), "-o", str(directory / output), "--regex", "a+"]
    assert invoke(*arguments, "--array", "8", "--time", "4:00:00", *flags) == code
    return directory / f"{output}.slurm"


# -- the scripts --------------------------------------------------------------------------------------------


def test_the_array_script_has_what_a_real_slurm_has_taught(tmp_path: Path) -> None:
    made = scripts_of(tmp_path, "--partition", "gpu", "--gpus", "2", "--temperature", "0.5", "--jump", "off")
    options = directives(made / "array.sh")
    assert all(len(option) == 1 for option in options if "job-name" not in option[0])
    flat = [option[0] for option in options]
    assert {
        "--array=1-8",
        "--gpus=2",
        "--time=4:00:00",
        "--partition=gpu",
        "--signal=B:TERM@120",
        "--requeue",
        "--open-mode=append",
        f"--output={made}/array-%a.log",
    } <= set(flat)
    command = (made / "array.sh").read_text().split("exec ")[1].replace("\\\n", " ")
    words = shlex.split(command)
    assert words[:4] == [sys.executable, "-m", "jfbatch", "run"]
    assert words[-3:] == ["--shard", "$SLURM_ARRAY_TASK_ID/8", "--requeue"]
    assert [word for word in words if word in ("--temperature", "0.5", "--jump", "off")] == [
        "--temperature",
        "0.5",
        "--jump",
        "off",
    ]
    # Two GPUs are two workers.
    assert words[words.index("--devices") + 1] == "all"


def test_the_merge_waits_for_all_elements_however_they_end(tmp_path: Path) -> None:
    made = scripts_of(tmp_path)
    assert ["--kill-on-invalid-dep=yes"] in directives(made / "merge.sh")
    assert not any(option[0].startswith("--gpus") for option in directives(made / "merge.sh"))
    assert '--dependency="afterany:${array%%;*}"' in (made / "submit.sh").read_text()


@pytest.mark.parametrize("name", ["a b", "it's", 'a "b" $c', "100%", "back\\slash", "ü"])
def test_names_with_odd_characters_stay_one_word_each(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    made = scripts_of(directory, output=f"{name}.parquet")
    for script in made.glob("*.sh"):
        assert subprocess.run(["bash", "-n", script]).returncode == 0
    (log,) = [option for option in directives(made / "array.sh") if option[0].startswith("--output")]
    assert log == [f"--output={made}/array-%a.log".replace("%", "%%").replace("%%a.log", "%a.log")]
    words = shlex.split((made / "merge.sh").read_text().split("exec ")[1])
    assert words[3:] == ["merge", str(directory / f"{name}.parquet")]


def test_the_script_says_again_what_flags_and_environment_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JFBATCH_KEEP", "tag,other")
    monkeypatch.setenv("JFBATCH_RAW", "true")
    (tmp_path / "c.yaml").write_text("seed: 7\n")
    made = scripts_of(tmp_path, "--config", str(tmp_path / "c.yaml"), "--no-strict", "--flush-rows", "9")
    words = shlex.split((made / "array.sh").read_text().split("exec ")[1].replace("\\\n", " "))
    for pair in (["--keep", "tag,other"], ["--config", str(tmp_path / "c.yaml")], ["--flush-rows", "9"]):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert "--raw" in words and "--no-strict" in words and "--seed" not in words


def test_what_follows_the_dashes_goes_to_sbatch(tmp_path: Path, commands: Path) -> None:
    pretend(commands, "sbatch", "17;cluster")
    made = scripts_of(tmp_path, "--submit", "--", "--account=lab", "--comment", "two words")
    extra = ["--account=lab", "--comment", "two words"]
    assert calls(commands) == [
        ["sbatch", "--parsable", *extra, str(made / "array.sh")],
        ["sbatch", "--parsable", *extra, "--dependency=afterany:17", str(made / "merge.sh")],
    ]


def test_a_submission_that_fails_is_not_followed_by_a_merge(tmp_path: Path, commands: Path) -> None:
    pretend(commands, "sbatch", "", code=3)
    scripts_of(tmp_path, "--submit", code=3)
    assert len(calls(commands)) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--array", "0"], "no number of shards"),
        (["--array", "1,3,5"], "no number of shards"),
        (["--time", "soon"], "--time: 'soon'"),
        (["--time", "0"], "--time"),
        (["--", "--array=3"], "--array=3: jfbatch sets this itself"),
        (["--", "--signal=USR1"], "jfbatch sets this itself"),
        (["--", "-a3"], "jfbatch sets this itself"),
        (["--", "-dafterok:1"], "jfbatch sets this itself"),
        (["--", "job.sh"], "not a script"),
        (["--shard", "1/8"], "--shard"),
        (["--regex", "("], "--regex"),
        (["--gpus", "-1"], "--gpus"),
        (["--keep-parts"], "--keep-parts"),
        (["--gpus", "2", "--profile", "trace.json"], "--profile is of one process"),
        (["--gpus", "2", "--device", "cuda"], "either --device or --devices"),
        (["--partition", "a\necho hi"], "--partition: 'a\\necho hi' has a control character"),
    ],
)
def test_mistakes_are_told_before_anything_waits_in_a_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert not scripts_of(tmp_path, *flags, code=2).exists()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("shard", ["auto", "1/8"])
def test_a_shard_in_the_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shard: str
) -> None:
    monkeypatch.setenv("JFBATCH_SHARD", shard)
    assert not scripts_of(tmp_path, code=2).exists()
    assert f"leave out shard ({shard})" in capsys.readouterr().err


def test_an_array_of_another_size_than_the_shards_that_are_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(tmp_path / "t.parquet", shard=Shard(1, 6)) as store:
        store.add(answer(Row(index=0, place="in:1", line=1, key="id:1", content=bytes(16), prompt="a")))
    assert not scripts_of(tmp_path, code=2).exists()
    assert "begun in 6 shards by row, which --array 8 by row does not continue" in capsys.readouterr().err
    assert not scripts_of(tmp_path, "--array", "3", code=2).exists()
    assert not scripts_of(tmp_path, "--array", "6", "--shard-by", "pattern", code=2).exists()
    # Each of three elements with two GPUs has two of the six.
    assert scripts_of(tmp_path, "--array", "3", "--gpus", "2").exists()
    assert scripts_of(tmp_path, "--array", "6").exists()


def test_elements_do_not_write_one_anothers_files(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("of an earlier start")
    given = RunConfig(shard="1/2", summary_json=tmp_path / "summary.json", profile=tmp_path / "trace")
    config = with_files_of_the_shard(given)
    assert config.summary_json == tmp_path / "summary.1-of-2.json"
    assert config.profile == tmp_path / "trace.1-of-2"
    alone = RunConfig(summary_json=tmp_path / "summary.json")
    assert with_files_of_the_shard(alone) == alone
    stream = RunConfig(shard="1/2", summary_json=Path("/dev/stderr"))
    assert with_files_of_the_shard(stream) == stream


def test_standard_input_cannot_be_cut_into_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "t.parquet")
    assert invoke("slurm", "-", "-o", output, "--array", "2", "--time", "10") == 2
    assert invoke("run", "-", "-o", output, "--shard", "1/2") == 2
    assert invoke("run", "-", "-o", output, "--devices", "cpu:2") == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and all("name a file" in line for line in told)


def test_where_there_is_no_slurm_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = scripts_of(tmp_path, "--submit", code=2)
    assert f"run {made / 'submit.sh'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 600), ("10:30", 630), ("4:00:00", 14400), ("2-0", 172800), ("1-2:03", 93780), ("1-0:0:5", 86405)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


def test_a_short_job_is_not_told_to_stop_at_its_start() -> None:
    assert SlurmRequest.parse("8", 1, "4:00:00").signal_seconds == 120
    assert SlurmRequest.parse("8%2", 1, "2").signal_seconds == 30
    assert SlurmRequest.parse("8", 1, "0:01").signal_seconds == 15  # Slurm makes it a minute


@pytest.mark.parametrize("command", ["slurm", "merge"])
def test_neither_command_loads_torch(tmp_path: Path, command: str) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    arguments = {
        "slurm": ["slurm", "rows.jsonl", "-o", "t.parquet", "--regex", "a", "--array", "2", "--time", "9"],
        "merge": ["merge", "t.parquet"],
    }[command]
    code = f"""
import sys
from jfbatch import cli
try:
    cli.main({arguments!r})
except SystemExit:
    pass
print([name for name in ("torch", "transformers", "ray") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


# -- running again ------------------------------------------------------------------------------------------


def test_an_element_is_known_by_its_array_and_task() -> None:
    assert job_id(ELEMENT) == "37_4"
    assert job_id({"SLURM_JOB_ID": "41"}) == "41"
    with pytest.raises(UsageError, match="no Slurm job"):
        job_id({})


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED", "COMPLETING", "PREEMPTED"])
def test_only_a_running_job_is_requeued(
    commands: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(commands, "scontrol", f"JobId=41 ArrayJobId=37\\n   JobState={state} Reason=None\\n")
    assert requeue(True, ELEMENT) == (state == "RUNNING")
    expected: list[list[Any]] = [["scontrol", "show", "job", "37_4"]]
    if state == "RUNNING":
        expected.append(["scontrol", "requeue", "37_4"])
    assert calls(commands) == expected
    assert ("requeueing job 37_4" if state == "RUNNING" else f"it is {state}") in capsys.readouterr().err


def test_an_end_by_force_requeues_as_well(commands: Path) -> None:
    """Signals calls from its timer's thread, in which no handler can be set."""
    pretend(commands, "scontrol", "JobState=RUNNING")
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(requeue(True, ELEMENT)))
    thread.start()
    thread.join()
    assert answers == [True]


def test_a_run_that_cannot_stop_in_time_is_requeued_before_it_is_ended(
    commands: Path, tmp_path: Path
) -> None:
    pretend(commands, "scontrol", "JobState=RUNNING")
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    code = """
import os, signal, time
from jfbatch import cli, job
def stuck(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        time.sleep(0.1)
job.decode = stuck
cli.main(["run", "rows.jsonl", "-o", "t.parquet", "--regex", "a", "--requeue", "--grace", "0.2", "-q"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **ELEMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 143, done.stderr
    assert calls(commands)[-1] == ["scontrol", "requeue", "37_4"]


def test_a_job_that_gets_nowhere_is_not_requeued_for_ever(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(commands, "scontrol", "JobState=RUNNING")
    often = {**ELEMENT, "SLURM_RESTART_COUNT": str(MOST_IDLE_RESTARTS)}
    assert not requeue(False, often)
    assert calls(commands) == []
    assert "give it more --time" in capsys.readouterr().err
    assert requeue(True, often)
    assert requeue(False, ELEMENT)


def test_a_requeue_that_fails_says_how_to_continue(
    commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(commands, "scontrol", "", code=1)
    assert not requeue(True, ELEMENT)
    monkeypatch.setenv("PATH", str(commands / "nothing"))
    assert not requeue(True, ELEMENT)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all("`scontrol requeue 37_4` continues it" in line for line in told)


def test_requeue_outside_of_slurm_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    arguments = ["run", tmp_path / "rows.jsonl", "-o", tmp_path / "t.parquet", "--regex", "a", "--requeue"]
    assert invoke(*arguments) == 2
    assert "SLURM_JOB_ID is not set" in capsys.readouterr().err
