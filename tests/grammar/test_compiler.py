"""Background compiling: sharing, failures, limits, the disk cache."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from jfbatch.errors import GrammarTooLarge, InvalidGrammar
from jfbatch.grammar import compiler as compiler_module
from jfbatch.grammar.ahead import explore_ahead
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.compiler import Compiler, CompilerOptions
from jfbatch.grammar.deadline import check_deadline, deadline
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.vocabulary import Vocabulary

BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokens([*BYTES, b"ab"], end_ids=[257], size=258)


OPTIONS = CompilerOptions(timeout=5, explore=0.05)


def test_equal_patterns_share_one_compile(vocabulary: Vocabulary) -> None:
    with Compiler(vocabulary, OPTIONS) as compiler:
        futures = [compiler.submit("regex", "a+b") for _ in range(10)]
        assert len({id(future) for future in futures}) == 1
        assert futures[0].result(20).matcher().forced_bytes() == b"a"
        assert compiler.submit("regex", "c+").result(20).matcher().forced_bytes() == b"c"
        assert compiler.statistics.compiled == 2


def test_a_failed_pattern_keeps_its_reason_and_is_not_tried_again(vocabulary: Vocabulary) -> None:
    with Compiler(vocabulary, OPTIONS) as compiler:
        first = compiler.submit("regex", "(unclosed")
        with pytest.raises(InvalidGrammar) as caught:
            first.result(20)
        assert compiler.submit("regex", "(unclosed") is first
        assert caught.value.reason
        assert compiler.submit("regex", "fine").result(20)
        assert (compiler.statistics.failed, compiler.statistics.compiled) == (1, 1)


def test_a_schema_error_names_pointer_and_keyword(vocabulary: Vocabulary) -> None:
    with Compiler(vocabulary, OPTIONS) as compiler:
        schema = '{"properties": {"a": {"type": "strin"}}}'
        with pytest.raises(InvalidGrammar, match=r"/properties/a.*type"):
            compiler.submit("schema", schema).result(20)


def test_a_fault_of_the_program_fails_its_pattern_only(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Grammar.from_pattern

    def faulty(kind: str, text: str, *rest: object) -> Grammar:
        if text == "boom":
            raise ZeroDivisionError("planted")
        return real(kind, text, *rest)

    monkeypatch.setattr(Grammar, "from_pattern", staticmethod(faulty))
    with Compiler(vocabulary, OPTIONS) as compiler:
        with pytest.raises(InvalidGrammar, match="ZeroDivisionError: planted"):
            compiler.submit("regex", "boom").result(20)
        assert compiler.submit("regex", "x").result(20)


def test_compiling_stops_itself_at_the_deadline() -> None:
    def compile_for_ever() -> None:
        while True:
            check_deadline()

    with deadline(0.01), pytest.raises(GrammarTooLarge, match=r"limit of 0\.01 s"):
        compile_for_ever()
    check_deadline()  # no limit outside


def test_a_thread_that_never_comes_back_is_replaced(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    real = Grammar.from_pattern

    def stuck(kind: str, text: str, *rest: object) -> Grammar:
        if text == "stuck":
            released.wait(30)
        return real(kind, text, *rest)

    monkeypatch.setattr(Grammar, "from_pattern", staticmethod(stuck))
    with Compiler(vocabulary, CompilerOptions(timeout=0.1, explore=0)) as compiler:
        lost = compiler.submit("regex", "stuck")
        other = compiler.submit("regex", "x")
        with pytest.raises(GrammarTooLarge, match="limit"):
            lost.result(20)
        assert other.result(20).matcher().forced_bytes() == b"x"
        released.set()


def test_a_second_run_loads_instead_of_compiling(vocabulary: Vocabulary, tmp_path: Path) -> None:
    for turn in range(2):
        with GrammarCache(tmp_path) as cache, Compiler(vocabulary, OPTIONS, cache) as compiler:
            grammar = compiler.submit("regex", "[ab]{3}c").result(20)
            matcher = grammar.matcher()
            for token in b"abac":
                matcher.accept_token(token)
            assert matcher.is_finished()
            wait_until(lambda: compiler.queue.empty())
            assert (compiler.statistics.compiled, compiler.statistics.loaded) == (1 - turn, turn)


def test_options_that_change_the_language_change_the_fingerprint(vocabulary: Vocabulary) -> None:
    prints = set()
    for options in (
        CompilerOptions(),
        CompilerOptions(style="compact"),
        CompilerOptions(objects="open"),
        CompilerOptions(strict=True),
    ):
        with Compiler(vocabulary, options) as compiler:
            prints.add(compiler.fingerprint("schema", "{}"))
    assert len(prints) == 4


def test_a_damaged_cache_entry_is_compiled_again(
    vocabulary: Vocabulary, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with GrammarCache(tmp_path) as cache:
        with Compiler(vocabulary, OPTIONS) as compiler:
            key = compiler.fingerprint("regex", "ab*")
        cache.set(key, b"not a grammar")
        with Compiler(vocabulary, OPTIONS, cache) as compiler:
            assert compiler.submit("regex", "ab*").result(20)
            assert compiler.statistics.compiled == 1
    assert "damaged" in caplog.text


def test_looking_ahead_makes_masks_within_its_time(vocabulary: Vocabulary) -> None:
    grammar = Grammar.from_regex("[a-f]{20}(foo|bar|[0-9]{30})", vocabulary)
    started = time.monotonic()
    explore_ahead(grammar, 0.2)
    assert grammar.masks.walks > 10
    assert time.monotonic() - started < 5
    assert compiler_module.FORMAT


def wait_until(condition: object, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.01)
