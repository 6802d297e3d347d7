"""Ready grammars within a memory limit: those met longest ago go, and come back when they are met again."""

from __future__ import annotations

from pathlib import Path

from jfbatch.grammar import Vocabulary
from jfbatch.grammar.cache import GrammarCache
from jfbatch.grammar.compiler import Compiler, CompilerOptions
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.kept import MEASURED_EVERY, KeptKeys

BYTES = Vocabulary.from_tokens([bytes([byte]) for byte in range(256)] + [None], end_ids=[256])


def test_the_keys_met_longest_ago_go_first() -> None:
    kept = KeptKeys(10)
    for key in "abc":
        assert kept.add(key, lambda _: 3) == []
    kept.meet("a")
    kept.meet("never added")
    assert kept.add("d", lambda _: 3) == ["b"]
    assert "a" in kept and "b" not in kept and len(kept) == 3 and kept.bytes == 9
    assert kept.add("e", lambda _: 50) == ["c", "a", "d"]  # the newest stays, whatever it takes
    assert "e" in kept and kept.bytes == 50


def test_what_has_grown_is_measured_again() -> None:
    kept = KeptKeys(1000)
    sizes = {str(number): 1 for number in range(MEASURED_EVERY)}
    *early, last = sizes
    for key in early:
        assert kept.add(key, sizes.__getitem__) == []
    sizes = dict.fromkeys(sizes, 10)
    dropped = kept.add(last, sizes.__getitem__)
    assert dropped == [str(number) for number in range(MEASURED_EVERY - 100)]


def test_many_patterns_take_no_more_memory_than_allowed_and_come_back(tmp_path: Path) -> None:
    def pattern(number: int) -> str:
        return f"a{{{number}}}b"

    limit = 10 * 70_000
    with (
        GrammarCache(tmp_path / "cache") as cache,
        Compiler(BYTES, CompilerOptions(memory=limit, explore=0.01), cache) as compiler,
    ):
        first = compiler.submit("regex", pattern(1))
        held = first.result(timeout=60)
        for number in range(2, 40):
            compiler.submit("regex", pattern(number)).result(timeout=60)
        compiler.submit("regex", "the last one").result(timeout=60)
        assert compiler.kept.bytes <= limit + 200_000
        assert len(compiler.outcomes) < 15 and len(compiler.futures) < 15
        assert held.matcher().shortest_ending() == b"ab"  # a row in flight keeps its grammar
        compiled = compiler.statistics.compiled
        again = compiler.submit("regex", pattern(1))
        assert again is not first
        grammar = again.result(timeout=60)
        assert isinstance(grammar, Grammar) and grammar.matcher().shortest_ending() == b"ab"
        assert (compiler.statistics.compiled, compiler.statistics.loaded) == (compiled, 1)
        assert compiler.submit("regex", pattern(1)) is again


def test_refused_patterns_are_given_up_as_well() -> None:
    with Compiler(BYTES, CompilerOptions(memory=20 * 4096)) as compiler:
        for number in range(100):
            assert compiler.submit("regex", f"({number}").exception(timeout=60) is not None
        compiler.submit("regex", "x").result(timeout=60)
        assert len(compiler.futures) < 40
