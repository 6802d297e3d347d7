"""Faults that users of other engines have reported, each with the value that is right.

The kinds are old acquaintances of the field (ranges that let wrong numbers through, keys twice, end tokens in
the middle of a string, one bad row that kills a job); the schemas and texts are written for these tests.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import zstandard
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jfbatch.grammar import Grammar, Matcher, Vocabulary
from jfbatch.rows.reader import read_rows
from tests import tiny_model as tiny
from tests.grammar.ebnf.acceptance import BYTES, accepts
from tests.grammar.json_schema.walks import random_text
from tests.run_command import Job

SEPARATOR = re.compile(r'("(?:[^"\\]|\\.)*")|([,:])')


def spaced(text: str) -> str:
    """A compact JSON text, which need not be a correct one, with the spaced style's white space."""
    return SEPARATOR.sub(lambda found: found[1] or found[2] + " ", text)


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object schema with all its properties required and no others."""
    required = list(properties)
    base = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return base | more


def grammars(schema: Any) -> tuple[Grammar, Grammar]:
    """The compact and the spaced one."""
    compact, spacious = (Grammar.from_json_schema(schema, BYTES, style) for style in ("compact", "spaced"))
    return compact, spacious


def check(schema: Any, valid: list[str], invalid: list[str]) -> None:
    """Every compact text is accepted, or rejected, by the automaton alone; so is its spaced form."""
    compact, spacious = grammars(schema)
    assert compact.unenforced == spacious.unenforced == ()
    for text in valid:
        assert accepts(compact, text), text
        assert accepts(spacious, spaced(text)), spaced(text)
    for text in invalid:
        for grammar in (compact, spacious):
            assert not accepts(grammar, text), text
            assert not accepts(grammar, spaced(text)), spaced(text)


# -- schemas ------------------------------------------------------------------------------------------------


def test_shorthand_classes_of_a_pattern_are_those_of_ecma_262() -> None:
    plate = {"type": "string", "pattern": r"^\w\w \d{2}$"}
    gap = {"type": "string", "pattern": r"^x\sy$"}
    check(
        closed({"plate": plate, "gap": gap}),
        valid=[
            '{"plate":"K_ 07","gap":"x y"}',
            '{"plate":"z0 99","gap":"x\\ty"}',
            '{"plate":"z0 99","gap":"x\u00a0y"}',  # \s is Unicode's white space
            '{"plate":"z0 99","gap":"x\u2003y"}',
        ],
        invalid=[
            '{"plate":"KB 7","gap":"x y"}',
            '{"plate":"KB 007","gap":"x y"}',
            '{"plate":"K- 07","gap":"x y"}',
            '{"plate":"KB 07","gap":"xy"}',
            '{"plate":"KB 07","gap":"x\u200by"}',
            # Valid for a regex engine whose \w and \d are Unicode's; ECMA-262's are ASCII.
            '{"plate":"ÄÖ 07","gap":"x y"}',
            '{"plate":"KB ٠٧","gap":"x y"}',
            '{"plate":"KB ०७","gap":"x y"}',
        ],
    )


def test_bounds_are_exact_for_integers_and_decimals() -> None:
    schema = closed(
        {
            "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
            "grade": {"type": "number", "minimum": 1, "maximum": 6},
            "floor": {"type": "integer", "minimum": -3, "maximum": 21},
            "step": {"type": "integer", "minimum": 1, "multipleOf": 4},
        }
    )

    def text(share: str = "0.5", grade: str = "1", floor: str = "0", step: str = "4") -> str:
        return f'{{"share":{share},"grade":{grade},"floor":{floor},"step":{step}}}'

    check(
        schema,
        valid=[
            text(),
            *(text(share=number) for number in ("0.000001", "0.3", "1", "1.75", "2", "2.0")),
            *(text(grade=number) for number in ("1.0", "3.25", "5.999", "6")),
            *(text(floor=number) for number in ("-3", "-1", "9", "10", "19", "21")),
            *(text(step=number) for number in ("8", "12", "100", "123456788")),
        ],
        invalid=[
            *(text(share=number) for number in ("0", "0.0", "-0.5", "2.01", "3", ".5", "1.")),
            *(text(grade=number) for number in ("0.99", "0", "6.4", "7", "10")),
            *(text(floor=number) for number in ("-4", "22", "100", "-0", "01", "1.5")),
            *(text(step=number) for number in ("0", "6", "-4", "04", "123456789")),
            text(share="0." + "0" * 200 + "1"),  # digits have an end
        ],
    )


def test_a_pattern_over_a_declared_property_adds_to_its_schema() -> None:
    schema = closed(
        {
            "points": {"type": "integer", "multipleOf": 3},
            "words": {
                "type": "array",
                "items": {"type": "string", "minLength": 2, "maxLength": 5},
                "maxItems": 2,
            },
        },
        patternProperties={"^points$": {"type": "integer"}, "^n-": {"type": "number"}},
    )
    check(
        schema,
        valid=[
            '{"points":12,"words":[]}',
            '{"points":0,"words":["ab"]}',
            '{"points":-3,"words":["ab","abcde"],"n-1":0.5,"n-":2}',
        ],
        invalid=[
            '{"points":10,"words":[]}',
            '{"points":"12","words":[]}',
            '{"points":12,"words":["a"]}',
            '{"points":12,"words":["ab","abcdef"]}',
            '{"points":12,"words":[],"m":1}',
            '{"points":12,"words":[],"n-1":"1"}',
            '{"points":12}',
            '{"points":12,"words":[],"points":15}',  # JSON readers would differ on it
        ],
    )


def test_an_undeclared_key_never_repeats_a_declared_one() -> None:
    schema = {"properties": {"points": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    check(
        {"type": "object", **schema},
        valid=['{"points":1,"point":"a","pointss":"b"}', '{"other":"a"}', "{}"],
        invalid=['{"points":1,"points":"a"}', '{"other":"a","points":"b"}', '{"points":"a"}'],
    )


@pytest.mark.parametrize("objects", ["closed", "open"])
def test_overlapping_patterns_lead_to_no_dead_end(objects: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "integer", "minimum": 5}},
        "required": ["ab"],
        "patternProperties": {"^a": {"type": "integer", "maximum": 9}, "b$": {"type": ["integer", "null"]}},
    }
    grammar = Grammar.from_json_schema(schema, BYTES, "compact", objects)
    validator = jsonschema_rs.validator_for(schema)
    chance = random.Random(1)
    for _ in range(40):
        value = json.loads(random_text(grammar, chance))
        assert validator.is_valid(value) and 5 <= value["ab"] <= 9


def test_constants_and_enums_are_spelt_as_json() -> None:
    kinds = ['say "hi"', "é", "back\\slash", 7, 2.5, False, None, [3, "x"], {"k": [True]}]
    schema = closed(
        {
            "answer": {"const": 41},
            "sure": {"type": "boolean", "enum": [True]},
            "nothing": {"const": None},
            "kind": {"$ref": "#/$defs/kind"},
        }
    )
    schema["$defs"] = {"kind": {"enum": kinds}}

    def text(kind: str, answer: str = "41", sure: str = "true", nothing: str = "null") -> str:
        return f'{{"answer":{answer},"sure":{sure},"nothing":{nothing},"kind":{kind}}}'

    check(
        schema,
        valid=[text(json.dumps(kind, ensure_ascii=False, separators=(",", ":"))) for kind in kinds],
        invalid=[
            text("7", answer='"41"'),
            text("7", answer="42"),
            text("7", sure="True"),
            text("7", sure="false"),
            text("7", nothing='"null"'),
            text("7", nothing="None"),
            text('""'),
            text('"7"'),
            text("False"),
            text('["x",3]'),
            text('{"k":[1]}'),
            text('"say "hi""'),
        ],
    )


PROPERTIES_IN_ORDER = {
    "thoughts": {"type": "string"},
    "verdict": {"enum": ["keep", "drop"]},
    "certainty": {"type": "number"},
}
SAME_ORDER: dict[str, Any] = {
    "as written, required in another order": closed(
        PROPERTIES_IN_ORDER, required=["certainty", "thoughts", "verdict"]
    ),
    "behind a $ref": {
        "$ref": "#/$defs/entry",
        "$defs": {"entry": closed(PROPERTIES_IN_ORDER, required=["verdict", "thoughts", "certainty"])},
    },
    "put together by allOf": {
        "allOf": [
            {"type": "object", "properties": {name: schema}, "required": [name]}
            for name, schema in PROPERTIES_IN_ORDER.items()
        ]
    },
}


@pytest.mark.parametrize("where", SAME_ORDER)
def test_keys_come_in_the_order_in_which_the_schema_lists_its_properties(where: str) -> None:
    values = {"thoughts": '"so be it"', "verdict": '"keep"', "certainty": "0.75"}
    orders = [
        "{" + ",".join(f'"{name}":{values[name]}' for name in names) + "}"
        for names in itertools.permutations(values)
    ]
    schema = json.loads(json.dumps(SAME_ORDER[where]))
    check(
        schema,
        valid=orders[:1],
        invalid=[
            *orders[1:],
            '{"thoughts":"","verdict":"burn","certainty":1}',
            '{"verdict":"keep","certainty":1}',
        ],
    )


def test_item_counts_are_exact_and_prefix_items_may_be_absent() -> None:
    row = {
        "type": "array",
        "minItems": 1,
        "maxItems": 2,
        "items": {"type": "integer", "minimum": 0, "maximum": 4},
    }
    schema = closed(
        {
            "entry": {
                "type": "array",
                "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}],
                "items": False,
            },
            "table": {"type": "array", "minItems": 3, "maxItems": 3, "items": row},
        }
    )

    def text(entry: str = "[]", table: str = "[[1],[2],[3]]") -> str:
        return f'{{"entry":{entry},"table":{table}}}'

    check(
        schema,
        valid=[
            text(),
            text('["abc"]'),
            text('["abc",true]', "[[0,4],[1],[2,2]]"),
        ],
        invalid=[
            text('["abc",true,1]'),
            text("[true]"),
            text('["abcd"]'),
            text('["abc",]'),
            text(table="[[1],[2]]"),
            text(table="[[1],[2],[3],[4]]"),
            text(table="[[],[2],[3]]"),
            text(table="[[1,2,3],[2],[3]]"),
            text(table="[[5],[2],[3]]"),
            text(table="[[1,],[2],[3]]"),
            text(table="[]"),
        ],
    )


def test_white_space_is_never_a_choice_and_the_closing_brace_ends_the_output() -> None:
    schema = closed({"colour": {"enum": ["red", "blue"]}, "rank": {"type": "integer", "minimum": 0}})
    text = '{"colour":"red","rank":7}'
    check(
        schema,
        valid=[text],
        invalid=[
            "",
            text[:-1],
            f" {text}",
            f"{text}\n",
            f"{text} and more",
            "{" + "\n" * 80 + text[1:],
            '{"colour":' + " \t" * 90 + '"red","rank":7}',
            '{"colour":\n' + " " * 200,
        ],
    )
    for grammar, written in zip(grammars(schema), (text, spaced(text)), strict=True):
        matcher = follow(grammar, written.encode())
        assert matcher.is_finished(), "nothing may follow, so no end token is waited for"
        assert not allowed(matcher) - BYTES.end_ids


def test_a_long_bound_costs_no_more_than_a_short_one() -> None:
    def with_bounds(scale: int) -> Grammar:
        names = {"type": "array", "maxItems": 5, "items": {"type": "string", "maxLength": 3 * scale}}
        schema = {
            "title": {"type": "string", "maxLength": 6 * scale},
            "names": names,
            "body": {"type": "string", "maxLength": 1000 * scale},
        }
        return Grammar.from_json_schema(closed(schema), BYTES, "compact")

    short = with_bounds(1)
    started = time.thread_time()
    grammar = with_bounds(100)
    assert time.thread_time() - started < 2
    assert len(grammar.program.code.op) == len(short.program.code.op), "counted, not unrolled"

    def text(title: int = 0, names: list[int] | None = None, body: int = 0) -> str:
        return json.dumps(
            {"title": "t" * title, "names": ["n" * length for length in names or []], "body": "ü" * body},
            ensure_ascii=False,
            separators=(",", ":"),
        )

    for good in (text(), text(600, [300] * 5, 9), text(body=100_000)):
        assert accepts(grammar, good)
    for bad in (text(601), text(names=[301]), text(names=[0] * 6), text(body=100_001)):
        assert not accepts(grammar, bad)
    matcher = follow(grammar, b'{"title":"')
    walks = grammar.masks.walks
    for _ in range(500):
        matcher.token_mask()
        matcher.accept_token(ord("t"))
    assert grammar.masks.walks - walks < 10, "states far from the bound share their masks"


# -- tokens -------------------------------------------------------------------------------------------------


def follow(grammar: Grammar, data: bytes) -> Matcher:
    """A matcher after a text, one byte a token; the vocabulary's first 256 ids are the bytes."""
    matcher = grammar.matcher()
    for byte in data:
        matcher.accept_token(byte)
    return matcher


