"""Drafts: built from prompt and group, kept within the grammar, cut by their price."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfbatch.engine import drafts
from jfbatch.engine.drafts import Drafter
from jfbatch.engine.jump import Jumper
from jfbatch.engine.retokenize import Retokenizer
from jfbatch.engine.sequence import Request, Sequence
from jfbatch.errors import GrammarTooLarge
from tests.engine.matchers import DIGITS, TEXT, Field, TemplateMatcher, tiny_tokenization

RECORD: list[bytes | Field] = [
    b'{"name": "',
    Field(TEXT, 1, 20),
    b'", "city": "',
    Field(TEXT, 1, 12),
    b'", "count": ',
    Field(DIGITS, 1, 4),
    b"}",
]
TOKENS = tiny_tokenization()
RETOKENIZER = Retokenizer(TOKENS, TOKENS.size)
JUMPER = Jumper(TOKENS, RETOKENIZER)


def row(prompt: str, group: str | None = "g", max_tokens: int = 60) -> Sequence:
    made = Sequence(
        Request("r", TOKENS.encode(prompt), TemplateMatcher(RECORD, TOKENS), max_tokens, group=group),
        max_tokens,
    )
    JUMPER.jump(made)
    return made


def choose(drafter: Drafter, sequence: Sequence, token: int) -> None:
    """The model's choice, as the engine takes it in."""
    start = len(sequence.text)
    sequence.matcher.accept_token(token)
    sequence.append(token, TOKENS.token_bytes(token))
    JUMPER.jump(sequence)
    drafter.learn(sequence, start, token)


def write(drafter: Drafter, sequence: Sequence, text: str, price: float = 0.1) -> None:
    """Let the model write `text` token by token, with a draft before every choice."""
    while len(sequence.text) < len(text):
        drafter.draft(sequence, price)
        ids = TOKENS.encode(text[len(sequence.text) :])
        choose(drafter, sequence, ids[0])


def drafted(sequence: Sequence) -> bytes:
    return b"".join(map(TOKENS.token_bytes, sequence.drafts))


def test_a_value_that_was_begun_is_continued_from_the_prompt() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    sequence = row("A note by Hannah Carlos from Graz. ")
    write(drafter, sequence, '{"name": "Han')
    drafter.draft(sequence, 0.1)
    assert drafted(sequence).startswith(b"nah Carlos")


def test_what_the_grammar_forces_is_drafted_with_what_follows() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    for _ in range(6):
        write(drafter, row("Hello. "), '{"name": "anna", "city": "Graz", "count": 12}')
    sequence = row("Hello. ")
    drafter.draft(sequence, 0.05)
    assert (bytes(sequence.text) + drafted(sequence)).startswith(b'{"name": "anna", "city": "Graz"')
    given = [TOKENS.token_bytes(sequence.token_ids[index]) for index in sorted(sequence.given)]
    assert b"city" in b"".join(given)
    assert sequence.certain not in sequence.given


def test_groups_do_not_learn_from_each_other() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    for _ in range(6):
        write(drafter, row("Hello. "), '{"name": "anna", "city": "Graz", "count": 12}')
    other, alone = row("Hello. ", group="h"), row("Hello. ", group=None)
    for sequence in (other, alone):
        drafter.draft(sequence, 0.05)
        assert b"anna" not in drafted(sequence)


def test_many_groups_remember_no_more_together_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_CONTEXTS", 400)
    drafter = Drafter(TOKENS, RETOKENIZER)
    for number in range(300):
        write(
            drafter, row("Hello. ", f"g{number}"), f'{{"name": "a{number}", "city": "b{number}", "count": 1}}'
        )
        assert len(drafter._groups) <= 256
        together = sum(len(group.phrases) for group in drafter._groups.values())
        assert together <= 400 + len(drafter._groups)


def test_no_draft_is_worth_any_price_and_none_passes_the_limit() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    for _ in range(6):
        write(drafter, row("Hello. "), '{"name": "anna", "city": "Graz", "count": 12}')
    sequence = row("Hello. ")
    drafter.draft(sequence, math.inf)
    assert sequence.drafts == []
    tight = row("Hello. ")
    tight.limit = tight.output_tokens + 3
    drafter.draft(tight, 0.01)
    assert len(tight.drafts) == 2
    none = Drafter(TOKENS, RETOKENIZER, longest=0)
    none.draft(sequence, 0.01)
    assert sequence.drafts == []


def test_a_dear_step_drafts_less() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    for name in ("anna", "anna", "brian", "anna"):
        write(drafter, row("Hello. "), f'{{"name": "{name}", "city": "Graz", "count": 12}}')
    lengths = []
    for price in (0.01, 0.5, 3, 100):
        sequence = row("Hello. ")
        drafter.draft(sequence, price)
        lengths.append(len(sequence.drafts))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2]


