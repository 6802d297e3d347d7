"""The word on compiling kernels: once, only when something is compiled, not when quiet."""

from __future__ import annotations

import numba
import pytest

from jfbatch.report.kernels import telling_of_compilation


def compile_something() -> None:
    for _ in range(2):
        numba.njit(lambda number: number + 1)(1)


def test_what_is_compiled_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    with telling_of_compilation():
        assert capsys.readouterr().err == ""
        compile_something()
        assert capsys.readouterr().err.count("compiling kernels") == 1
    compile_something()
    assert capsys.readouterr().err == ""


def test_what_is_compiled_already_is_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    function = numba.njit(lambda number: number + 1)
    function(1)
    with telling_of_compilation():
        assert function(2) == 3
    with telling_of_compilation(quiet=True):
        compile_something()
    assert capsys.readouterr().err == ""