def allowed(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(matcher.token_mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def byte_level() -> Tokenizer:
    """A byte-level BPE whose merges know yes, no and a few letters after a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "a"), ("Ġ", "b")]
    pieces = [*alphabet, *("".join(merge) for merge in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|stop|>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Pieces with U+2581 for a space, and byte pieces that spell some texts a second time."""
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("▁", "a"), ("▁", "b")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"yesnoab<>▁", *("".join(merge) for merge in merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "</s>")])
    return tokenizer


PADDING = 37
FAMILIES = {"byte-level": (byte_level, "<|stop|>"), "sentencepiece": (sentencepiece, "</s>")}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Tokenizer, Vocabulary]:
    """A tokenizer and its vocabulary for a model with more logits than the tokenizer has tokens."""
    make, end = FAMILIES[request.param]
    tokenizer = make()
    size = tokenizer.get_vocab_size() + PADDING
    return tokenizer, Vocabulary.from_tokenizer(tokenizer, size=size, end_ids=[tokenizer.get_vocab()[end]])


def test_the_bytes_of_an_id_are_what_it_adds_to_a_text(family: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = family
    before = tokenizer.encode("no", add_special_tokens=False).ids
    compared = 0
    for token, data in enumerate(vocabulary.token_bytes):
        if data is None or (len(data) == 1 and data > b"\x7f"):
            continue  # half a character has no text of its own
        added = tokenizer.decode([*before, token], skip_special_tokens=False).removeprefix("no")
        assert added.encode() == data, token
        compared += 1
    assert compared > 128
    spelt = {data for data in vocabulary.token_bytes if data}
    assert {bytes([byte]) for byte in range(256)} | {b"yes", b"no", b" a", b" b"} <= spelt
    assert "▁".encode() not in spelt


def test_a_regex_with_a_space_is_written_in_every_family(family: tuple[Tokenizer, Vocabulary]) -> None:
    tokenizer, vocabulary = family
    grammar = Grammar.from_regex("(yes|no) (a>|b<)", vocabulary)
    for text in ("yes a>", "yes b<", "no a>", "no b<"):
        assert accepts(grammar, text)
        matcher = grammar.matcher()
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            assert token in allowed(matcher)
            matcher.accept_token(token)
        assert matcher.is_accepting() and matcher.is_finished()
    for text in ("yesa>", "yes▁a>", "yes  a>", "yes a", " yes a>", "yes a> ", "maybe a>", "yes b>"):
        assert not accepts(grammar, text)


def test_masks_are_as_wide_as_the_logits_and_treat_equal_spellings_alike(
    family: tuple[Tokenizer, Vocabulary],
) -> None:
    tokenizer, vocabulary = family
    grammar = Grammar.from_regex("(yes|no) (a>|b<)", vocabulary)
    same: dict[bytes, set[int]] = {}
    for token, data in enumerate(vocabulary.token_bytes):
        if data is not None:
            same.setdefault(data, set()).add(token)
    never = {token for token, data in enumerate(vocabulary.token_bytes) if data is None}
    assert never >= set(range(tokenizer.get_vocab_size(), vocabulary.size))
    assert never >= {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    state = grammar.automaton.start
    for byte in b"yes a>":
        mask = grammar.masks.mask(state)
        assert mask.shape == ((tokenizer.get_vocab_size() + PADDING + 31) // 32,)
        bits = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        assert bits and bits.isdisjoint(never)
        for tokens in same.values():
            assert tokens <= bits or tokens.isdisjoint(bits)
        state = grammar.automaton.advance(state, bytes([byte]))
    last = grammar.masks.mask(state)
    assert set(np.flatnonzero(np.unpackbits(last.view(np.uint8), bitorder="little")).tolist()) == set(
        vocabulary.end_ids
    )


def test_sentencepiece_byte_pieces_and_letters_share_their_bytes() -> None:
    vocabulary = Vocabulary.from_tokenizer(sentencepiece(), end_ids=[2])
    pieces = sentencepiece().get_vocab()
    assert vocabulary.token_bytes[pieces["<0x79>"]] == vocabulary.token_bytes[pieces["y"]] == b"y"
    assert vocabulary.token_bytes[pieces["<0x20>"]] == vocabulary.token_bytes[pieces["▁"]] == b" "
    assert vocabulary.token_bytes[pieces["▁a"]] == b" a"


def test_end_tokens_are_allowed_only_where_the_output_is_complete_and_control_tokens_never() -> None:
    end_of_text, end_of_turn, tool_call = 256, 257, 258
    table = [*(bytes([byte]) for byte in range(256)), None, None, None]
    vocabulary = Vocabulary.from_tokens(table, end_ids=[end_of_text, end_of_turn])
    schema = closed({"note": {"type": "string", "maxLength": 30}})
    grammar = Grammar.from_json_schema(schema, vocabulary, "compact")
    # Spelt out, the marker is a text like any other.
    text = '{"note":"see <end_of_turn> there"}'
    matcher = grammar.matcher()
    for byte in text.encode():
        assert not allowed(matcher) & {end_of_text, end_of_turn, tool_call}
        assert not matcher.is_accepting()
        matcher.accept_token(byte)
    assert allowed(matcher) == {end_of_text, end_of_turn}
    assert matcher.is_finished(), "the engine stops here, whatever the model would say"
    matcher.accept_token(end_of_turn)
    assert not allowed(matcher)
    for wrong in ('{"note":"se', '{"note":"see"', '{"note":"see"}<end_of_turn>', '{"note":"see"}}'):
        assert not accepts(grammar, wrong)


def test_only_bytes_with_one_continuation_are_forced() -> None:
    schema = closed(
        {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0}}
    )
    grammar = Grammar.from_json_schema(schema, BYTES)
    assert follow(grammar, b"").forced_bytes() == b'{"city": "'
    assert follow(grammar, b'{"city": "').forced_bytes() == b""
    assert follow(grammar, b'{"city": "Rome"').forced_bytes() == b', "people": '
    for digits in (b"", b"2", b"21", b"2140000"):
        assert follow(grammar, b'{"city": "Rome", "people": ' + digits).forced_bytes() == b""
    for wrong in (
        '{"city": "Rome", "people": "2140000"}',
        '{"city": "Rome"}',
        '{"city": "Rome", "people": 02}',
        '{ "city" : "Rome" , "people" : 2 }',
    ):
        assert not accepts(grammar, wrong)


# -- jobs ---------------------------------------------------------------------------------------------------

OK: dict[str, Any] = {"type": "object", "properties": {"fits": {"type": "boolean"}}, "required": ["fits"]}


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Job:
    return Job(tmp_path, tiny_model, tmp_path / "cache")


def batch_line(identity: str, prompt: str, **constraint: Any) -> dict[str, Any]:
    """A line of an OpenAI batch file."""
    body = {"messages": [{"role": "user", "content": prompt}], **(constraint or response_format(OK))}
    return {"custom_id": identity, "method": "POST", "url": "/v1/chat/completions", "body": body}


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def test_jumping_over_forced_text_changes_no_greedy_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token is a byte in this model, so forced text has one tokenization and the model reads the same
    # tokens either way; only then are equal outputs a promise.
    monkeypatch.setattr(tiny, "VOCABULARY_SIZE", 259)
    tiny.save_tiny_model(tmp_path / "model")
    job = Job(tmp_path, tmp_path / "model", tmp_path / "cache")
    schema = closed(
        {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0}}
    )
    lines = [{"id": f"{number}", "prompt": f"city {number}", "schema": schema} for number in range(6)]
    jumped = job.run(lines)
    job.output.unlink()
    job.output.with_name("table.parquet.journal").unlink()
    stepped = job.run(None, "--jump", "off", "--drafts", "off")
    assert [row["text"] for row in jumped] == [row["text"] for row in stepped]
    for row, other in zip(jumped, stepped, strict=True):
        # The text, not the value: an integer beyond int64 is null in its column, with a note in `error`.
        jsonschema_rs.validator_for(schema).validate(json.loads(row["text"]))
        assert (row["status"], other["jumped_tokens"]) == ("ok", 0)
        # The ends of forced texts may be left to the model: what it writes next could be one token with them.
        assert row["jumped_tokens"] > len('{"city": ", "people": ') // 2
        assert row["completion_tokens"] == other["completion_tokens"]
        assert row["forward_passes"] < other["forward_passes"]


def test_a_bad_row_gets_its_own_status_and_the_others_run(job: Job) -> None:
    lines = [
        batch_line("fine", "Does it fit?"),
        batch_line("long", "more " * 600),
        batch_line("schema", "x", **response_format({"type": "bolean"})),
        batch_line("regex", "x", structured_outputs={"regex": "[open"}),
        batch_line("grammar", "x", structured_outputs={"grammar": "root ::= missing"}),
        batch_line("last", "And this one?"),
    ]
    rows = job.run(lines, code=1)  # 1: finished, with row errors; a job that fails has another code
    assert [(row["id"], row["status"]) for row in rows] == [
        ("fine", "ok"),
        ("long", "prompt_too_long"),
        ("schema", "unsupported_schema"),
        ("regex", "unsupported_schema"),
        ("grammar", "unsupported_schema"),
        ("last", "ok"),
    ]
    for row in rows:
        if row["status"] == "ok":
            assert row["error"] is None
            jsonschema_rs.validator_for(OK).validate(json.loads(row["text"]))
        else:
            assert row["text"] is None and row["value"] is None and row["error"]
    reasons = {row["id"]: row["error"] or "" for row in rows}
    assert "512" in reasons["long"] and "bolean" in reasons["schema"] and "missing" in reasons["grammar"]


MARK = b"\xef\xbb\xbf"


def odd_file(padding: int) -> bytes:
    """A byte order mark, CRLF, a blank line, and lines that are no rows; the last one long and unended."""
    separated = json.dumps(batch_line("second", "line\u2028separator \u0085 kept"), ensure_ascii=False)
    lines = [
        MARK + json.dumps(batch_line("first", "hello")).encode(),
        b"",
        b"[1, 2, 3]",
        separated.encode(),
        b'{"custom_id": "broken",',
        b"\xff\xfe",
        b"{" + b" " * padding + json.dumps(batch_line("third", "the end")).encode()[1:],
    ]
    return b"\r\n".join(lines)


def test_an_odd_file_loses_no_row_and_names_the_physical_line_of_each_bad_one(job: Job) -> None:
    job.input.write_bytes(odd_file(padding=20_000_000))
    rows = job.run(None, code=1)
    assert [(row["id"], row["status"]) for row in rows] == [
        ("first", "ok"),
        (None, "invalid_input"),
        ("second", "ok"),
        (None, "invalid_input"),
        (None, "invalid_input"),
        ("third", "ok"),
    ]
    errors = [row["error"] for row in rows if row["status"] != "ok"]
    places = [re.search(r"rows\.jsonl:(\d+)", error) for error in errors]
    assert [place and place[1] for place in places] == ["3", "5", "6"]
    for error, reason in zip(errors, ["object", "JSON", "UTF-8"], strict=True):
        assert reason in error


PACKED = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "zstandard": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("packing", PACKED)
def test_packed_files_are_known_by_their_first_bytes(packing: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"  # whatever the name says
    path.write_bytes(PACKED[packing](odd_file(padding=3)))
    rows = list(read_rows([str(path)]))
    assert [(row.id, row.line) for row in rows] == [
        ("first", 1),
        (None, 3),
        ("second", 4),
        (None, 5),
        (None, 6),
        ("third", 7),
    ]
    assert [row.error is None for row in rows] == [True, False, True, False, False, True]
    assert rows[2].messages == [{"role": "user", "content": "line\u2028separator \u0085 kept"}]


def test_a_prompt_of_20_megabytes_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    prompt = "end" + " " * 20_000_000
    path.write_text(json.dumps(batch_line("long", prompt)) + "\n" + json.dumps(batch_line("short", "x")))
    long, short = read_rows([str(path)])
    assert long.messages == [{"role": "user", "content": prompt}]
    assert (short.id, short.error) == ("short", None)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_with_its_mark_is_decoded_rather_than_refused(encoding: str, tmp_path: Path) -> None:
    # Other programs refuse such files with a message. Nothing is lost by reading them: the mark leaves
    # no doubt, and the rows are those of the same file in UTF-8.
    path = tmp_path / "rows.jsonl"
    mark = "" if encoding == "utf-16" else "\ufeff"
    text = "\r\n".join(json.dumps(batch_line(name, f"{name} → ü🎉")) for name in ("one", "two"))
    path.write_bytes((mark + text).encode(encoding))
    rows = list(read_rows([str(path)]))
    assert [(row.id, row.line, row.error) for row in rows] == [("one", 1, None), ("two", 2, None)]
    assert rows[1].messages == [{"role": "user", "content": "two → ü🎉"}]
