"""GrammarCache: what is stored comes back; what was planted, damaged or locked is a miss."""

from __future__ import annotations

import logging
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import diskcache
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.grammar.cache import BytesDisk, GrammarCache, RefusedEntry

LARGE = bytes(range(256)) * 400  # stored in a file of its own


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.levelno >= logging.WARNING for record in caplog.records)


def plant(directory: Path, key: str, /, **columns: Any) -> None:
    """Overwrite columns of a key's row."""
    connection = sqlite3.connect(directory / "cache.db")
    assignments = ", ".join(f"{name} = ?" for name in columns)
    changed = connection.execute(f"UPDATE Cache SET {assignments} WHERE key = ?", (*columns.values(), key))
    assert changed.rowcount == 1
    connection.commit()
    connection.close()


class Bomb:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


# -- what is stored comes back --------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", LARGE])
def test_stored_bytes_come_back_also_after_reopening(directory: Path, data: bytes) -> None:
    with GrammarCache(directory) as cache:
        assert cache.get("key") is None
        assert cache.set("key", data)
        assert cache.get("key") == data
    with GrammarCache(directory) as cache:
        assert cache.get("key") == data
        assert cache.get("other") is None


def test_a_second_value_replaces_the_first_and_its_file(directory: Path) -> None:
    with GrammarCache(directory) as cache:
        cache.set("key", LARGE)
        cache.set("key", LARGE + b"2")
        assert cache.get("key") == LARGE + b"2"
    assert len(list(directory.rglob("*.val"))) == 1


def test_any_key_and_value_is_kept(tmp_path: Path) -> None:
    with GrammarCache(tmp_path) as cache:

        @given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), st.binary()))
        @settings(max_examples=40, deadline=None)
        def check(entries: dict[str, bytes]) -> None:
            for key, data in entries.items():
                assert cache.set(key, data)
            assert all(cache.get(key) == data for key, data in entries.items())

        check()


def test_the_size_limit_drops_the_oldest(directory: Path) -> None:
    with GrammarCache(directory, size_limit=400_000) as cache:
        for number in range(20):
            assert cache.set(f"key {number}", LARGE)
        assert cache.get("key 0") is None
        assert cache.get("key 19") == LARGE
        assert not cache.set("too large", b"x" * 300_000)
    assert sum(file.stat().st_size for file in directory.rglob("*.val")) <= 500_000


