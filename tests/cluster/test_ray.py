"""The same rows through Ray: as a Dataset and as a command. Skipped where ray is not installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jfbatch.cluster.ray import StructuredGenerator, check_resources, run_shards
from jfbatch.config import load_config
from jfbatch.errors import UsageError
from tests.run_command import ROOT, Job, invoke
from tests.soak.kill_loop import COMPARED, SCHEMA, prepare

ROWS = 24


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job in one process."""
    job = Job(tmp_path_factory.mktemp("alone"), tiny_model, tmp_path_factory.mktemp("cache"))
    assert len(job.run(None, *prepare(job, ROWS))) == ROWS
    return job


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray cluster of this machine alone, with three CPUs as Ray counts them."""
    module = pytest.importorskip("ray")
    module.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    yield module
    module.shutdown()


def settings(job: Job) -> dict[str, Any]:
    return {"model": str(job.model), "cache_dir": str(job.cache), "threads": 1, "max_tokens": 60}


def records(job: Job) -> list[dict[str, Any]]:
    lines = job.input.read_text().splitlines()
    return [{"row": number, **json.loads(line)} for number, line in enumerate(lines)]


@pytest.mark.slow
def test_a_dataset_gives_the_rows_and_columns_of_a_run(ray: Any, alone: Job) -> None:
    dataset = ray.data.from_items(records(alone), override_num_blocks=4)
    mapped = dataset.map_batches(
        StructuredGenerator,
        fn_constructor_kwargs={"schema": SCHEMA, **settings(alone)},
        batch_format="pyarrow",
        batch_size=7,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    table = pa.concat_tables(ray.get(mapped.to_arrow_refs())).sort_by("row")
    expected = alone.table().replace_schema_metadata(None)
    assert table.schema.equals(expected.schema)
    assert table.select(COMPARED).equals(expected.select(COMPARED))


@pytest.mark.slow
def test_the_command_gives_the_table_of_a_run(ray: Any, alone: Job, tmp_path: Path) -> None:
    job = Job(tmp_path, alone.model, alone.cache)
    flags = prepare(job, ROWS)
    arguments = ["ray", *job.arguments(*flags)[1:], "-q"]
    assert invoke(*arguments, "--actors", "2") == 0
    assert job.table().select(COMPARED).equals(alone.table().select(COMPARED))
    assert sorted(path.name for path in job.directory.glob("table*")) == [
        "table.parquet",
        "table.parquet.journal",
    ]
    assert invoke(*arguments, "--actors", "5") == 2  # more than there can ever be: told, not waited for


def test_a_generator_keeps_the_order_and_the_places_of_a_batch(alone: Job) -> None:
    generator = StructuredGenerator(schema=SCHEMA, keep=["tag"], **settings(alone))
    rows = [{"id": f"r{n}", "prompt": f"Tell me about {n}.", "tag": str(n)} for n in range(5)]
    rows[2]["prompt"] = None  # type: ignore[assignment]
    table = generator(pa.Table.from_pylist(rows))
    assert table.column("id").to_pylist() == [f"r{n}" for n in range(5)]
    assert table.column("row").to_pylist() == [None] * 5
    assert table.column("status").to_pylist() == ["ok", "ok", "invalid_input", "ok", "ok"]
    assert table.column("tag").to_pylist() == list("01234")
    texts = alone.table().column("text").to_pylist()
    assert table.column("text").to_pylist() == [*texts[:2], None, *texts[3:5]]
    # The next batch, as a dict of columns, by the same model.
    again = generator({"prompt": ["Tell me about 7.", "Tell me about 7."], "id": ["a", "a"], "row": [7, 8]})
    assert again.column("text").to_pylist() == [texts[7]] * 2
    assert again.column("row").to_pylist() == [7, 8]
    assert generator(pa.Table.from_pylist(rows[:0], schema=pa.schema({"prompt": pa.string()}))).num_rows == 0


def test_rows_with_constraints_of_their_own_make_value_text(alone: Job) -> None:
    generator = StructuredGenerator(**settings(alone))
    table = generator({"prompt": ["a", "b"], "regex": ["[0-9]{3}", "x|y"]})
    assert table.schema.field("value").type == pa.string()
    assert table.column("status").to_pylist() == ["ok", "ok"]


def test_what_is_rays_to_say_is_refused() -> None:
    with pytest.raises(UsageError, match="output, shard"):
        StructuredGenerator(shard="1/2", output="t.parquet")
    with pytest.raises(UsageError, match="unknown setting 'modle'; did you mean 'model'"):
        StructuredGenerator(modle="demo")


@pytest.mark.parametrize("setting", ["max_failures", "summary_json", "profile", "retry", "flush_rows"])
def test_what_means_nothing_to_a_generator_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match=f"{setting}: mean nothing here"):
        StructuredGenerator(**{setting: "1"})


def test_a_schema_and_another_pattern_are_not_both_taken() -> None:
    with pytest.raises(UsageError, match="one of schema and regex, not both"):
        StructuredGenerator(schema=SCHEMA, regex="x+")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shard": "auto"}, "--shard"),
        ({"summary_json": "s.json"}, "--summary-json"),
        ({"profile": "trace.json"}, "--profile"),
    ],
)
def test_settings_of_one_process_are_refused(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    config = load_config({"inputs": "rows.jsonl", "output": str(tmp_path / "t.parquet"), **settings})
    with pytest.raises(UsageError, match=f"leave out {said}"):
        run_shards(config, 2)


def test_more_actors_than_the_cluster_can_hold_are_refused() -> None:
    check_resources({"CPU": 2.0}, 2, 1, 0)
    check_resources({"CPU": 2.0, "GPU": 4.0}, 4, 0.5, 1)
    with pytest.raises(UsageError, match="3 actors with 1 CPU each need 3; Ray has 2"):
        check_resources({"CPU": 2.0}, 3, 1, 0)
    with pytest.raises(UsageError, match="--gpus-per-actor"):
        check_resources({"CPU": 8.0}, 1, 1, 1)
