"""Shards of a pretend job: who takes which row, what does not go together, and merging to one table."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.cluster.merge import merge
from jfbatch.cluster.slurm_environment import array_shard
from jfbatch.errors import InputError, OutputError, UsageError
from jfbatch.rows.job_description import JobDescription
from jfbatch.rows.reader import ReaderOptions, read_rows
from jfbatch.rows.result import RowResult
from jfbatch.rows.row import Row
from jfbatch.rows.shard import Shard, ShardBy, rows_of, shard_number
from jfbatch.rows.shard_directories import begun_shards, lock_shard
from tests.rows.jobs import KEEP, PATTERN, SETTINGS, answer, open_store, run, write_rows

OPTIONS = ReaderOptions(keep=KEEP, pattern=PATTERN)


def a_row(number: int, **fields: Any) -> Row:
    return Row(
        index=number, place=f"in:{number}", line=number, key=f"id:{number}", content=bytes(16), **fields
    )


def run_shard(
    source: Path,
    output: Path,
    name: str,
    *,
    by: ShardBy = "row",
    stop_after: int | None = None,
    settings: Mapping[str, str] = SETTINGS,
    status: str = "ok",
    told: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """One start of one shard; the prompts that ran. It stops after `stop_after` rows, as by a signal.

    `told` is what it leaves for the merge besides.
    """
    shard = Shard.parse(name, by)
    ran: list[str] = []
    job = JobDescription((str(source),), OPTIONS, **(told or {})).as_json()
    with open_store(output, settings, flush_rows=3, shard=shard, job=job, **options) as store:
        for row in rows_of(shard, read_rows([str(source)], OPTIONS), ran.append):
            if store.contains(row):
                continue
            if stop_after is not None and len(ran) >= stop_after:
                return ran
            ran.append(row.prompt or row.place)
            store.add(answer(row, status))
        store.finish_shard()
    return ran


def run_shards(source: Path, output: Path, count: int, **options: Any) -> list[str]:
    return [
        prompt
        for number in range(1, count + 1)
        for prompt in run_shard(source, output, f"{number}/{count}", **options)
    ]


def without_metadata(path: Path) -> pa.Table:
    return pq.read_table(path).replace_schema_metadata(None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [{"id": n, "prompt": f"prompt {n}", "tag": f"t{n}"} for n in range(40)]
    rows += [{"prompt": "the same"}, {"prompt": "the same"}, {"id": 3, "prompt": "a used id"}, {"id": 99}]
    return write_rows(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def alone(source: Path, tmp_path: Path) -> pa.Table:
    run(source, tmp_path / "alone.parquet")
    return without_metadata(tmp_path / "alone.parquet")


# -- who takes which row ------------------------------------------------------------------------------------


@given(count=st.integers(1, 70), keys=st.lists(st.text(), max_size=20))
def test_every_row_belongs_to_exactly_one_shard(count: int, keys: list[str]) -> None:
    shards = [Shard(number, count) for number in range(1, count + 1)]
    for key in keys:
        row = Row(index=0, place="in:1", line=1, key=key, content=b"")
        assert [shard.takes(row) for shard in shards].count(True) == 1


@given(count=st.integers(1, 9), pieces=st.integers(1, 9), number=st.integers(0, 10_000))
def test_the_pieces_of_a_shard_have_its_rows(count: int, pieces: int, number: int) -> None:
    row = a_row(number)
    whole = Shard(shard_number(row, count), count)
    assert [piece.takes(row) for piece in whole.parts(pieces)].count(True) == 1
    assert {piece.count for piece in whole.parts(pieces)} == {count * pieces}


def test_shards_by_row_are_even() -> None:
    counts = [0] * 8
    for number in range(8000):
        counts[shard_number(a_row(number), 8) - 1] += 1
    assert min(counts) > 880 and max(counts) < 1120  # four standard deviations


def test_by_pattern_rows_of_one_pattern_and_one_beginning_stay_together() -> None:
    document = "A long document. " * 40
    rows = [a_row(n, prompt=f"{document}Question {n}?", pattern=PATTERN) for n in range(50)]
    assert len({shard_number(row, 16, "pattern") for row in rows}) == 1
    assert len({shard_number(row, 16, "row") for row in rows}) > 8
    others = [a_row(n, prompt=f"{n}: {document}", pattern=PATTERN) for n in range(50)]
    assert len({shard_number(row, 16, "pattern") for row in others}) > 8
    chats = [a_row(n, messages=[{"role": "user", "content": document + str(n)}]) for n in range(50)]
    assert len({shard_number(row, 16, "pattern") for row in chats}) == 1


def test_a_shard_that_takes_nearly_all_rows_says_so() -> None:
    said: list[str] = []
    rows = [a_row(n, prompt="the same beginning" * 20, pattern=PATTERN) for n in range(3000)]
    for count in (2, 8):
        number = shard_number(rows[0], count, "pattern")
        assert len(list(rows_of(Shard(number, count, "pattern"), rows, said.append))) == 3000
    assert "--shard-by row" in said[0] and "3,000 of 3,000" in said[0]
    assert len(list(rows_of(Shard(number, 8), rows, said.append))) < 500
    assert len(said) == 2


# -- Slurm's array ------------------------------------------------------------------------------------------


def array(task: int, first: int, last: int, count: int, step: int = 1) -> dict[str, str]:
    told = {"ID": task, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in told.items()}


@given(first=st.integers(0, 50), step=st.integers(1, 7), count=st.integers(1, 40))
def test_the_elements_of_an_array_are_the_shards(first: int, step: int, count: int) -> None:
    last = first + (count - 1) * step
    shards = [array_shard(array(task, first, last, count, step)) for task in range(first, last + 1, step)]
    assert shards == [Shard(number, count) for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no element of a Slurm array"),
        (array(3, 1, 7, 3), "3 elements from 1 to 7"),
        (array(8, 1, 7, 7), "from 1 to 7"),
        (array(2, 1, 7, 4, 2), "in steps of 2"),
        ({**array(1, 1, 2, 2), "SLURM_ARRAY_TASK_COUNT": "two"}, "not a number"),
        ({**array(1, 1, 2, 2), "SLURM_ARRAY_TASK_COUNT": "0"}, "not a number"),
        ({**array(1, 1, 2, 2), "SLURM_ARRAY_TASK_STEP": "0"}, "not a number"),
    ],
)
def test_an_array_with_holes_and_no_array_at_all_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        array_shard(environment)
    assert "--shard" in str(caught.value)


# -- one table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["row", "pattern"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_merged_table_is_that_of_a_run_alone(
    source: Path, alone: pa.Table, tmp_path: Path, count: int, by: ShardBy
) -> None:
    output = tmp_path / "t.parquet"
    ran = run_shards(source, output, count, by=by)
    assert len(ran) == len(alone)
    assert not output.exists()
    assert merge(output) == 1  # two rows are invalid_input
    assert without_metadata(output).equals(alone)
    assert sorted(path.name for path in tmp_path.glob("t.*")) == ["t.parquet", "t.parquet.journal"]
    assert merge(output) == 1  # again: it is there already
    assert without_metadata(output).equals(alone)
    # A run without shards, and a shard, find everything done.
    assert run(source, output)[0] == []
    assert run_shard(source, output, "1/3") == []


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_shards_stopped_anywhere_in_any_order_merge_to_the_same_table(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    source = write_rows(directory / "rows.jsonl", [{"id": n, "prompt": f"p{n}"} for n in range(30)])
    run(source, directory / "alone.parquet")
    output, ran = directory / "t.parquet", 0
    for _ in range(data.draw(st.integers(0, 8))):
        number, stop = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 12))
        ran += len(run_shard(source, output, f"{number}/3", stop_after=stop))
    ran += len(run_shards(source, output, 3))
    assert ran == 30, "a row ran twice, or never"
    assert merge(output, quiet=True) == 0
    assert without_metadata(output).equals(without_metadata(directory / "alone.parquet"))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_what_is_missing_is_told_and_nothing_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    output = tmp_path / f"t.{suffix}"
    run_shard(source, output, "1/3")
    run_shard(source, output, "3/3", stop_after=3)
    assert merge(output) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in told[:2]] == [
        "shard 2/3 was not started",
        "shard 3/3 stopped before its end",
    ]
    assert "rows.jsonl:" in told[0] and "merge --partial" in told[-1]
    assert not output.exists()
    assert {path.name for path in tmp_path.glob("t.*")} == {f"t.{suffix}.shards"}
    assert {path.name for path in (tmp_path / f"t.{suffix}.shards").iterdir()} == {"1-of-3", "3-of-3"}
    # What is there can be had; the rest continues, and then there is the whole table.
    assert merge(output, partial=True) == 1
    lines = pq.read_table(output).to_pylist() if suffix == "parquet" else read_lines(output)
    assert [row["row"] for row in lines] == sorted(row["row"] for row in lines)
    assert all(row["id"] == str(row["row"]) for row in lines if row["row"] < 40)
    done = len(lines)
    assert len(run_shards(source, output, 3)) == 44 - done
    assert merge(output) == 1
    run(source, tmp_path / f"alone.{suffix}")
    assert output.read_bytes()[-200:] == (tmp_path / f"alone.{suffix}").read_bytes()[-200:]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_input_changed_since_is_noticed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t.parquet"
    run_shards(source, output, 2)
    rows = read_lines(source)
    rows[5]["prompt"] = "another"
    write_rows(source, [*rows[:20], *rows[21:], {"id": "new", "prompt": "new"}])
    assert merge(output) == 1
    told = capsys.readouterr().err
    assert "1 were changed in the input" in told and "was finished: 1 of " in told
    assert not output.exists()
    assert sorted(run_shards(source, output, 2)) == ["another", "new"]
    assert merge(output) == 1
    assert without_metadata(output).column("row").to_pylist() == list(range(44))


def test_a_row_whose_pattern_changed_moves_to_another_shard(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "t.parquet"
    rows: list[dict[str, Any]] = [{"id": n, "prompt": f"p{n}"} for n in range(20)]
    write_rows(source, rows)
    run_shards(source, output, 4, by="pattern")
    write_rows(source, [{**row, "regex": "a+"} for row in rows])
    assert len(run_shards(source, output, 4, by="pattern")) == 20
    assert merge(output) == 0
    merged = without_metadata(output)
    assert merged.column("text").to_pylist() == [answer(row).text for row in read_rows([str(source)])]
    assert merged.column("row").to_pylist() == list(range(20))


def test_the_input_may_have_moved(source: Path, alone: pa.Table, tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    run_shards(source, output, 2)
    moved = source.rename(tmp_path / "moved.jsonl")
    with pytest.raises(UsageError, match="no such file"):
        merge(output)
    with pytest.raises(UsageError, match="not -"):
        merge(output, ["-"])
    assert merge(output, [str(moved)]) == 1
    assert without_metadata(output).num_rows == len(alone)


def test_rows_can_be_tried_again_shard_by_shard(tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "t.parquet"
    write_rows(source, [{"id": n, "prompt": f"p{n}"} for n in range(20)])
    run_shards(source, output, 2, status="failed")
    assert merge(output) == 1
    assert len(run_shards(source, output, 2, retry="failed")) == 20
    assert merge(output) == 0
    assert set(without_metadata(output).column("status").to_pylist()) == {"ok"}


# -- what does not go together ------------------------------------------------------------------------------


def test_another_number_of_shards_is_refused(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    run_shard(source, output, "1/4")
    with pytest.raises(UsageError, match="begun in 4 shards by row, not 3 by row"):
        run_shard(source, output, "1/3")
    with pytest.raises(UsageError, match="not 4 by pattern"):
        run_shard(source, output, "2/4", by="pattern")
    with pytest.raises(UsageError, match="begun in 4 shards"):
        run(source, output)
    assert [str(begun.shard) for begun in begun_shards(output)] == ["1/4"]


def test_other_settings_are_refused_at_the_start_of_any_shard(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    run_shard(source, output, "1/2")
    warm = {**SETTINGS, "temperature": "1"}
    for name in ("1/2", "2/2"):
        with pytest.raises(UsageError, match=r"temperature \(was '0', now '1'\)"):
            run_shard(source, output, name, settings=warm)
    # --overwrite starts anew, one shard at a time; merging tells which is left.
    run_shard(source, output, "1/2", settings=warm, overwrite=True)
    with pytest.raises(UsageError, match="begun with other settings"):
        run_shard(source, output, "2/2")
    run_shard(source, output, "2/2", overwrite=True)
    with pytest.raises(UsageError, match=r"shard 2/2 .* other settings than shard 1/2: temperature"):
        merge(output)
    run_shard(source, output, "2/2", settings=warm, overwrite=True)
    assert merge(output) == 1


def test_shards_of_different_inputs_are_not_merged_to_a_table_that_lacks_rows(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "t.parquet"
    more = [{"id": f"m{n}", "prompt": f"more {n}"} for n in range(9)]
    both = write_rows(tmp_path / "both.jsonl", [*read_lines(source), *more])
    run_shard(source, output, "1/2")
    run_shard(both, output, "2/2")
    with pytest.raises(UsageError, match=r"shard 1/2 and shard 2/2 .*inputs \(.*rows.jsonl and .*both"):
        merge(output)
    assert len(begun_shards(output)) == 2 and not output.exists()
    # Named, they count: the rows of shard 1 that it was not told of are missing, and it runs them.
    assert merge(output, [str(both)]) == 1
    assert len(begun_shards(output)) == 2 and not output.exists()
    run_shard(both, output, "1/2")
    assert merge(output) == 1
    assert len(without_metadata(output)) == 53


@pytest.mark.parametrize("inputs", [False, True])
def test_shards_told_different_things_of_the_table_are_refused(
    source: Path, tmp_path: Path, inputs: bool
) -> None:
    output = tmp_path / "t.parquet"
    run_shard(source, output, "1/2")
    run_shard(source, output, "2/2", told={"flatten": True})
    with pytest.raises(UsageError, match=r"settings: flatten \(false and true\): start one of them again"):
        merge(output, [str(source)] if inputs else [])
    assert len(begun_shards(output)) == 2 and not output.exists()


def test_an_input_that_is_damaged_only_when_merging_costs_no_result(
    source: Path, tmp_path: Path, alone: pa.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    output, packed = tmp_path / "t.parquet", tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    run_shards(packed, output, 2)
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    for there in (False, True):  # the second time there is a table, which stays
        before = output.read_bytes() if there else b""
        with pytest.raises(InputError):
            merge(output)
        assert "the shards are kept: mend the input" in capsys.readouterr().err
        assert len(begun_shards(output)) == 2
        assert not there or output.read_bytes() == before
    packed.write_bytes(whole)
    assert merge(output) == 1
    assert without_metadata(output).drop(["error"]).equals(alone.drop(["error"]))  # errors name the file
    # New rows in shards, and the table of the others: neither is lost to damage.
    packed.write_bytes(gzip.compress(source.read_bytes() + b'{"id": "new", "prompt": "new"}\n'))
    assert run_shards(packed, output, 2) == ["new"]
    whole, before = packed.read_bytes(), output.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError):
        merge(output)
    assert output.read_bytes() == before
    packed.write_bytes(whole)
    assert merge(output) == 1
    assert len(without_metadata(output)) == len(alone) + 1


def test_a_table_made_with_other_settings_is_replaced_only_where_asked(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    run(source, output, settings={**SETTINGS, "temperature": "1"})
    before = output.read_bytes()
    with pytest.raises(UsageError, match="other settings"):
        run_shard(source, output, "1/2")
    assert len(run_shards(source, output, 2, overwrite=True)) == 44
    assert output.read_bytes() == before
    assert merge(output) == 1
    assert output.read_bytes() != before


def test_a_run_without_shards_and_one_with_keep_apart(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    run(source, output, stop_after=5)
    with pytest.raises(UsageError, match="begun without shards"):
        run_shard(source, output, "1/2")
    run(source, output)
    assert run_shard(source, output, "1/2") == []  # the finished table counts
    run(source, output, overwrite=True)
    assert begun_shards(output) == []


def test_a_running_shard_is_neither_started_twice_nor_merged(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    run_shards(source, output, 2)
    lock = lock_shard(output, Shard(2, 2))
    for attempt in (lambda: run_shard(source, output, "2/2"), lambda: merge(output)):
        with pytest.raises(UsageError, match=r"shard 2/2 of .* is being written by process"):
            attempt()
    assert run_shard(source, output, "1/2") == []  # the others go on, the refused merge left no lock
    lock.release()
    assert merge(output) == 1


def test_nothing_to_merge_is_a_mistake(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no shards"):
        merge(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"something else")
    with pytest.raises(UsageError, match="has no shards"):
        merge(tmp_path / "t.parquet")
    run_shard(source, tmp_path / "a.parquet", "1/1")
    with pytest.raises(UsageError, match=r"b\.parquet has no shards"):
        merge(tmp_path / "b.parquet")


def test_shards_left_of_two_cuts_are_named(source: Path, tmp_path: Path) -> None:
    output, other = tmp_path / "t.parquet", tmp_path / "u.parquet"
    run_shard(source, output, "1/2")
    run_shard(source, other, "3/3")
    (tmp_path / "u.parquet.shards" / "3-of-3").rename(tmp_path / "t.parquet.shards" / "3-of-3")
    with pytest.raises(UsageError, match="shards of 2 by row and of 3 by row"):
        merge(output)


def test_a_damaged_part_is_missing_rows_not_lost_ones(
    source: Path, alone: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t.parquet"
    run_shards(source, output, 2)
    part = sorted((tmp_path / "t.parquet.shards" / "2-of-2").glob("part-*"))[0]
    part.write_bytes(part.read_bytes()[:-20])
    assert merge(output) == 1
    assert "shard 2/2 was finished: 3 of " in capsys.readouterr().err
    assert len(run_shard(source, output, "2/2")) == 3
    assert merge(output) == 1
    assert without_metadata(output).equals(alone)


def test_a_damaged_description_is_told(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.parquet"
    run_shard(source, output, "1/1")
    path = tmp_path / "t.parquet.shards" / "1-of-1" / "settings.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "job": {"inputs": 3}}))
    with pytest.raises(UsageError, match="start one of them again"):
        merge(output)
    run_shard(source, output, "1/1")
    assert merge(output) == 1


@pytest.mark.parametrize("moment", range(4))
def test_a_merge_that_dies_can_be_repeated(
    source: Path, alone: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    from jfbatch.rows import merging, store

    output = tmp_path / "t.parquet"
    run_shards(source, output, 3)
    calls = 0

    def dying(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment + 1:
                raise OSError(5, "dead")
            return original(*arguments)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(store, "rename", dying(store.rename))
        patched.setattr(merging, "remove_shard", dying(merging.remove_shard))
        with pytest.raises((OutputError, OSError), match="dead"):
            merge(output)
    assert merge(output) == 1
    assert without_metadata(output).equals(alone)
    assert sorted(path.name for path in tmp_path.glob("t.*")) == ["t.parquet", "t.parquet.journal"]


def test_results_of_unlike_shards_have_one_place(tmp_path: Path) -> None:
    rows: Sequence[RowResult] = [answer(a_row(n, prompt="x")) for n in range(3)]
    with open_store(tmp_path / "t.parquet", shard=Shard(1, 2)) as store:
        for result in rows:
            store.add(result)
    assert len(list((tmp_path / "t.parquet.shards" / "1-of-2").glob("part-*"))) == 1


def test_partial_merges_number_rows_by_the_input_as_it_is_now(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows = [{"id": f"r{n}", "prompt": f"p{n}"} for n in range(12)]

    def merge_partly(now: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
        """Ids and numbers, after the first shard alone was started with this input and merged."""
        write_rows(source, now)
        run_shard(source, output, "1/2", stop_after=0 if output.exists() else None)
        assert merge(output, partial=True) == 1
        (shard,) = begun_shards(output)
        shard.directory.remove()
        table = pq.read_table(output)
        return list(zip(table.column("id").to_pylist(), table.column("row").to_pylist(), strict=True))

    for now in (rows, [{"id": "new", "prompt": "new"}, *rows], rows, [*rows[6:], *rows[:6]]):
        merged = merge_partly(now)
        assert 0 < len(merged) < 12
        assert merged == [(row["id"], n) for n, row in enumerate(now) if row["id"] in dict(merged)]


def test_shards_overwrite_parts_of_a_run_without_shards(tmp_path: Path) -> None:
    source, output = (
        write_rows(tmp_path / "in.jsonl", [{"prompt": f"p{n}"} for n in range(12)]),
        tmp_path / "o.parquet",
    )
    run(source, output, stop_after=6)
    with pytest.raises(UsageError, match=r"begun without shards.*--overwrite"):
        run_shard(source, output, "1/2")
    other = {**SETTINGS, "temperature": "1"}
    assert len(run_shards(source, output, 2, settings=other, overwrite=True)) == 12
    assert not (tmp_path / "o.parquet.parts").exists()
    assert run_shard(source, output, "1/2", settings=other) == []
    assert merge(output) == 0
    assert pq.read_table(output).num_rows == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "o.parquet", "o.parquet.journal"]


def test_shards_do_not_overwrite_a_run_that_is_still_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = (
        write_rows(tmp_path / "in.jsonl", [{"prompt": "p"}, {"prompt": "q"}]),
        tmp_path / "o.parquet",
    )
    monkeypatch.setattr("jfbatch.rows.shard_directories._SIBLING_SECONDS", 0.2)
    run(source, output, stop_after=1, flush_rows=1)
    with open_store(output), pytest.raises(UsageError, match="is being written by"):
        run_shard(source, output, "1/2", settings={**SETTINGS, "temperature": "1"}, overwrite=True)
