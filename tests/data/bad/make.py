"""Writes the corpus of odd and broken input files beside this script, and expected.json.

expected.json: file -> {"rows": [...], "damage": text or null}. Each row has its line, and either the prompt
it must give, or the column and a part of the error that its invalid_input must name.
Run it again after a change: python tests/data/bad/make.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import zstandard

HERE = Path(__file__).parent
DEEP = b"[" * 5000 + b"]" * 5000
FORTY = "1234567890" * 40


def ok(line: int, prompt: str) -> dict[str, Any]:
    return {"line": line, "prompt": prompt}


def bad(line: int, column: int | None, error: str) -> dict[str, Any]:
    return {"line": line, "column": column, "error": error}


MIXED = [
    (b'{"prompt": "first"}', ok(1, "first")),
    (b"", None),
    (b"[1, 2, 3]", bad(3, 1, "must be a JSON object, not an array")),
    (b'{"prompt": "unfinished', bad(4, 12, "unterminated string")),
    (b'{"prompt": "bad byte \xff"}', bad(5, 22, "not UTF-8: byte 0xff")),
    (b"   \t ", None),
    (b'{"prompt": 17}', bad(7, 2, "prompt must be text, not a number")),
    (b'{"text": "no prompt"}', bad(8, 1, "no prompt and no messages")),
    (b'{"prompt": "last"}', ok(9, "last")),
]

STRINGS = [
    ('{"prompt": "a\u2028b\u2029c\u0085d"}'.encode(), ok(1, "a\u2028b\u2029c\u0085d")),
    (b'{"prompt": "\\ud83d\\ude00 pair"}', ok(2, "\U0001f600 pair")),
    (b'{"prompt": "\\ud800 alone"}', bad(3, 13, "prompt contains a lone surrogate")),
    (b'{"prompt": "x", "note": "\\udc00"}', ok(4, "x")),
    (b'{"prompt": "a\\u0000b"}', ok(5, "a\0b")),
    (b'{"prompt": "a\x00b"}', bad(6, 14, "control character")),
    (b"\x00\x00\x00", bad(7, 1, "not JSON")),
    (b'{"prompt": "tab\there"}', bad(8, 16, "control character")),
    (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', bad(9, 44, "lone surrogate")),
    (b'{"prompt": "x", "id": "\\ud801"}', bad(10, 24, "id contains a lone surrogate")),
    (b'{"prompt": "carriage\\rreturn"}', ok(11, "carriage\rreturn")),
    (b'{"prompt": ""}', ok(12, "")),
]

NUMBERS = [
    (f'{{"prompt": "big", "other": {FORTY}}}'.encode(), ok(1, "big")),
    (f'{{"prompt": "big", "seed": {FORTY}}}'.encode(), bad(2, 19, "seed must be a whole number")),
    (b'{"prompt": "huge", "other": ' + b"9" * 5000 + b"}", bad(3, 29, "a number of 5000 characters")),
    (b'{"prompt": "x", "other": NaN}', bad(4, 26, "NaN is not a JSON number")),
    (b'{"prompt": "x", "other": -Infinity}', bad(5, 26, "-Infinity is not a JSON number")),
    (b'{"prompt": "x", "other": 1e400}', bad(6, 26, "the number 1e400 is out of range")),
    (b'{"prompt": "NaN Infinity 1e400"}', ok(7, "NaN Infinity 1e400")),
    (b'{"prompt": "x", "max_tokens": 0}', bad(8, 17, "max_tokens must be a whole number from 1")),
    (b'{"prompt": "x", "max_tokens": 2.5}', bad(9, 17, "max_tokens must be a whole number")),
    (b'{"prompt": "x", "max_tokens": "many"}', bad(10, 17, "max_tokens must be a number")),
    (b'{"prompt": "x", "max_tokens": true}', bad(11, 17, "max_tokens must be a number, not a boolean")),
    (b'{"prompt": "x", "temperature": -1}', bad(12, 17, "temperature must be from 0")),
    (b'{"prompt": "x", "max_tokens": 12.0, "temperature": 0, "seed": -5}', ok(13, "x")),
    (b'{"prompt": "x", "other": 01}', bad(14, 27, "not JSON")),
]

NESTING = [
    (b'{"prompt": "deep", "other": ' + DEEP + b"}", bad(1, 284, "nested deeper than 256 levels")),
    (b'{"prompt": "deep", "schema": ' + DEEP + b"}", bad(2, 285, "nested deeper than 256 levels")),
    (b'{"prompt": "' + b"[" * 5000 + b'"}', ok(3, "[" * 5000)),
    (b'{"prompt": "fine", "other": ' + b"[" * 200 + b"]" * 200 + b"}", ok(4, "fine")),
    (b"[" * 100000, bad(5, 257, "nested deeper than 256 levels")),
]

KEYS = [
    (b'{"prompt": "a", "prompt": "b"}', bad(1, 17, "the key 'prompt' appears twice in one object")),
    (b'{"prompt": "a", "x": {"prompt": 1}, "y": {"prompt": 2}}', ok(2, "a")),
    (b'{"prompt": "a \\"k\\": 1, \\"k\\": 2"}', ok(3, 'a "k": 1, "k": 2')),
    (b'{"prompt": "a", "x": [{"k": {"k": 1}}, {"\\u006b" : 1, "k": 2}]}', bad(4, 55, "the key 'k'")),
    (
        b'{"prompt": "a", "schema": {"properties": {"p": {}, "q": {"p": 1}, "p": true}}}',
        bad(5, 67, "the key 'p' appears twice"),
    ),
    (b'{"prompt": "a", "id": 1, "id": 1}', bad(6, 26, "the key 'id'")),
    (b'{"prompt": "a", "\\ud800": 1, "\\ud800": 1}', bad(7, 30, "appears twice")),
]

ROLES = [
    (b'{"messages": [{"role": "usr", "content": "x"}]}', bad(1, 2, "messages[0].role must be one of")),
    (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "System", "content": "x"}]}',
        bad(2, 2, "messages[1].role must be one of system, developer, user, assistant, tool, not 'System'"),
    ),
    (b'{"messages": [{"role": 7, "content": "x"}]}', bad(3, 2, "not a value that is not text")),
    (b'{"messages": [{"role": ["user"], "content": "x"}]}', bad(4, 2, "messages[0].role must be one of")),
    (b'{"messages": [{"role": "", "content": "x"}]}', bad(5, 2, "messages[0].role must be one of")),
]

CONSTRAINTS = [
    (b'{"prompt": "x", "schema": {"type": "string"}, "regex": "a"}', bad(1, 47, "schema and regex")),
    (
        b'{"prompt": "x", "guided_json": {}, "guided_choice": ["a"]}',
        bad(2, 36, "guided_json and guided_choice"),
    ),
    (b'{"prompt": "x", "guided_nonsense": 1}', bad(3, 17, "unknown constraint guided_nonsense")),
    (
        b'{"prompt": "x", "structured_outputs": {"structural_tag": {}}}',
        bad(4, 17, "structured_outputs.structural_tag"),
    ),
    (
        b'{"prompt": "x", "structured_outputs": {"json": {}, "regex": "a"}}',
        bad(5, 17, "structured_outputs.json and"),
    ),
    (
        b'{"prompt": "x", "response_format": {"type": "xml"}}',
        bad(6, 17, "unknown constraint response_format.xml"),
    ),
    (b'{"prompt": "x", "response_format": {"type": "json_schema"}}', bad(7, 17, "no json_schema.schema")),
    (b'{"prompt": "x", "response_format": "json"}', bad(8, 17, "response_format")),
    (b'{"prompt": "x", "schema": 5}', bad(9, 17, "schema must be a JSON Schema")),
    (b'{"prompt": "x", "schema": "{\\"type\\": "}', bad(10, 17, "schema (column 10 of its text): not JSON")),
    (b'{"prompt": "x", "choice": []}', bad(11, 17, "choice must be a list")),
    (b'{"prompt": "x", "choice": ["a", 1]}', bad(12, 17, "choice must be a list")),
    (b'{"prompt": "x", "regex": ["a"]}', bad(13, 17, "regex must be text")),
    (b'{"prompt": "x", "messages": []}', bad(14, 17, "both prompt and messages")),
    (b'{"messages": []}', bad(15, 2, "messages must be a list of at least one")),
    (b'{"messages": [{"role": "user"}]}', bad(16, 2, "messages[0].content must be text")),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        bad(17, 2, "not text but 'image_url'"),
    ),
    (b'{"messages": [{"content": "x"}]}', bad(18, 2, "messages[0].role must be one of system, ")),
    (b'{"prompt": "x", "id": {"a": 1}}', bad(19, 17, "id must be text or a number")),
    (b'{"custom_id": "c", "body": 5}', bad(20, 20, "body must be an object")),
    (b'{"prompt": "x", "regex": null, "schema": null}', ok(21, "x")),
]


def lines(rows: list[tuple[bytes, dict[str, Any] | None]], end: bytes = b"\n") -> bytes:
    return end.join(line for line, _ in rows)


def expected(rows: list[tuple[bytes, dict[str, Any] | None]]) -> list[dict[str, Any]]:
    return [row for _, row in rows if row is not None]


def main() -> None:
    told: dict[str, Any] = {}

    def write(name: str, data: bytes, rows: list[dict[str, Any]], damage: str | None = None) -> None:
        (HERE / name).write_bytes(data)
        told[name] = {"rows": rows, "damage": damage}

    for name, rows in [
        ("mixed", MIXED),
        ("strings", STRINGS),
        ("numbers", NUMBERS),
        ("nesting", NESTING),
        ("constraints", CONSTRAINTS),
        ("keys", KEYS),
        ("roles", ROLES),
    ]:
        write(f"{name}.jsonl", lines(rows) + b"\n", expected(rows))
    write("no-final-newline.jsonl", lines(MIXED), expected(MIXED))
    write("crlf.jsonl", lines(MIXED, b"\r\n"), expected(MIXED))
    write("utf8-mark.jsonl", b"\xef\xbb\xbf" + lines(MIXED), expected(MIXED))
    write("packed.jsonl.gz", gzip.compress(lines(MIXED), mtime=0), expected(MIXED))
    write("packed.jsonl.zst", zstandard.compress(lines(MIXED)), expected(MIXED))
    write("empty.jsonl", b"", [])
    write("blank.jsonl", b"\n\r\n \n", [])

    text = (
        "\n".join(json.dumps({"prompt": f"grüße {n} \u2028"}, ensure_ascii=False) for n in range(3))
        + "\n[]\n"
    )
    prompts = [ok(n + 1, f"grüße {n} \u2028") for n in range(3)] + [bad(4, 1, "must be a JSON object")]
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        mark = "\ufeff" if encoding == "utf-16-be" else ""
        write(f"{encoding}.jsonl", (mark + text).encode(encoding), prompts)
    lone = (text + '{"prompt": "\ud800"}\n').encode("utf-16", "surrogatepass")
    write("utf-16-lone.jsonl", lone, [*prompts, bad(5, 13, "not UTF-8")])
    write(
        "utf-16-cut.jsonl",
        (text + text).encode("utf-16")[:-81],
        [*prompts, ok(5, "grüße 0 \u2028")],
        "utf-16: truncated data",
    )
    write("latin-1.jsonl", '{"prompt": "grüße"}\n'.encode("latin-1"), [bad(1, 15, "not UTF-8: byte 0xfc")])

    many = [(json.dumps({"prompt": f"{n} {n * n}"}).encode(), ok(n + 1, f"{n} {n * n}")) for n in range(300)]
    write("cut.jsonl.gz", gzip.compress(lines(many), mtime=0)[:900], [], "gzip: Compressed file ended")
    write(
        "checksum.jsonl.gz",
        gzip.compress(lines(many), mtime=0)[:-8] + b"\0" * 8,
        [],
        "gzip: CRC check failed",
    )
    write("cut.jsonl.zst", zstandard.compress(lines(many), 1)[:-40], [], "zstandard: the file ended")
    for name in ("cut.jsonl.gz", "checksum.jsonl.gz", "cut.jsonl.zst"):
        told[name]["rows"] = None  # as many as can be read: a prefix of the 300
    write("damaged.parquet", b"PAR1 and then nothing", [], "cannot be read further")
    table = b"\r\n".join(
        [
            b"id,prompt,max_tokens",
            b'1,"two\r\nlines",5',
            b"2,short",
            b"",
            b'3,"quote""d",',
            b"4,x,many",
            b'5,"gr\xfc",1',
            b'6,"a"b,1',
            b"7,last,7",
        ]
    )
    write(
        "table.csv",
        table,
        [
            ok(2, "two\r\nlines"),
            bad(4, None, "the row has 2 cells, the header 3"),
            ok(6, 'quote"d'),
            bad(7, None, "max_tokens must be a number"),
            bad(8, None, "prompt is not UTF-8"),
            bad(9, None, "not CSV"),
            ok(10, "last"),
        ],
    )
    (HERE / "expected.json").write_text(json.dumps(told, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
