"""Where drafts come from: copied spans, phrases of the group, cues in the prompt."""

from __future__ import annotations

import pytest

from jfbatch.engine.guesses import CONTEXT, Guess, Phrases, Prompt, Trust, Values

LETTER = b"From: %s <%s>\nOrder %s came late.\nRegards, %s"
KIND = b'", "mail": "'[-CONTEXT:]


def letter(name: bytes, mail: bytes, order: bytes = b"AB-1") -> Prompt:
    return Prompt(LETTER % (name, mail, order, name))


def test_the_commonest_follower_of_a_context_is_guessed_with_its_share() -> None:
    phrases = Phrases()
    assert phrases.guess(b'"kind": "') is None
    for data in (b"bill", b"bill", b"sale", b"bill"):
        phrases.learn(b'{"name": "x", "kind": "', data)
    guess = phrases.guess(b'{"name": "another name", "kind": "'[-CONTEXT:])
    assert guess == Guess(b"bill", 3 / 6, "after 4 4")  # other bytes before it, the same four
    assert phrases.guess(b'other: "') == Guess(b"bill", 3 / 6, "after 2 4")
    assert phrases.guess(b"other bytes") is None
    guess = phrases.guess(b'..."name": "x", "kind": "')
    assert guess is not None
    assert (guess.data, guess.likely) == (b"bill", pytest.approx(3 / 6))


def test_one_sighting_is_no_certainty_and_many_are_nearly_one() -> None:
    phrases = Phrases()
    phrases.learn(b"context", b"x")
    once = phrases.guess(b"context")
    for _ in range(40):
        phrases.learn(b"context", b"x")
    often = phrases.guess(b"context")
    assert once is not None
    assert often is not None
    assert once.likely == 0.5 < 0.95 < often.likely


def test_what_is_remembered_of_a_group_is_bounded() -> None:
    phrases = Phrases()
    for number in range(50_000):
        phrases.learn(b"%016d" % number, b"x")
    assert len(phrases) <= 20_000
    assert phrases.guess(b"%016d" % 49_999) is not None


def test_followers_and_kinds_of_values_are_bounded_and_the_common_ones_stay() -> None:
    phrases = Phrases()
    for number in range(2_000):
        phrases.learn(b"context", b"%d" % number)
        phrases.learn(b"context", b"often")
    guess = phrases.guess(b"context")
    assert guess is not None and guess.data == b"often"
    assert len(next(iter(phrases._following.values()))) <= 64
    values = Values()
    prompt = letter(b"Ann", b"a@b.c")
    for number in range(5_000):
        values.learn(b'key %d": "' % number, b'Ann", ', prompt)
    assert len(values._cues) <= 1_000 and len(values._next) <= 4_000
    assert values.start(b'key 4999": "', prompt) is not None


def test_a_value_is_looked_up_where_a_word_starts() -> None:
    prompt = Prompt(b"Brianna and Ian wrote: ian@example.org")
    place, found = prompt.after(b'"name": "Ian', b"Ian")
    assert prompt.text[place:] == b" wrote: ian@example.org"
    assert found == "value 3"
    assert prompt.piece(place) == b" wrote"


def test_long_matches_are_found_inside_a_value() -> None:
    prompt = Prompt(b"We never got the parcel that was promised.")
    text = b'"summary": "Sadly they got the par'
    place, found = prompt.after(text, text[12:])
    assert prompt.text[place:] == b"cel that was promised."
    assert found.startswith("match")
    assert prompt.after(b'"summary": "Zebra', b"Zebra")[0] == -1


def test_other_rows_show_what_stands_before_a_value_and_how_it_closes() -> None:
    values = Values()
    assert values.start(KIND, letter(b"Ann Lee", b"ann@x.org")) is None
    for name, mail in ((b"Ann Lee", b"ann@x.org"), (b"Bo Ek", b"bo@yy.se"), (b"Cy Ott", b"cy@z.de")):
        values.learn(KIND, mail + b'",', letter(name, mail))
    prompt = letter(b"Dan Ray", b"dan.ray@w.com")
    guess = values.start(KIND, prompt)
    assert guess is not None
    assert guess.data == b"dan"
    text, steps = b"", 0
    while guess is not None and steps < 9:
        text, place = text + guess.data, guess.place
        if place < 0:
            break
        guess = values.go_on(KIND, prompt, place, "on")
        steps += 1
    assert text == b'dan.ray@w.com",'


def test_a_cue_that_misleads_loses_its_credit() -> None:
    values = Values()
    for _ in range(3):
        values.learn(KIND, b'ann@x.org",', letter(b"Ann Lee", b"ann@x.org"))
    before = values.start(KIND, letter(b"Bo Ek", b"bo@yy.se"))
    for _ in range(9):
        values.learn(KIND, b'unknown",', letter(b"Ann Lee", b"ann@x.org"))
    after = values.start(KIND, letter(b"Bo Ek", b"bo@yy.se"))
    assert before is not None
    assert after is not None
    assert after.likely < before.likely / 2


def test_trust_moves_from_the_prior_to_what_is_measured_and_forgets() -> None:
    trust = Trust()
    assert trust.share("copy", 0.7) == pytest.approx(0.7)
    for _ in range(100):
        trust.record("copy", True)
    assert trust.share("copy", 0.7) > 0.95
    for _ in range(400):
        trust.record("copy", False)
    assert trust.share("copy", 0.7) < 0.15
