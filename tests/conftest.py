"""Fixtures that tests of several packages share."""

import os

import pytest

from tests.tiny_model import tiny_model

__all__ = ["tiny_model"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither jfbatch's settings nor a Slurm job around the tests reach them; where their data lies does."""
    for name in [name for name in os.environ if name.startswith(("JFBATCH_", "SLURM_"))]:
        if name != "JFBATCH_TEST_DATA":
            monkeypatch.delenv(name)
