"""The rules that hold over the whole source: which way imports go, what is never used, what is documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "jfbatch"
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 450


def name_of(path: Path) -> str:
    """jfbatch/rows/store.py -> jfbatch.rows.store"""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


NAMES = frozenset(map(name_of, MODULES))


def imports(path: Path, at_once: bool = False) -> set[str]:
    """The modules of jfbatch that a module imports, those inside functions and for types alone included.

    `at_once` means only those that importing the module imports.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if at_once:
        for node in ast.walk(tree):
            for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                skipped.update(ast.walk(node))
    package = name_of(path).split(".") if path.name == "__init__.py" else name_of(path).split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from jfbatch.engine import model` imports a module, `from jfbatch.job import run` a name.
            found.update(
                f"{module}.{alias.name}" if f"{module}.{alias.name}" in NAMES else module
                for alias in node.names
            )
    return {name for name in found if name.split(".")[0] == "jfbatch"}


def in_package(package: str) -> list[Path]:
    return [path for path in MODULES if path.relative_to(SOURCE).parts[0] == package]


def test_the_imports_are_read_at_all() -> None:
    assert "jfbatch.rows.store" in imports(SOURCE / "job.py")
    assert "jfbatch.engine.engine" in imports(SOURCE / "outcomes.py")
    assert "jfbatch.engine.engine" not in imports(SOURCE / "outcomes.py", at_once=True)
    assert "jfbatch.cluster.start" in imports(SOURCE / "cli.py")


ALLOWED = {
    "grammar": ("jfbatch.grammar", "jfbatch.errors", "jfbatch.kernel_cache"),
    "rows": ("jfbatch.rows", "jfbatch.errors"),
    "engine": ("jfbatch.engine", "jfbatch.errors", "jfbatch.kernel_cache", "jfbatch.grammar.matcher"),
    "report": ("jfbatch.report", "jfbatch.errors"),
}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = ALLOWED[package]
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in in_package(package)
        for name in imports(path)
        if not any(name == base or name.startswith(f"{base}.") for base in allowed)
    ]
    assert wrong == []


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name_of(path): imports(path, at_once=True) & NAMES for path in MODULES}
    finished: set[str] = set()

    def walk(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in finished:
            for target in sorted(graph[name]):
                walk(target, [*way, name])
            finished.add(name)

    for name in sorted(graph):
        walk(name, [])


def test_the_layers_above_the_packages_are_imported_by_the_command_line_alone() -> None:
    above = {"jfbatch.cli", "jfbatch.job", "jfbatch.check"}
    importing = {
        f"{name_of(path)} imports {name}" for path in MODULES for name in imports(path) if name in above
    }
    assert importing <= {
        "jfbatch.__main__ imports jfbatch.cli",
        "jfbatch.cluster.devices imports jfbatch.job",
        "jfbatch.cluster.ray imports jfbatch.job",
        "jfbatch.cluster.start imports jfbatch.job",
        "jfbatch.cluster.worker imports jfbatch.job",
        "jfbatch.cluster.slurm_command imports jfbatch.job",
        "jfbatch.cli imports jfbatch.check",
        "jfbatch.check imports jfbatch.job",
    }


def unpickling_or_running_of_text(path: Path) -> Iterator[str]:
    """The places of a module where data could become code."""
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        if modules & set(names):
            yield f"{name_of(path)}:{node.lineno} imports {names}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            # compile() is a function of ours in places (re.compile, a schema's); the builtin stands alone.
            if called in ("eval", "exec", "compile", "__import__", "yaml.unsafe_load", "torch.load"):
                yield f"{name_of(path)}:{node.lineno} calls {called}"
            if called == "np.load" and any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                yield f"{name_of(path)}:{node.lineno} lets np.load unpickle"


def test_nothing_that_is_read_is_unpickled_or_executed() -> None:
    assert [place for path in MODULES for place in unpickling_or_running_of_text(path)] == []


def test_every_module_says_what_it_is_for() -> None:
    undocumented = [
        name_of(path)
        for path in MODULES
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert undocumented == []


def test_files_are_short_enough_to_hold_in_mind() -> None:
    long = {
        name_of(path): lines
        for path in MODULES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
        and not path.stem.endswith("_tables")  # data, generated
    }
    assert long == {}


def undocumented(path: Path) -> Iterator[str]:
    """Public functions and classes at the top level of a module without a docstring."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(node, documented) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{name_of(path)}.{node.name}"


def test_public_functions_and_classes_are_documented() -> None:
    assert [name for path in MODULES for name in undocumented(path)] == []


def test_no_module_is_called_by_a_word_that_says_nothing() -> None:
    nothing = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert [name for name in NAMES if nothing & set(name.split("."))] == []
