"""The store: commit, continue, retry, change, refuse; and the table at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jfbatch.errors import OutputError, UsageError
from jfbatch.rows.columns import Columns
from jfbatch.rows.reader import ReaderOptions, read_rows
from jfbatch.rows.result import PART_SCHEMA, RowResult
from jfbatch.rows.row import Row
from jfbatch.rows.store import Store
from tests.rows.jobs import PATTERN, SETTINGS, answer, open_store, run, write_rows


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "prompt": f"prompt {n}", "tag": n} for n in range(count)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", rows_of(20))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def echoes(output: Path) -> list[str | None]:
    values = pq.read_table(output).column("value").to_pylist()
    return [value and value["echo"] for value in values]


def failing(*ids: str) -> Any:
    def answers(row: Row) -> RowResult:
        return answer(row, "failed" if row.id in ids else "ok")

    return answers


def test_the_table_is_in_input_order_and_the_parts_are_gone(source: Path, output: Path) -> None:
    ran, table = run(source, output)
    assert len(ran) == 20 and table is not None and table.written
    written = pq.read_table(output)
    assert written.column("id").to_pylist() == [f"r{n}" for n in range(20)]
    assert written.column("row").to_pylist() == list(range(20))
    assert written.column("tag").to_pylist() == [str(n) for n in range(20)]
    assert echoes(output) == [f"prompt {n}" for n in range(20)]
    assert {path.name for path in output.parent.iterdir()} == {
        "in.jsonl",
        "out.parquet",
        "out.parquet.journal",
    }
    assert table.statuses["ok"] == 20


@pytest.mark.parametrize("stop_after", [0, 1, 4, 7, 13, 19])
def test_a_stopped_run_continues_and_runs_nothing_twice(source: Path, output: Path, stop_after: int) -> None:
    first, _ = run(source, output, stop_after=stop_after)
    assert not output.exists()
    second, table = run(source, output)
    assert sorted(first + second) == sorted(f"prompt {n}" for n in range(20))
    assert table is not None
    assert echoes(output) == [f"prompt {n}" for n in range(20)]


def test_every_part_has_the_same_schema(source: Path, output: Path) -> None:
    run(source, output, stop_after=13)
    parts = sorted((output.parent / "out.parquet.parts").glob("part-*.parquet"))
    assert len(parts) == 5
    assert all(pq.read_schema(part).remove_metadata() == PART_SCHEMA for part in parts)


def test_a_finished_table_is_left_alone_when_nothing_changed(source: Path, output: Path) -> None:
    run(source, output)
    before = output.stat()
    ran, table = run(source, output)
    assert ran == [] and table is not None and not table.written
    assert table.statuses["ok"] == 20
    assert (output.stat().st_ino, output.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not (output.parent / "out.parquet.parts").exists()


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_added_changed_moved_and_removed_rows(
    source: Path, tmp_path: Path, finished: bool, name: str
) -> None:
    output = tmp_path / name
    run(source, output, stop_after=None if finished else 20 - 2)
    rows = rows_of(20)
    rows[5]["prompt"] = "changed"
    edited = [{"id": "new", "prompt": "added"}, rows[19], *rows[3:10], rows[0]]
    write_rows(source, edited)
    ran, table = run(source, output)
    missing = [] if finished else [prompt for prompt in ran if prompt not in ("added", "changed")]
    assert sorted(ran) == sorted(["added", "changed", *missing]) and len(missing) <= 2
    assert table is not None and table.rows == len(edited)
    if name == "out.parquet":
        assert echoes(output) == [row["prompt"] for row in edited]
    else:
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["value"]["echo"] for line in lines] == [row["prompt"] for row in edited]
        assert [line["tag"] for line in lines] == [row.get("tag") for row in edited]
        assert [line["row"] for line in lines] == list(range(len(edited)))


@pytest.mark.parametrize("keep_parts", [True, False])
def test_retry_runs_only_what_it_names(source: Path, output: Path, keep_parts: bool) -> None:
    write_rows(source, [*rows_of(6), {"id": "broken"}])
    run(source, output, answer=failing("r1", "r4"), keep_parts=keep_parts)
    assert pq.read_table(output).column("status").to_pylist().count("failed") == 2
    assert run(source, output, keep_parts=keep_parts)[0] == []
    assert run(source, output, keep_parts=keep_parts, retry="invalid")[0] == [f"{source}:7"]
    ran, _ = run(source, output, keep_parts=keep_parts, retry="failed", answer=failing("r4"))
    assert ran == ["prompt 4", "prompt 1"]
    ran, table = run(source, output, keep_parts=keep_parts, retry="all")
    assert ran == [f"{source}:7", "prompt 4"]
    assert table is not None and table.statuses["ok"] == 6 and table.statuses["invalid_input"] == 1
    assert echoes(output) == [*(f"prompt {n}" for n in range(6)), None]


def test_a_retry_that_is_stopped_keeps_the_old_results(source: Path, output: Path) -> None:
    run(source, output, answer=failing("r1", "r2", "r3"))
    run(source, output, retry="failed", stop_after=1, flush_rows=1)
    ran, table = run(source, output)
    assert ran == [] and table is not None
    assert (table.statuses["failed"], table.statuses["ok"]) == (2, 18)


def test_other_settings_are_refused_by_name(source: Path, output: Path) -> None:
    for stop_after in (5, None):
        run(source, output, stop_after=stop_after)
        with pytest.raises(
            UsageError, match=r"temperature \(was '0', now '1'\); top \(was none, now '5'\)\."
        ):
            run(source, output, settings={**SETTINGS, "temperature": "1", "top": "5"})
        with pytest.raises(UsageError, match="kept fields"), Store(output, Columns(PATTERN), SETTINGS):
            pass
    assert echoes(output) == [f"prompt {n}" for n in range(20)]


@pytest.mark.parametrize("finished", [True, False])
def test_overwrite_starts_over_and_then_continues(source: Path, output: Path, finished: bool) -> None:
    run(source, output, stop_after=None if finished else 5)
    other = {**SETTINGS, "temperature": "1"}
    first, _ = run(source, output, settings=other, overwrite=True, stop_after=7)
    assert len(first) == 7
    assert output.exists() == finished  # the old table stays until the new one is whole
    second, table = run(source, output, settings=other, overwrite=True)
    assert len(second) == 13 and table is not None
    assert run(source, output, settings=other)[0] == []


def test_settings_may_change_as_long_as_nothing_is_committed(source: Path, output: Path) -> None:
    run(source, output, stop_after=0)
    assert not (output.parent / "out.parquet.parts").exists()
    ran, _ = run(source, output, settings={**SETTINGS, "temperature": "1"})
    assert len(ran) == 20


def test_a_file_that_is_not_ours_is_not_overwritten(source: Path, output: Path) -> None:
    output.write_text("precious")
    with pytest.raises(UsageError, match="does not belong to it"):
        run(source, output)
    assert output.read_text() == "precious"
    assert {path.name for path in output.parent.iterdir()} == {"in.jsonl", "out.parquet"}
    run(source, output, overwrite=True)
    assert len(echoes(output)) == 20


@pytest.mark.parametrize("begun_with_overwrite", [True, False])
def test_a_file_that_came_while_a_run_was_stopped_is_not_overwritten(
    source: Path, output: Path, begun_with_overwrite: bool
) -> None:
    if begun_with_overwrite:
        run(source, output, settings={**SETTINGS, "temperature": "1"}, stop_after=3)
    run(source, output, stop_after=9, overwrite=begun_with_overwrite)
    output.write_text("precious")
    with pytest.raises(UsageError, match="does not belong to it"):
        run(source, output)
    assert output.read_text() == "precious"
    ran, _ = run(source, output, overwrite=True)
    assert len(ran) == 11 and len(echoes(output)) == 20


def test_a_table_that_was_changed_since_is_not_continued(source: Path, output: Path) -> None:
    run(source, output)
    pq.write_table(pq.read_table(output).slice(0, 3), output)
    with pytest.raises(UsageError, match="does not belong to it"):
        run(source, output)


def test_results_are_committed_by_number_and_by_time(source: Path, output: Path) -> None:
    parts = output.parent / "out.parquet.parts"
    row = Row(0, "f:1", 1, "id:0", bytes(16), id="0", prompt="p")
    with open_store(output, flush_rows=2, flush_seconds=1000) as store:
        store.add(RowResult.of(row, "ok", text="{}"))
        assert not store.commit_if_due() and not list(parts.glob("part-*"))
        store.add(RowResult.of(Row(1, "f:2", 2, "id:1", bytes(16)), "ok", text="{}"))
        assert len(list(parts.glob("part-*"))) == 1
    with open_store(output, flush_seconds=0) as store:
        store.add(RowResult.of(Row(2, "f:3", 3, "id:2", bytes(16)), "ok", text="{}"))
        assert len(list(parts.glob("part-*"))) == 2


def test_leaving_commits_what_was_added_even_on_an_error(output: Path) -> None:
    row = Row(0, "f:1", 1, "id:0", bytes(16), id="0", prompt="p")

    def interrupted() -> None:
        with open_store(output) as store:
            store.add(RowResult.of(row, "ok", text="{}"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with open_store(output) as store:
        assert store.resumed_rows == 1
        assert store.contains(row)


def test_finish_refuses_while_rows_have_no_result(output: Path) -> None:
    with open_store(output) as store:
        assert not store.contains(Row(0, "f:1", 1, "id:0", bytes(16)))
        with pytest.raises(OutputError, match="1 rows have no result yet"):
            store.finish()


def test_an_empty_input_gives_an_empty_typed_table(source: Path, output: Path) -> None:
    source.write_text("")
    _, table = run(source, output)
    assert table is not None and table.rows == 0
    assert (
        pq.read_table(output).schema.field("value").type == Columns(PATTERN).arrow_schema.field("value").type
    )


def test_kept_parts_stay_and_serve(source: Path, output: Path) -> None:
    run(source, output, keep_parts=True)
    parts = output.parent / "out.parquet.parts"
    assert list(parts.glob("part-*"))
    write_rows(source, [*rows_of(20), {"id": "new", "prompt": "added"}])
    assert run(source, output, keep_parts=True)[0] == ["added"]
    write_rows(source, rows_of(20)[:5])
    assert run(source, output)[0] == []
    assert echoes(output) == [f"prompt {n}" for n in range(5)] and not parts.exists()


def test_columns_may_be_settled_at_the_end(source: Path, output: Path) -> None:
    run(source, output)
    with open_store(output) as store:
        for row in read_rows([str(source)], ReaderOptions(keep=("tag",), pattern=PATTERN)):
            assert store.contains(row)
        assert store.finish(Columns(PATTERN, flatten=True, keep=("tag",))).written
    assert pq.read_table(output).column("echo").to_pylist() == [f"prompt {n}" for n in range(20)]


def test_openai_results(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b"}])
    with open(source, "a") as file:
        file.write("not json\n")
    output = tmp_path / "out.jsonl"
    run(source, output, output_format="openai")
    good, bad, worse = [json.loads(line) for line in output.read_text().splitlines()]
    choice = good["response"]["body"]["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"length": 1, "echo": "x"}
    assert (good["custom_id"], good["error"], choice["finish_reason"]) == ("a", None, "stop")
    assert good["response"]["body"]["model"] == "pretend"
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == ("b", None, "invalid_input")
    assert "no prompt" in bad["error"]["message"]
    assert (worse["custom_id"], worse["line"]) == (None, 3)
    write_rows(source, [{"id": "c", "prompt": "y"}, {"id": "a", "prompt": "x"}])
    assert run(source, output, output_format="openai")[0] == ["y"]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["c", "a"]
    assert lines[1]["response"]["body"]["choices"] == good["response"]["body"]["choices"]


def test_json_lines_keep_a_value_s_exact_text(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    texts = ['{\n  "length": 1.50,\n  "echo": "a\\nb"\n}', '{"length": 123456789012345678901234567890}']
    with open_store(output) as store:
        for index, text in enumerate(texts):
            row = Row(index, f"f:{index}", index, f"id:{index}", bytes(16), pattern=PATTERN)
            store.contains(row)
            store.add(RowResult.of(row, "ok", text=text))
        store.finish()
    lines = output.read_text().splitlines()
    assert len(lines) == 2 and '"length": 1.50' in lines[0] and texts[1] in lines[1]
    assert [json.loads(line)["value"] for line in lines] == [json.loads(text) for text in texts]
    assert [json.loads(line)["text"] for line in lines] == texts


@pytest.mark.parametrize(("name", "given"), [("out.txt", None), ("out", None), ("out.parquet", "xml")])
def test_an_unknown_format_is_a_usage_error(tmp_path: Path, name: str, given: str | None) -> None:
    with pytest.raises(UsageError, match="format"):
        open_store(tmp_path / name, output_format=given)
    assert list(tmp_path.iterdir()) == []


def test_the_journal_and_the_table_carry_the_settings(source: Path, output: Path) -> None:
    run(source, output)
    told = json.loads(pq.read_schema(output).metadata[b"jfbatch"])
    assert told["model"] == "pretend" and told["kept fields"] == "tag"
