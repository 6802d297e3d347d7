"""Where a table really goes, and whether one can go there: told before anything runs.

A symbolic link at the output is followed, as people link to scratch; what a run keeps beside its output lies
beside the file that the link stands for, so that runs by either name are one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jfbatch.errors import UsageError

_LONGEST_SUFFIX = ".journal"  # of the names beside an output
_USUAL_LIMIT = 255  # bytes of a name, on nearly every file system


def followed(output: Path) -> Path:
    """The file that a link at `output` stands for, whether it is there or not; other paths as they are."""
    return Path(os.path.realpath(output)) if os.path.islink(output) else output


def check_output(output: Path) -> None:
    """Raises UsageError where no table can take this name."""
    # os.path, unlike pathlib, takes what cannot be asked for as what is not there: it is told on writing.
    if "\0" in str(output):
        raise UsageError("the output's name has a NUL in it, which no file's may have")
    if os.path.isdir(output):
        raise UsageError(f"{output} is a directory: name a file to write")
    if os.path.exists(output) and not os.path.isfile(output):
        raise UsageError(f"{output} is not a regular file, such as a table must be: name a file to write")
    target = followed(output)
    if os.path.isdir(journal := target.with_name(target.name + _LONGEST_SUFFIX)):
        raise UsageError(f"{journal} is a directory, and a file of that name lies beside a table: remove it")
    size, limit = len(os.fsencode(target.name)), _longest_name(target.parent)
    if size + len(_LONGEST_SUFFIX) > limit:
        raise UsageError(
            f"the output's name has {size} bytes, and {target.name[:20]}...{_LONGEST_SUFFIX} beside it would "
            f"have more than the {limit} that this file system takes: choose a shorter name"
        )


def _longest_name(directory: Path) -> int:
    """The most bytes of a name in a directory that may have yet to be made."""
    for existing in (directory, *directory.parents):
        with contextlib.suppress(OSError, ValueError):
            return os.pathconf(existing, "PC_NAME_MAX")
    return _USUAL_LIMIT
