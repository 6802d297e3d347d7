"""`make test-slurm`: an array of shards on a real Slurm, with elements stopped, requeued and preempted.

Not collected by `make test`: it starts daemons, needs root, and Debian's Slurm packages, which it installs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.run_command import ROOT, write_lines
from tests.tiny_model import save_tiny_model

ROWS = 120
COMPARED = ["id", "row", "status", "text", "value", "error", "prompt_tokens", "completion_tokens"]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "colour", "number"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Cluster:
    """A running Slurm; commands see it through `environment`."""

    environment: dict[str, str]

    def call(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [str(argument) for argument in arguments],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, name: str) -> dict[str, str]:
        """What scontrol says of a job or an element; {} where it knows none."""
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", name],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        lines = done.stdout.splitlines()
        return dict(re.findall(r"(\w+)=(\S*)", lines[0])) if done.returncode == 0 and lines else {}

    def state(self, name: str) -> str:
        return self.job(name).get("JobState", "none")

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited in vain: {what}\n{self.call('squeue', '--all')}")
            time.sleep(0.3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("slurm")
    script = Path(__file__).with_name("single_node.sh")
    started = subprocess.run(
        ["bash", str(script), "start", str(directory), "4"], stdout=subprocess.PIPE, text=True, timeout=300
    )
    try:
        assert started.returncode == 0, "no Slurm: see above"
        names = [name for name in os.environ if not name.startswith(("SLURM", "SBATCH", "JFBATCH_"))]
        environment = {name: os.environ[name] for name in names}
        environment |= {"SLURM_CONF": started.stdout.split()[-1], "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        yield Cluster(environment)
    finally:
        subprocess.run(["bash", str(script), "stop", str(directory)], timeout=120)


@dataclass(frozen=True)
class ArrayJob:
    """A job of jfbatch, submitted as an array of shards."""

    cluster: Cluster
    directory: Path
    array: str
    merge: str

    @property
    def output(self) -> Path:
        return self.directory / "a table.parquet"

    def parts(self, shard: int) -> int:
        return len(list(self.output.with_name("a table.parquet.shards").glob(f"{shard}-of-4/part-*")))

    def log(self, name: str) -> str:
        path = self.output.with_name("a table.parquet.slurm") / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def element(self, shard: int) -> dict[str, str]:
        return self.cluster.job(f"{self.array}_{shard}")

    def wait_for_the_end(self, seconds: float) -> None:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        self.cluster.wait("the merge", lambda: self.cluster.state(self.merge) in ends, seconds)


def jfbatch(cluster: Cluster, directory: Path, *arguments: str) -> str:
    return cluster.call(sys.executable, "-m", "jfbatch", *arguments, cwd=directory)


def submit(cluster: Cluster, directory: Path, flags: list[str], *sbatch: str) -> ArrayJob:
    request = ["--array", "4", "--gpus", "0", "--time", "20:00", "--submit", "--", *sbatch]
    arguments = ["slurm", "rows.jsonl", "-o", "a table.parquet", *flags, *request]
    told = jfbatch(cluster, directory, *arguments)
    found = re.search(r"array job (\d+), merge job (\d+)", told)
    assert found, told
    return ArrayJob(cluster, directory, found[1], found[2])


def prepare(directory: Path, rows: int) -> None:
    people = [{"id": f"r{n}", "prompt": f"Invent a person for place {n}."} for n in range(rows)]
    write_lines(directory / "rows.jsonl", people)
    (directory / "schema.json").write_text(json.dumps(PERSON))


def test_elements_stopped_requeued_and_preempted_give_the_table_of_one_machine(
    cluster: Cluster, tmp_path: Path
) -> None:
    prepare(tmp_path, ROWS)
    flags = ["--schema", "schema.json", "--max-tokens", "40", "--threads", "1", "--batch-size", "2"]
    # This makes the shared copy of the demo model as well.
    jfbatch(cluster, tmp_path, "run", "rows.jsonl", "-o", "alone.parquet", *flags[:-1], "32", "-q")
    alone = pq.read_table(tmp_path / "alone.parquet").select(COMPARED)
    assert alone.num_rows == ROWS

    job = submit(cluster, tmp_path, [*flags, "--flush-rows", "2"], "--comment=a test")
    cluster.wait("a part of each", lambda: all(job.parts(shard) for shard in (1, 2, 3, 4)), 120)
    cluster.call("scancel", "--batch", "--signal=TERM", f"{job.array}_1")
    cluster.call("scontrol", "requeue", f"{job.array}_2")
    cluster.wait("the first to be requeued", lambda: job.element(1).get("Restarts") == "1", 60)
    # Two elements are waiting, so the two others leave two CPUs: for three one of them has to go.
    cluster.call("sbatch", "-p", "urgent", "-c", "3", "-o", "/dev/null", "--wrap", "sleep 2")
    preempted = lambda: [n for n in (3, 4) if job.element(n).get("Restarts", "0") != "0"]  # noqa: E731
    cluster.wait("one to be preempted", lambda: bool(preempted()), 60)
    job.wait_for_the_end(300)

    logs = {shard: job.log(f"array-{shard}") for shard in (1, 2, 3, 4)}
    assert cluster.state(job.merge) == "COMPLETED", job.log("merge") + str(logs)
    assert pq.read_table(job.output).select(COMPARED).equals(alone)
    assert f"requeueing job {job.array}_1" in logs[1]
    for shard in (1, 2, preempted()[0]):
        assert job.element(shard)["Restarts"] != "0"
        starts = re.findall(rf"^shard {shard} on \S+, start (\d)$", logs[shard], re.MULTILINE)
        assert starts[:2] == ["1", "2"], "the log of the first start is kept"
        assert "kept from an earlier start" in logs[shard]
    assert f"{ROWS} rows of 4 shards: {ROWS} ok" in job.log("merge")


def test_a_cancelled_element_stays_cancelled_and_the_merge_says_what_is_missing(
    cluster: Cluster, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "model")
    prepare(tmp_path, 400)
    flags = ["--schema", "schema.json", "--threads", "1", "--batch-size", "1", "--flush-rows", "1"]
    job = submit(cluster, tmp_path, [*flags, "--model", "model"])
    cluster.wait("a part of the third", lambda: job.parts(3) > 0, 120)
    cluster.call("scancel", f"{job.array}_3")
    job.wait_for_the_end(180)
    assert job.element(3)["JobState"] == "CANCELLED"
    assert job.element(3)["Restarts"] == "0"
    assert cluster.state(job.merge) == "FAILED"
    assert not job.output.exists()
    told = job.log("merge").splitlines()
    assert len(told) == 2 and told[0].startswith("jfbatch: shard 3/4 stopped before its end: ")
    # Submitting only that element again, and then the merge, gives the table.
    scripts = tmp_path / "a table.parquet.slurm"
    again = cluster.call("sbatch", "--parsable", "--array=3", scripts / "array.sh").strip()
    merge = cluster.call("sbatch", "--parsable", f"--dependency=afterany:{again}", scripts / "merge.sh")
    cluster.wait("the second merge", lambda: cluster.state(merge.strip()) == "COMPLETED", 120)
    assert pq.read_table(job.output).column("row").to_pylist() == list(range(400))