def test_guesses_that_were_not_offered_are_judged_too() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    for _ in range(8):
        sequence = row("A note by Hannah Carlos. ", group=None)
        write(drafter, sequence, '{"name": "Hannah Carlos", "city": "G', price=1e6)
    assert drafter.trust.offered
    assert sum(drafter.trust.accepted.values()) > 0


def test_where_nothing_jumps_forced_text_is_drafted_as_far_as_the_model_cuts_it_alike() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)

    def write_forced(cut_alike: bool) -> int:
        """How many drafts are offered at the start of a row whose model cuts what is forced in its way."""
        matcher = TemplateMatcher(RECORD, TOKENS)
        sequence = Sequence(Request("r", TOKENS.encode("Hello. "), matcher, 60), 60, can_jump=False)
        drafter.draft(sequence, 2.0)
        offered = len(sequence.drafts)
        for _ in range(4):
            drafter.draft(sequence, 2.0)
            rest = RECORD[0][len(sequence.text) :]
            assert isinstance(rest, bytes)
            token = (TOKENS.encode(rest.decode()) if cut_alike else TOKENS.encode(chr(rest[0])))[0]
            if sequence.drafts:
                drafter.record(sequence, sequence.certain, sequence.drafts[0] == token)
            start = len(sequence.text)
            sequence.matcher.accept_token(token)
            sequence.append(token, TOKENS.token_bytes(token))
            drafter.learn(sequence, start, token)
        return offered

    assert TOKENS.encode('{"')[0] != TOKENS.encode("{")[0]
    assert write_forced(cut_alike=False) > 0
    for _ in range(20):
        last = write_forced(cut_alike=False)
    assert last == 0
    for _ in range(300):
        last = write_forced(cut_alike=True)
    assert last > 0


class LimitedMatcher(TemplateMatcher):
    """A grammar that passes its memory limit soon."""

    limit = 12

    def accept_token(self, token_id: int) -> None:
        if len(self.states) > self.limit:
            raise GrammarTooLarge("the automaton passed its memory limit")
        super().accept_token(token_id)

    def forced_bytes(self) -> bytes:
        if len(self.states) > self.limit - 2:
            raise GrammarTooLarge("the automaton passed its memory limit")
        return super().forced_bytes()


def test_a_grammar_at_its_limits_ends_the_draft_not_the_run() -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    for _ in range(6):
        write(drafter, row("Hello. "), '{"name": "anna", "city": "Graz", "count": 12}')
    request = Request("r", TOKENS.encode("Hello. "), LimitedMatcher(RECORD, TOKENS), 60, group="g")
    sequence = Sequence(request, 60)
    JUMPER.jump(sequence)
    states = list(sequence.matcher.states)  # type: ignore[attr-defined]
    drafter.draft(sequence, 0.01)
    assert 0 < len(sequence.drafts) <= LimitedMatcher.limit
    assert sequence.matcher.states == states  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["anna ", "Graz", 'a"b', "12", ", ", "\n", "é", "Hannah"]), max_size=8),
    st.sampled_from(["anna", "x, y", "Hannah Gr", "1"]),
    st.floats(0.001, 5),
)
def test_drafts_are_allowed_and_leave_the_row_as_it_was(pieces: list[str], name: str, price: float) -> None:
    drafter = Drafter(TOKENS, RETOKENIZER)
    prompt = "".join(pieces) or "-"
    write(drafter, row(prompt), f'{{"name": "{name}", "city": "Graz", "count": 12}}', price)
    sequence = row(prompt)
    write(drafter, sequence, f'{{"name": "{name[:2]}', price)
    certain, text = list(sequence.output_ids), bytes(sequence.text)
    mask = sequence.matcher.token_mask().copy()
    drafter.draft(sequence, price)
    assert sequence.output_ids == certain
    assert bytes(sequence.text) == text
    assert np.array_equal(sequence.matcher.token_mask(), mask)
    for token in sequence.drafts:
        bits = np.unpackbits(sequence.matcher.token_mask().view(np.uint8), bitorder="little")
        assert bits[token]
        sequence.matcher.accept_token(token)


@pytest.mark.parametrize("price", [0.02, 1.0])
def test_given_drafts_are_those_that_jumps_make(price: float) -> None:
    """Accepting the drafts one by one, nobody is asked for a given one."""
    drafter = Drafter(TOKENS, RETOKENIZER)
    text = '{"name": "anna", "city": "Graz", "count": 12}'
    for _ in range(6):
        write(drafter, row("Hello. "), text)
    sequence = row("Hello. ")
    asked = 0
    while len(sequence.text) < len(text) - 4:
        drafter.draft(sequence, price)
        given = set(sequence.given)
        while sequence.drafts:
            assert sequence.certain not in given
            choose(drafter, sequence, sequence.drafts[0])
            asked += 1
        if len(sequence.text) < len(text) - 4:
            choose(drafter, sequence, TOKENS.encode(text[len(sequence.text) :])[0])
            asked += 1
    assert sequence.text.decode().startswith(text[:30])
    assert asked < len(TOKENS.encode(text))
