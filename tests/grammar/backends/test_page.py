"""docs/backends.md is made from what the backends say, whether they are installed or not."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

from jfbatch import config
from jfbatch.grammar.backends import BACKENDS
from jfbatch.grammar.backends.page import MARKER, backends_page
from jfbatch.grammar.backends.protocol import KINDS, STYLES
from jfbatch.rows.row import BACKENDS as ROW_BACKENDS

ROOT = Path(__file__).parents[3]


def test_the_page_is_the_one_that_is_made() -> None:
    made, marker, _ = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8").partition(MARKER)
    assert made + marker == backends_page(), "python -m jfbatch.grammar.backends docs/backends.md"


def test_the_page_can_be_made_again_and_measurements_stay(tmp_path: Path) -> None:
    file = tmp_path / "backends.md"
    command = [sys.executable, "-m", "jfbatch.grammar.backends"]
    assert (
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout.decode() == backends_page()
    )
    file.write_text(f"an older page\n{MARKER}\n| measured |\n", encoding="utf-8")
    for _ in range(2):
        subprocess.run([*command, str(file)], check=True, cwd=ROOT)
        assert file.read_text(encoding="utf-8") == f"{backends_page()}\n| measured |\n"


def test_no_engine_is_imported_before_it_is_needed() -> None:
    for path in (ROOT / "jfbatch" / "grammar" / "backends").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert not {name.split(".")[0] for name in modules} & {"llguidance", "xgrammar", "outlines_core"}


def test_capabilities_speak_of_what_there_is() -> None:
    assert list(BACKENDS) == ["fsm", "llguidance", "xgrammar", "outlines"]
    for name, backend in BACKENDS.items():
        assert backend.name == name
        assert set(backend.kinds) <= set(KINDS) and set(backend.styles) <= set(STYLES)
    assert BACKENDS["fsm"].styles == STYLES and set(BACKENDS["fsm"].kinds) == set(KINDS)


def test_rows_settings_and_extras_know_the_same_backends() -> None:
    (setting,) = (setting for setting in config.settings() if setting.name == "backend")
    assert setting.default == "auto"
    assert ROW_BACKENDS == ("auto", *BACKENDS) == setting.annotation.__args__
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(BACKENDS) - {"fsm"} <= set(extras)
