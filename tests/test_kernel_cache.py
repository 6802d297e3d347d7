"""Kernels where their cache cannot be kept: they are compiled all the same, with one warning."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.run_command import ROOT
from tests.test_architecture import MODULES, name_of

KERNELS = """
from jfbatch.kernel_cache import compiled

@compiled
def twice(number):
    return 2 * number

@compiled
def half(number):
    return number / 2
"""
USE = """
from kernels import half, twice
print(twice(3), twice(1.5), half(5))
"""
NOWHERE = """
import tempfile
def refused(**_):
    raise OSError(30, "Read-only file system")
tempfile.TemporaryFile = refused
"""
FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
"""


def use(directory: Path, before: str = "") -> tuple[str, str]:
    """What a process says that uses two kernels, on stdout and on stderr."""
    (directory / "kernels.py").write_text(KERNELS)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{directory}",
        "NUMBA_CACHE_DIR": str(directory / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{textwrap.dedent(USE)}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    return done.stdout, done.stderr


def test_kernels_are_kept_on_disk(tmp_path: Path) -> None:
    for _ in range(2):
        assert use(tmp_path) == ("6 3.0 2.5\n", "")
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 3


@pytest.mark.parametrize("trouble", [NOWHERE, FULL])
def test_where_nothing_can_be_written_kernels_are_compiled_in_memory(tmp_path: Path, trouble: str) -> None:
    stdout, stderr = use(tmp_path, trouble)
    assert stdout == "6 3.0 2.5\n"
    assert stderr.startswith("compiled kernels cannot be kept (") and stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("left", [b"", bytes(100)])
def test_what_a_crash_left_of_the_cache_is_no_failure(tmp_path: Path, left: bytes) -> None:
    use(tmp_path)
    for kept in (tmp_path / "cache").rglob("*.nb?"):
        kept.write_bytes(left)
    stdout, stderr = use(tmp_path)
    assert stdout == "6 3.0 2.5\n"
    assert stderr.count("\n") == 1


CALLEE = """
from pathlib import Path
from jfbatch.kernel_cache import compiled, kept_under_the_source_of
kept = kept_under_the_source_of(Path(__file__).parent, "callee", "caller")

def factor():
    return compiled(lambda number: {} * number, kept)
times = factor()
"""
CALLER = """
from callee import kept, times
from jfbatch.kernel_cache import compiled

def scaled(number):
    return times(number)

scaled = compiled(scaled, kept)
print(scaled(3))
"""


@pytest.mark.parametrize("place", ["beside", "chosen", "home"])
def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path, place: str) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    changed = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"}
    changed["XDG_CACHE_HOME"] = str(tmp_path / "home")
    environment = {**os.environ, **changed}
    environment.pop("NUMBA_CACHE_DIR", None)
    if place == "chosen":
        environment["NUMBA_CACHE_DIR"] = str(tmp_path / "chosen")
    if place == "home":  # neither what was chosen nor the usual directory can be one
        environment["NUMBA_CACHE_DIR"] = "/proc/nothing"
        (tmp_path / "__pycache__").write_text("")
    for factor in (2, 2, 5):
        (tmp_path / "callee.py").write_text(CALLEE.format(factor))
        command = [sys.executable, "-c", "import caller"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.stdout, done.stderr) == (f"{3 * factor}\n", "")
    directory = tmp_path / ("__pycache__" if place == "beside" else place)
    kept = {next(part for part in path.parts if "kernels-" in part) for path in directory.rglob("*.nbi")}
    assert len(kept) == 2


def test_nobody_else_has_numba_compile() -> None:
    compiling = [
        name_of(path)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("njit", "jit", "vectorize", "guvectorize")
    ]
    assert set(compiling) == {"jfbatch.kernel_cache"}