def test_threads_share_one_cache(directory: Path) -> None:
    cache = GrammarCache(directory, lock_seconds=20)

    def work(number: int) -> None:
        for step in range(10):
            cache.set(f"{number} {step}", LARGE + bytes([number, step]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cache.get(f"{n} {s}") == LARGE + bytes([n, s]) for n in range(4) for s in range(10))


def test_two_processes_share_one_directory(directory: Path) -> None:
    script = """
import sys
from jfbatch.grammar.cache import GrammarCache
cache = GrammarCache(sys.argv[1], lock_seconds=20)
for step in range(30):
    assert cache.set(f"{sys.argv[2]} {step}", sys.argv[2].encode() * 20000)
"""
    workers = [subprocess.Popen([sys.executable, "-c", script, str(directory), name]) for name in "ab"]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
    with GrammarCache(directory) as cache:
        assert all(
            cache.get(f"{name} {step}") == name.encode() * 20000 for name in "ab" for step in range(30)
        )


# -- what was planted ---------------------------------------------------------------------------------------


def test_a_planted_pickle_is_never_loaded(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "executed"
    payload = pickle.dumps(Bomb(target))
    pickle.loads(payload)
    assert target.exists()  # the bomb works
    target.unlink()
    with GrammarCache(directory) as cache:
        cache.set("key", b"value")
    plant(directory, "key", mode=diskcache.core.MODE_PICKLE, value=payload)
    with GrammarCache(directory) as cache:
        assert cache.get("key") is None
        assert cache.available
    assert warned(caplog)
    assert not target.exists()


def test_a_planted_pickle_file_is_never_loaded(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    with GrammarCache(directory) as cache:
        cache.set("key", LARGE)
    (file,) = directory.rglob("*.val")
    file.write_bytes(pickle.dumps(Bomb(target)))
    plant(directory, "key", mode=diskcache.core.MODE_PICKLE)
    with GrammarCache(directory) as cache:
        assert cache.get("key") is None
    assert not target.exists()


@pytest.mark.parametrize("name", ["../secret", "ab/../../secret", "ABSOLUTE", 7, b"x", ""])
def test_a_planted_file_name_is_neither_read_nor_removed(
    directory: Path, tmp_path: Path, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    with GrammarCache(directory) as cache:
        cache.set("key", LARGE)
        (file,) = directory.rglob("*.val")
        secret.write_bytes(file.read_bytes())  # even a payload that would check out
    plant(directory, "key", filename=str(secret) if name == "ABSOLUTE" else name)
    with GrammarCache(directory) as cache:
        assert cache.get("key") is None
        assert cache.set("key", b"new")  # replacing removes the old entry's file
        assert cache.get("key") == b"new"
    assert secret.exists()
    assert warned(caplog)


def test_links_do_not_lead_out_of_the_directory(directory: Path, tmp_path: Path) -> None:
    with GrammarCache(directory) as cache:
        cache.set("key", LARGE)
        (file,) = directory.rglob("*.val")
        outside = tmp_path / "outside"
        file.parent.rename(outside)
        file.parent.symlink_to(outside, target_is_directory=True)
        assert cache.get("key") is None
        assert cache.set("key", b"new")
    assert (outside / file.name).exists()


def test_a_pipe_in_place_of_a_file_does_not_block(directory: Path) -> None:
    with GrammarCache(directory) as cache:
        cache.set("key", LARGE)
        (file,) = directory.rglob("*.val")
        file.unlink()
        os.mkfifo(file)
        assert cache.get("key") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_directory", "/elsewhere"),
        ("disk__directory", "/elsewhere"),
        ("get", "text"),
        ("sqlite_journal_mode", "off"),
        ("sqlite_x; DROP TABLE Cache", 1),
    ],
)
def test_planted_settings_are_refused(
    directory: Path, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    GrammarCache(directory).close()
    connection = sqlite3.connect(directory / "cache.db")
    connection.execute("INSERT OR REPLACE INTO Settings VALUES (?, ?)", (key, value))
    connection.commit()
    connection.close()
    with GrammarCache(directory) as cache:
        assert cache.get("key") is None
        cache.set("key", b"value")
    assert not Path("/elsewhere").exists()
    assert key == "sqlite_journal_mode" or warned(caplog)


def test_a_value_moved_to_another_key_is_a_miss(directory: Path) -> None:
    with GrammarCache(directory) as cache:
        cache.set("a", b"value of a")
        plant(directory, "a", key="b")
        assert cache.get("b") is None


@pytest.mark.parametrize("value", [b"", b"short", b"x" * 100, "text", 7, 1.5, None])
def test_a_foreign_value_is_a_miss(directory: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with GrammarCache(directory) as cache:
        cache.set("key", b"value")
        plant(directory, "key", value=value)
        assert cache.get("key") is None
    assert warned(caplog)


def test_a_flipped_bit_is_a_miss(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with GrammarCache(directory) as cache:
        cache.set("key", LARGE)
        (file,) = directory.rglob("*.val")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert cache.get("key") is None
        assert cache.set("key", LARGE)
        assert cache.get("key") == LARGE
    assert warned(caplog)


def test_the_disk_takes_only_bytes_under_strings(tmp_path: Path) -> None:
    disk = BytesDisk(str(tmp_path))
    for key in (1, 1.5, b"x", ("a",), None):
        with pytest.raises(RefusedEntry):
            disk.put(key)
    for value in ("text", 1, None, bytearray(b"x"), {"a": 1}):
        with pytest.raises(RefusedEntry):
            disk.store(value, False)
    with pytest.raises(RefusedEntry):
        disk.get(pickle.dumps("key"), False)


# -- what is damaged, locked or missing ---------------------------------------------------------------------


def unusable(directory: Path, caplog: pytest.LogCaptureFixture) -> bool:
    with GrammarCache(directory, lock_seconds=0.1) as cache:
        missed = cache.get("key") is None and not cache.set("new", b"value")
    return missed and warned(caplog)


def test_a_garbage_database_is_no_cache(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.mkdir()
    (directory / "cache.db").write_bytes(b"this is no database " * 500)
    assert unusable(directory, caplog)


@pytest.mark.parametrize("keep", [100, 4096, 6000])
def test_a_truncated_database_never_raises(
    directory: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    with GrammarCache(directory) as cache:
        cache.set("key", b"value" * 2000)
    for companion in directory.glob("cache.db-*"):
        companion.unlink()
    database = directory / "cache.db"
    database.write_bytes(database.read_bytes()[:keep])
    with GrammarCache(directory) as cache:
        assert cache.get("key") is None
    assert warned(caplog)


def test_a_database_damaged_while_open_never_raises(directory: Path) -> None:
    with GrammarCache(directory) as cache:
        cache.set("key", b"value" * 2000)
        (directory / "cache.db").write_bytes(b"\xff" * 9000)
        for companion in directory.glob("cache.db-*"):
            companion.write_bytes(b"\xff" * 9000)
        for number in range(5):
            cache.get(f"key {number}")
            cache.set(f"key {number}", b"x")


def test_another_schema_is_no_cache(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.mkdir()
    connection = sqlite3.connect(directory / "cache.db")
    connection.execute("CREATE TABLE Cache (key TEXT)")
    connection.execute("CREATE TABLE Settings (name TEXT)")
    connection.commit()
    connection.close()
    assert unusable(directory, caplog)


def test_a_locked_database_costs_a_moment_and_no_error(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    GrammarCache(directory).close()
    holder = sqlite3.connect(directory / "cache.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    assert unusable(directory, caplog)
    assert time.monotonic() - start < 5
    holder.execute("ROLLBACK")
    holder.close()


def test_a_lock_taken_later_gives_misses_and_then_leaves_the_cache_alone(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = GrammarCache(directory, lock_seconds=0.1)
    cache.set("key", b"value")
    holder = sqlite3.connect(directory / "cache.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert not any(cache.set(f"key {number}", b"x") for number in range(3))
    assert not cache.available
    holder.execute("ROLLBACK")
    holder.close()
    assert cache.get("key") is None
    assert warned(caplog)


@pytest.mark.parametrize("where", ["file", "below a file"])
def test_a_path_that_is_no_directory_is_no_cache(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert unusable(tmp_path / "file" / ("x" if where != "file" else ""), caplog)


def test_a_read_only_directory_is_no_cache(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o500)
    if os.access(directory, os.W_OK):  # root may write anywhere: let the system say no
        monkeypatch.setattr(os, "access", lambda *_: False)
    assert unusable(directory, caplog)


def test_a_directory_that_vanishes_never_raises(directory: Path) -> None:
    cache = GrammarCache(directory)
    cache.set("key", LARGE)
    directory.rename(directory.with_name("gone"))
    for number in range(4):
        cache.get(f"key {number}")
        cache.set(f"key {number}", LARGE)
    cache.close()


def test_a_database_that_is_a_link_is_no_cache(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir()
    (directory / "cache.db").symlink_to(tmp_path / "elsewhere.db")
    assert unusable(directory, caplog)
    assert not (tmp_path / "elsewhere.db").exists()


_MANY = """
import sys
from jfbatch.grammar.cache import GrammarCache
directory, number = sys.argv[1], int(sys.argv[2])
with GrammarCache(directory, lock_seconds=float(sys.argv[3])) as cache:
    for place in range(40):
        cache.set(f"key {place}", b"x" * (place * 1000))
        found = cache.get(f"key {(place * 7 + number) % 40}")
        assert found is None or found == b"x" * ((place * 7 + number) % 40 * 1000), len(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lock_seconds", [1.0, 0.0])
def test_many_processes_at_one_new_directory_never_fail(directory: Path, lock_seconds: float) -> None:
    """As 64 tasks on a shared file system do at once; a lock that is not had is a grammar compiled again."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _MANY, str(directory), str(number), str(lock_seconds)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert "Traceback" not in stderr
    with GrammarCache(directory) as cache:
        assert cache.available
        assert cache.get("key 3") in (None, b"x" * 3000)
