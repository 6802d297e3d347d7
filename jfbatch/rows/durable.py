"""Files that are whole or absent: written under a temporary name, fsynced, renamed, the directory fsynced.

Also the lock that keeps two processes from one output; the kernel drops it when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from jfbatch.errors import OutputError, UsageError

TEMPORARY_SUFFIX = ".tmp"
_WAY_OUT = "what was committed is kept: put that right and run the same command again"


@contextlib.contextmanager
def output_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turns what the file system and Arrow raise inside into one OutputError that names the file."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise OutputError(f"cannot {action} {path}: {reason}; {_WAY_OUT}") from error


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Makes `path` hold `data`, surviving a crash right after. On OutputError it is as before."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with output_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                sync(file.fileno())
            rename(temporary, path)
        except OSError:
            # Gives back the room that a full disk lacks; a leftover would be ignored and removed anyway.
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def sync(descriptor: int) -> None:
    """fsync."""
    os.fsync(descriptor)


def rename(source: Path, target: Path) -> None:
    """An atomic, durable rename within one directory or between two of one file system. Raises OSError."""
    os.replace(source, target)
    sync_directory(target.parent)
    if source.parent != target.parent:
        sync_directory(source.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OutputLock:
    """Exclusive use of one output, held from construction to `release`.

    An flock on a file: it belongs to the open file, so it ends with the process, however that ends.
    Raises UsageError where another process holds it, OutputError where the file cannot be locked.
    """

    def __init__(self, path: Path, output: str) -> None:
        self._path = path
        while True:
            with output_errors(path, "lock"):
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "another process"
                    os.close(descriptor)
                    raise UsageError(
                        f"{output} is being written by {holder}: wait for it to end, or choose another output"
                    ) from None
                except OSError:
                    os.close(descriptor)
                    raise
                if self._is_current(descriptor):
                    break
                # The holder removed the file between our open and our lock: this lock guards nothing.
                os.close(descriptor)
        self._descriptor: int | None = descriptor
        with output_errors(path, "lock"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._descriptor is not None

    def release(self, remove: bool = False) -> None:
        """Lets others in; `remove` deletes the file too. Safe to call twice."""
        if self._descriptor is None:
            return
        if remove:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        os.close(self._descriptor)
        self._descriptor = None
