"""Ready grammars on disk: bytes under string keys, shared by processes, trusted by none.

A cache directory may have been written by anyone, so nothing read from it is unpickled, no path in it
is followed out of it, and every payload carries a checksum over its key and content. Whatever is
wrong with the cache costs a warning and a recompute, never the run.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import sqlite3
import stat
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import diskcache

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_HEADER = struct.Struct("<4sH32s")  # magic, format version, SHA-256 of key and payload
_MAGIC = b"jfbg"
_VALUE_FILE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val", re.ASCII)
_MAX_FAILURES = 3  # in a row, after which the cache is left alone for the rest of the run
_DATABASE = "cache.db"

# No memory mapping: a database truncated by others would end the process with SIGBUS.
# Few entries culled at a time, so that a small cache keeps the entry just stored.
_SETTINGS = diskcache.DEFAULT_SETTINGS | {
    "eviction_policy": "least-recently-stored",
    "cull_limit": 2,
    "sqlite_mmap_size": 0,
}

# How a cache may fail: SQLite, locks, files, and rows of types that the code did not expect.
_FAILURES = (
    sqlite3.Error,
    sqlite3.Warning,
    diskcache.Timeout,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    AssertionError,
    OverflowError,
)


class RefusedEntry(ValueError):
    """The cache holds something that this program did not write."""


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's storage of values, cut down to bytes under string keys.

    diskcache's own classes unpickle keys and values and join any file name to the directory.
    """

    def __init__(self, directory: str, **_settings: Any) -> None:
        # Settings stored in the database are not taken: min_file_size and the like are ours.
        super().__init__(directory, min_file_size=1 << 15)

    def put(self, key: Any) -> tuple[str, bool]:
        if type(key) is not str:
            raise RefusedEntry(f"a key must be a string, not {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        if type(key) is not str or not raw:
            raise RefusedEntry("a stored key is not a plain string")
        return key

    def store(self, value: Any, read: bool, key: Any = diskcache.UNKNOWN) -> tuple[int, int, str | None, Any]:
        if type(value) is not bytes or read:
            raise RefusedEntry(f"a value must be bytes, not {type(value).__name__}")
        if len(value) < self.min_file_size:
            return 0, diskcache.core.MODE_RAW, None, sqlite3.Binary(value)
        name, path = self.filename(key, value)
        self._write(path, io.BytesIO(value), "xb")
        return len(value), diskcache.core.MODE_BINARY, name, None

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> bytes:
        if read:
            raise RefusedEntry("open file handles are not given out")
        if mode == diskcache.core.MODE_RAW and filename is None and type(value) is bytes:
            return value
        if mode == diskcache.core.MODE_BINARY and value is None:
            return _read_regular_file(self._inside(filename))
        raise RefusedEntry(f"an entry is stored in mode {mode!r}, which is not plain bytes")

    def remove(self, file_path: Any) -> None:
        try:
            path = self._inside(file_path)
        except RefusedEntry as error:
            logger.warning("grammar cache %s: %s; left alone", self._directory, error)
            return
        path.unlink(missing_ok=True)
        for folder in (path.parent, path.parent.parent):
            try:
                folder.rmdir()
            except OSError:  # not empty, or another process was faster
                break

    def _inside(self, name: Any) -> Path:
        """The path of a value file, which must have the form that `filename` makes and stay in here."""
        if type(name) is not str or not _VALUE_FILE.fullmatch(name.replace(os.sep, "/")):
            raise RefusedEntry(f"an entry names the file {name!r}")
        root = os.path.realpath(self._directory)
        path = os.path.join(root, name)
        if os.path.realpath(os.path.dirname(path)) != os.path.dirname(path):
            raise RefusedEntry(f"the file {name!r} lies behind a link")
        return Path(path)


class _GuardedCache(diskcache.Cache):  # type: ignore[misc]
    """diskcache.Cache that takes no settings from the database.

    The original sets every row of the Settings table as an attribute of itself or of its Disk, and
    runs the rest as pragmas; a planted row could so move the directory.
    """

    def reset(self, key: str, value: Any = diskcache.core.ENOVAL, update: bool = True) -> Any:
        if key not in _SETTINGS and key not in diskcache.core.METADATA:
            raise RefusedEntry(f"the cache holds a foreign setting {key!r}")
        if key.startswith("sqlite_") and value is not diskcache.core.ENOVAL and value != _SETTINGS[key]:
            raise RefusedEntry(f"the cache holds a foreign value of {key}")
        return super().reset(key, value, update)


class GrammarCache:
    """A size-limited map from string keys to bytes in a directory; safe across threads and processes.

    `size_limit` is in bytes; past it the entries stored longest ago go. A directory that cannot be used
    gives a cache that holds nothing (`available` is false).
    """

    def __init__(self, directory: str | Path, size_limit: int = 1 << 30, lock_seconds: float = 1.0) -> None:
        self.directory = Path(directory)
        self.size_limit = size_limit
        self._failures = 0
        self._lock = threading.Lock()
        self._cache: _GuardedCache | None = None
        try:
            self._cache = self._open(lock_seconds)
        except _FAILURES as error:
            logger.warning(
                "grammar cache %s cannot be used (%s); grammars are compiled afresh. "
                "If this stays, delete that directory or choose another with --cache-dir",
                self.directory,
                _reason(error),
            )

    @property
    def available(self) -> bool:
        """Whether the cache works (so far)."""
        return self._cache is not None

    def get(self, key: str) -> bytes | None:
        """The bytes stored under the key, or None if there are none, or none that can be trusted."""
        cache = self._cache
        if cache is None:
            return None
        try:
            stored = cache.get(key)
        except _FAILURES as error:
            self._count_failure("read", error)
            return None
        self._failures = 0
        if stored is None:
            return None
        payload = _unseal(key, stored)
        if payload is None:
            logger.warning("grammar cache %s: a damaged entry is ignored", self.directory)
        return payload

    def set(self, key: str, data: bytes) -> bool:
        """Store the bytes; whether that worked. Data beyond half the size limit is not stored."""
        cache = self._cache
        if cache is None or len(data) > self.size_limit // 2:
            return False
        try:
            cache.set(key, _seal(key, data))
        except _FAILURES as error:
            self._count_failure("write", error)
            return False
        self._failures = 0
        return True

    def close(self) -> None:
        """Close the calling thread's connection. The cache holds nothing afterwards."""
        with self._lock:
            cache, self._cache = self._cache, None
        if cache is not None:
            try:
                cache.close()
            except _FAILURES as error:
                logger.warning("grammar cache %s: %s", self.directory, _reason(error))

    def __enter__(self) -> GrammarCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, lock_seconds: float) -> _GuardedCache:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._check_unlocked(lock_seconds)
        settings = _SETTINGS | {"size_limit": self.size_limit}
        return _GuardedCache(str(self.directory), timeout=lock_seconds, disk=BytesDisk, **settings)

    def _check_unlocked(self, lock_seconds: float) -> None:
        """Fail within `lock_seconds` on a locked or damaged database; diskcache would try for minutes."""
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.directory} is not writable")
        database = self.directory / _DATABASE
        if database.is_symlink() or (database.exists() and not database.is_file()):
            raise RefusedEntry(f"{_DATABASE} is not a regular file")
        connection = sqlite3.connect(database, timeout=lock_seconds, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        finally:
            connection.close()

    def _count_failure(self, action: str, error: BaseException) -> None:
        logger.warning("grammar cache %s: cannot %s (%s)", self.directory, action, _reason(error))
        with self._lock:
            self._failures += 1
            if self._failures >= _MAX_FAILURES and self._cache is not None:
                self._cache = None
                logger.warning("grammar cache %s: not used any more in this run", self.directory)


def _read_regular_file(path: Path) -> bytes:
    # Neither a link nor a pipe may stand in for the file: the one leads out, the other blocks.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise RefusedEntry(f"{path.name} is not a regular file")
        return file.read()


def _digest(key: str, payload: bytes) -> bytes:
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(payload)
    return digest.digest()


def _seal(key: str, payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, _digest(key, payload)) + payload


def _unseal(key: str, stored: bytes) -> bytes | None:
    """The payload, or None if the header, version or checksum is not ours."""
    if len(stored) < _HEADER.size:
        return None
    magic, version, digest = _HEADER.unpack_from(stored)
    payload = stored[_HEADER.size :]
    if (magic, version) != (_MAGIC, FORMAT_VERSION) or digest != _digest(key, payload):
        return None
    return payload


def _reason(error: BaseException) -> str:
    if isinstance(error, diskcache.Timeout):
        return "database is locked"
    return str(error) or type(error).__name__
