"""Thinking before an output: free text up to the end tag, then the pattern's own matcher."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from jfbatch.errors import GrammarError
from jfbatch.grammar import Grammar, Matcher, Vocabulary
from jfbatch.grammar.backends.protocol import BackendName
from jfbatch.grammar.reasoning import CIRCLE, Reasoning, ReasoningMatcher
from tests.grammar.backends.engines import ALL, VOCABULARY, compiled, ids

# Some tokens hold the tag, a part of it, or end behind it.
CROSSING = Vocabulary.from_tokens(
    [
        *(bytes([byte]) for byte in range(256)),
        *(
            b"</",
            b"think",
            b"</think>",
            b"a</think>",
            b'>\n\n{"',
            b">\n",
            b'</think>\n\n{"a"',
            b'{"',
            b"</th",
        ),
        None,
    ],
    end_ids=[265],
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


def reasoning(vocabulary: Vocabulary, limit: int = 1000, after: str = "\n\n") -> Reasoning:
    text = json.dumps({"end": "</think>", "after": after})
    return Reasoning(Grammar.from_pattern("reasoning", text, vocabulary), limit)


def over_schema(limit: int = 1000) -> ReasoningMatcher:
    return reasoning(CROSSING, limit).matcher(Grammar.from_json_schema(SCHEMA, CROSSING).matcher())


def write(matcher: Matcher, text: str) -> None:
    for byte in text.encode():
        matcher.accept_token(byte)


def snapshot(matcher: Matcher) -> tuple[Any, ...]:
    return (
        ids(matcher.token_mask()),
        matcher.forced_bytes(),
        matcher.is_accepting(),
        matcher.is_finished(),
        matcher.shortest_ending(),
    )


def walk(
    matcher: Matcher, vocabulary: Vocabulary, chance: random.Random, steps: int
) -> tuple[bytes, list[int]]:
    """A random text through the masks that now and then takes what is forced or ends, and its tokens."""
    text, taken = b"", []
    for _ in range(steps):
        content = [token for token in ids(matcher.token_mask()) if token not in vocabulary.end_ids]
        if not content:
            break
        ending = matcher.shortest_ending()
        along = [t for t in content if ending.startswith(vocabulary.token_bytes[t] or b"-")]
        token = chance.choice(along if along and chance.random() < 0.6 else content)
        matcher.accept_token(token)
        taken.append(token)
        text += vocabulary.token_bytes[token] or b""
    return text, taken


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("schema", SCHEMA), ("regex", "[ab]{2}-[0-9]+"), ("choice", ["red", "green"])],
)
def test_every_backend_can_be_reasoned_about_first(name: BackendName, kind: str, pattern: Any) -> None:
    grammar = compiled(name, kind, pattern)
    thinking = reasoning(VOCABULARY, limit=12)
    chance = random.Random(f"{name} {kind}")
    behind = 0
    for _ in range(25):
        matcher = thinking.matcher(grammar.matcher())
        text, taken = walk(matcher, VOCABULARY, chance, chance.randrange(40))
        count = chance.randrange(len(taken) + 1)
        before = snapshot(matcher)
        matcher.rollback(count)
        for token in taken[len(taken) - count :]:
            matcher.accept_token(token)
        assert snapshot(matcher) == before
        text += matcher.shortest_ending()
        thought, tag, output = text.partition(b"</think>\n\n")
        assert tag and b"</think>" not in thought
        alone = grammar.matcher()
        for byte in output:
            alone.accept_token(byte)
        assert alone.is_accepting()
        behind += b"</think>" in text[: len(text) - len(before[-1])]
    assert behind > 3


def test_accept_and_roll_back_gives_the_same_masks() -> None:
    chance = random.Random(1)
    for _ in range(30):
        matcher = over_schema(limit=20)
        seen, taken = [snapshot(matcher)], []
        for _ in range(40):
            content = [t for t in ids(matcher.token_mask()) if t not in CROSSING.end_ids]
            if not content:
                break
            ending = matcher.shortest_ending()
            along = [t for t in content if ending.startswith(CROSSING.token_bytes[t] or b"-")]
            taken.append(chance.choice(along if along and chance.random() < 0.7 else content))
            matcher.accept_token(taken[-1])
            seen.append(snapshot(matcher))
        while taken:
            back = chance.randrange(1, len(taken) + 1)
            matcher.rollback(back)
            del taken[-back:], seen[-back:]
            assert snapshot(matcher) == seen[-1]
        with pytest.raises(GrammarError):
            matcher.rollback(1)


def test_the_end_tag_is_forced_after_the_limit() -> None:
    matcher = over_schema(limit=3)
    write(matcher, "abc")
    assert matcher.forced_bytes() == b'</think>\n\n{"a": '
    allowed = {CROSSING.token_bytes[token] for token in ids(matcher.token_mask())}
    assert allowed == {b"<", b"</", b"</th", b"</think>"}
    write(matcher, "</think>\n\n")
    assert matcher.forced_bytes() == b'{"a": '
    write(matcher, '{"a": true}')
    assert matcher.is_finished()


def test_a_limit_of_zero_leaves_no_thinking() -> None:
    assert over_schema(limit=0).forced_bytes() == b'</think>\n\n{"a": '


def test_a_character_that_was_begun_is_finished_at_the_limit() -> None:
    matcher = over_schema(limit=1)
    matcher.accept_token("é".encode()[0])
    forced = matcher.forced_bytes()
    assert (b"\xc3" + forced).decode().partition("</think>\n\n{")[1]


def test_thinking_that_goes_round_in_circles_is_ended() -> None:
    matcher = over_schema()
    write(matcher, "ab" * (CIRCLE // 2 - 1) + "a")
    assert len(ids(matcher.token_mask())) > 100
    write(matcher, "b")
    assert matcher.forced_bytes().startswith(b"</think>")
    write(matcher, "</")  # no circle any more, but the tag stays forced
    assert matcher.forced_bytes().startswith(b"think>")
    matcher.rollback(3)
    assert len(ids(matcher.token_mask())) > 100


def test_a_token_that_ends_behind_the_tag_is_taken_apart() -> None:
    whole, parts = over_schema(), over_schema()
    whole.accept_token(262)  # </think>\n\n{"a"
    write(parts, '</think>\n\n{"a"')
    assert snapshot(whole) == snapshot(parts)
    whole.rollback(1)
    assert whole.shortest_ending() == over_schema().shortest_ending()
    write(whole, "x</think")
    before = snapshot(whole)
    whole.accept_token(260)  # >\n\n{"
    assert whole.forced_bytes() == b'a": '
    whole.rollback(1)
    assert snapshot(whole) == before


def test_no_end_token_and_no_unknown_token_while_thinking() -> None:
    matcher = over_schema()
    for token in (265, 9999, -1):
        with pytest.raises(GrammarError):
            matcher.accept_token(token)
    assert not np.unpackbits(matcher.token_mask().view(np.uint8), bitorder="little")[265]


def test_without_white_space_behind_it_the_tag_is_enough() -> None:
    matcher = reasoning(CROSSING, after="").matcher(Grammar.from_regex("[ab]?", CROSSING).matcher())
    write(matcher, "hm</think>")
    assert matcher.is_accepting() and not matcher.is_finished()
    matcher.accept_token(265)
    assert matcher.is_finished()


def test_a_position_has_no_key_while_it_thinks_and_the_outputs_own_behind() -> None:
    grammar = Grammar.from_json_schema(SCHEMA, CROSSING)
    matcher, output = reasoning(CROSSING).matcher(grammar.matcher()), grammar.matcher()
    assert matcher.state_key() is None
    write(matcher, "abc</think>")
    assert matcher.state_key() is None
    write(matcher, '\n\n{"a"')
    write(output, '{"a"')
    assert matcher.state_key() == output.state_key() is not None
