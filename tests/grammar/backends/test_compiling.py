"""The compiler with other backends: choosing, falling back, sharing, limits, what goes to the disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from jfbatch.errors import GrammarTooLarge, InvalidGrammar, Unsatisfiable, UnsupportedSchema
from jfbatch.grammar import backends
from jfbatch.grammar.ahead import warm_up
from jfbatch.grammar.backends import is_installed
from jfbatch.grammar.backends.protocol import BackendName
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.compiler import Compiler, CompilerOptions, candidates_of
from jfbatch.grammar.grammar import Grammar
from tests.grammar.backends.engines import FOREIGN, VOCABULARY, takes

OPTIONS = CompilerOptions(style="compact", timeout=20, explore=0.01, backend="auto")
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
with_llguidance = pytest.mark.skipif(not is_installed("llguidance"), reason="llguidance is not installed")


def refuse_with_fsm(monkeypatch: pytest.MonkeyPatch, error: InvalidGrammar) -> list[str]:
    """Let our own front end refuse every pattern; the list gets those it was asked for."""
    asked: list[str] = []

    def refuse(kind: str, text: str, *_: Any) -> Grammar:
        asked.append(text)
        raise error

    monkeypatch.setattr(Grammar, "from_pattern", staticmethod(refuse))
    return asked


def test_auto_is_ours_where_ours_will_do() -> None:
    with Compiler(VOCABULARY, OPTIONS) as compiler:
        grammar = compiler.submit("regex", "a+").result(30)
        assert isinstance(grammar, Grammar) and grammar.backend == "fsm"
        assert compiler.submit("regex", "a+", "fsm").result(30) is grammar
        assert compiler.statistics.compiled == 1


@pytest.mark.parametrize("name", FOREIGN)
def test_a_pattern_is_compiled_once_per_backend(name: BackendName) -> None:
    with Compiler(VOCABULARY, OPTIONS) as compiler:
        futures = [compiler.submit("schema", SCHEMA, name) for _ in range(5)]
        assert len({id(future) for future in futures}) == 1
        grammar = futures[0].result(60)
        assert grammar.backend == name and grammar.unenforced
        assert takes(grammar, b'{"a":true}')
        assert compiler.submit("schema", SCHEMA).result(60).backend == "fsm"
        assert compiler.statistics.compiled == 2


@pytest.mark.parametrize("name", FOREIGN)
def test_a_refusal_of_another_engine_is_remembered(
    name: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Compiler(VOCABULARY, OPTIONS) as compiler:
        first = compiler.submit("regex", "(unclosed", name)
        with pytest.raises(InvalidGrammar, match=name):
            first.result(60)
        monkeypatch.setattr(backends, "open_backend", lambda *_: pytest.fail("tried again"))
        assert compiler.submit("regex", "(unclosed", name) is first
        assert compiler.statistics.failed == 1


@with_llguidance
def test_auto_hands_on_what_ours_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuse_with_fsm(monkeypatch, UnsupportedSchema("/a", "odd", "not known"))
    with Compiler(VOCABULARY, OPTIONS) as compiler:
        grammar = compiler.submit("schema", SCHEMA).result(30)
        assert grammar.backend == "llguidance" and takes(grammar, b'{"a":false}')
        with pytest.raises(UnsupportedSchema, match=r"at /a: odd: not known$"):
            compiler.submit("schema", SCHEMA, "fsm").result(30)
        assert compiler.submit("schema", SCHEMA, "llguidance").result(30) is grammar
        compiler.submit("regex", "b", "fsm")  # when it is there, nothing of the first is left to do
        compiler.close()
        assert asked.count(SCHEMA) <= 2  # by the compiler, and by what judges the outputs


@with_llguidance
def test_where_both_refuse_the_place_is_kept_and_both_reasons_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_with_fsm(monkeypatch, UnsupportedSchema("/a", "odd", "not known"))
    with Compiler(VOCABULARY, OPTIONS) as compiler:
        future = compiler.submit("schema", '{"type": "strin"}')
        with pytest.raises(
            UnsupportedSchema, match="at /a: odd: not known; llguidance refuses it too"
        ) as caught:
            future.result(30)
        assert (caught.value.path, caught.value.keyword) == ("/a", "odd")
        assert compiler.statistics.failed == 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "integer", "minimum": 5, "maximum": 4},
    ],
)
def test_a_schema_that_no_value_satisfies_goes_to_no_other_engine(
    schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "open_backend", lambda *_: pytest.fail("handed on"))
    with Compiler(VOCABULARY, OPTIONS) as compiler:
        future = compiler.submit("schema", json.dumps(schema))
        with pytest.raises(Unsatisfiable, match=r"no value can satisfy it$"):
            future.result(30)


@with_llguidance
def test_an_engine_that_breaks_at_its_first_mask_refuses_the_pattern(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Compiler(VOCABULARY, OPTIONS) as compiler, pytest.raises(InvalidGrammar, match=r"^llguidance: "):
        compiler.submit("schema", '{"$ref": "#"}', "llguidance").result(30)
    assert caplog.text == ""


@with_llguidance
def test_auto_goes_on_to_the_next_when_ours_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, release = threading.Event(), threading.Event()
    real = Grammar.from_pattern

    def hang(kind: str, text: str, vocabulary: Any, *rest: Any) -> Grammar:
        if vocabulary is VOCABULARY and text == SCHEMA:
            hanging.set()
            release.wait(30)
        return real(kind, text, vocabulary, *rest)

    warm_up()
    monkeypatch.setattr(Grammar, "from_pattern", staticmethod(hang))
    with Compiler(VOCABULARY, CompilerOptions(style="compact", timeout=0.2, backend="auto")) as compiler:
        future = compiler.submit("schema", SCHEMA)
        assert hanging.wait(10)
        grammar = future.result(30)
        assert grammar.backend == "llguidance"
        with pytest.raises(GrammarTooLarge, match=r"limit of 0\.2 s"):
            compiler.submit("schema", SCHEMA, "fsm").result(30)
        release.set()
        assert compiler.submit("regex", "x", "fsm").result(30).backend == "fsm"


@pytest.mark.parametrize("name", FOREIGN)
def test_an_engine_that_does_not_come_back_costs_its_rows_only(
    name: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Slow:
        def compile(self, *_: Any) -> Any:
            release.wait(30)
            raise InvalidGrammar("too late")

    warm_up()
    monkeypatch.setattr(backends, "open_backend", lambda *_: Slow())
    with Compiler(VOCABULARY, CompilerOptions(style="compact", timeout=0.2)) as compiler:
        future = compiler.submit("regex", "a", name)
        with pytest.raises(GrammarTooLarge, match=r"limit of 0\.2 s"):
            future.result(30)
        assert compiler.submit("regex", "a").result(30).backend == "fsm"
        release.set()


def test_what_auto_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "is_installed", lambda name: True)
    assert candidates_of("auto", "schema", "{}") == ("fsm", "llguidance")
    assert candidates_of("auto", "schema", "{}", strict=True) == ("fsm",)
    assert candidates_of("auto", "regex", "a+", strict=True) == ("fsm", "llguidance")
    assert candidates_of("auto", "regex", "[a--b]") == ("fsm",)  # Rust's, not Python's
    assert candidates_of("xgrammar", "regex", "[a--b]") == ("xgrammar",)
    monkeypatch.setattr(backends, "is_installed", lambda name: False)
    assert candidates_of("auto", "schema", "{}") == ("fsm",)


def test_a_missing_engine_fails_its_rows_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with Compiler(VOCABULARY, OPTIONS) as compiler:
        with pytest.raises(InvalidGrammar, match=r"pip install 'jfbatch\[xgrammar\]'"):
            compiler.submit("regex", "a", "xgrammar").result(30)
        assert compiler.submit("regex", "a", "auto").result(30).backend == "fsm"


@pytest.mark.parametrize("name", FOREIGN)
def test_what_an_engine_cannot_do_is_refused_before_it_is_tried(name: BackendName) -> None:
    with Compiler(VOCABULARY, CompilerOptions(style="compact", strict=True)) as compiler:
        with pytest.raises(InvalidGrammar, match=f"{name}.*--strict needs fsm"):
            compiler.submit("schema", SCHEMA, name).result(60)
        assert compiler.submit("regex", "a", name).result(60).backend == name
    if name == "outlines":
        with Compiler(VOCABULARY, OPTIONS) as compiler, pytest.raises(InvalidGrammar, match="kind 'grammar'"):
            compiler.submit("grammar", "start: A\nA: /a/\n", name).result(60)


@pytest.mark.parametrize("name", FOREIGN)
def test_only_our_grammars_go_to_the_disk(name: BackendName, tmp_path: Path) -> None:
    with GrammarCache(tmp_path) as cache:
        with Compiler(VOCABULARY, OPTIONS, cache) as compiler:
            compiler.submit("schema", SCHEMA, name).result(60)
        with Compiler(VOCABULARY, OPTIONS, cache) as compiler:
            assert compiler.submit("schema", SCHEMA).result(60).backend == "fsm"
            assert compiler.statistics.loaded == 0
        with Compiler(VOCABULARY, OPTIONS, cache) as compiler:
            compiler.submit("schema", SCHEMA).result(60)
            compiler.submit("schema", SCHEMA, name).result(60)
            assert (compiler.statistics.loaded, compiler.statistics.compiled) == (1, 1)
