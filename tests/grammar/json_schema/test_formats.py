"""Formats: what may be written is valid to jsonschema-rs, and the usual valid examples may be written.

Examples are those of the JSON Schema test suite and of the RFCs.
"""

from __future__ import annotations

import json
import random

import jsonschema_rs
import pytest

from jfbatch.grammar.json_schema.formats import KNOWN_FORMATS, format_expression
from jfbatch.grammar.json_schema.strings import string_expression
from tests.grammar.expression_oracle import matches, sample

STANDARD = [
    *[
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
    ],
    *["uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"],
    *["relative-json-pointer", "regex"],
]

VALID = {
    "date": ["2020-02-29", "2000-02-29", "1963-06-19", "2021-12-31", "0001-01-01"],
    "time": ["08:30:06Z", "08:30:06.283185Z", "23:59:60Z", "15:59:60-08:00", "12:00:00+05:30", "08:30:06z"],
    "date-time": [
        *["1963-06-19T08:30:06.283185Z", "1990-12-31T15:59:50.123-08:00", "1998-12-31T23:59:60Z"],
        *["1998-12-31T15:59:60.123-08:00", "1963-06-19t08:30:06.283185z", "2024-12-07T09:00:00+01:00"],
    ],
    "duration": [
        "P4DT12H30M5S",
        "P4Y",
        "PT0S",
        "P0D",
        "P1M",
        "PT1M",
        "PT36H",
        "P1DT12H",
        "P2W",
        "P1Y2M3DT4H5M6S",
    ],
    "email": [
        *["joe.bloggs@example.com", "te~st@example.com", "~test@example.com", "te.s.t@example.com"],
        *['"joe bloggs"@example.com', "joe.bloggs@[127.0.0.1]", "joe.bloggs@[IPv6:::1]", "a+b@x.co.uk"],
        "a" * 64 + "@example.com",
    ],
    "idn-email": ["실례@실례.테스트", "joe.bloggs@example.com", "ü@bücher.de"],
    "hostname": [
        "www.example.com",
        "hostname",
        "h0stn4me",
        "1host",
        "host-name",
        "A.B",
        "a" * 63,
        "localhost",
    ],
    "idn-hostname": ["실례.테스트", "例.中国", "straße.de", "пример.рф", "hostname", "www.example.com"],
    "ipv4": ["192.168.0.1", "0.0.0.0", "255.255.255.255", "87.10.0.1"],
    "ipv6": ["::1", "::", "::abef", "1:2:3:4:5:6:7:8", "::42:ff:1", "d6::", "1:d6::42", "1::d6:192.168.0.1"],
    "uri": [
        *[
            "http://foo.bar/?baz=qux#quux",
            "http://foo.com/blah_(wikipedia)_blah#cite-1",
            "urn:oasis:names:a:b",
        ],
        *[
            "http://foo.bar/?q=Test%20URL-encoded%20stuff",
            "http://xn--nw2a.xn--j6w193g/",
            "tel:+1-816-555-1212",
        ],
        *[
            "http://-.~_!$&'()*+,;=:%40:80%2f::::::@example.com",
            "http://223.255.255.254",
            "mailto:John.Doe@a.com",
        ],
        *[
            "ftp://ftp.is.co.za/rfc/rfc1808.txt",
            "ldap://[2001:db8::7]/c=GB?objectClass?one",
            "https://x.y:8080/",
        ],
    ],
    "uri-reference": [
        "http://foo.bar/?baz=qux#quux",
        "//foo.bar/?baz",
        "/abc",
        "abc",
        "?a",
        "#frag",
        "",
        "../a",
    ],
    "iri": ["http://ƒøø.ßår/?∂éœ=πîx#πîüx", "http://ƒøø.com/blah_(wîkïpédiå)_blah#ßité-1", "http://a/"],
    "iri-reference": ["//ƒøø.ßår/?∂éœ=πîx#πîüx", "/âππ", "âππ", "#ƒrägmênt"],
    "uuid": ["2EB8AA08-AA98-11EA-B4AA-73B441D16380", "2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
    "uri-template": ["http://example.com/dictionary/{term:1}/{term}", "dictionary/{+a,b*}", "", "{?x.y,z}"],
    "json-pointer": ["/foo/bar~0/baz~1/%a", "", "/", "/foo//bar", "/é", "/a b"],
    "relative-json-pointer": ["1", "0/foo/bar", "2/0/baz/1/zip", "0#", "120/foo/bar"],
    "regex": ["([abc])+\\s+$", "^[a-z]{2,5}(?:-\\d+)*$", "a|b", ""],
    "url": ["https://example.com/a?b=c"],
    "byte": ["TWFu", "TWE=", "TQ==", ""],
    "ip": ["127.0.0.1", "::1"],
    "iso-date-time": ["2020-01-01T00:00:00", "2020-01-01 00:00:00Z"],
}

INVALID = {
    "date": ["2021-02-29", "1900-02-29", "2020-13-01", "2020-04-31", "20-1-1", "2020-01-01T", "১963-06-19"],
    "time": [
        "08:30:06",
        "24:00:00Z",
        "23:59:60+01:00",
        "22:59:60Z",
        "08:60:00Z",
        "8:30:06Z",
        "08:30:06+24:00",
    ],
    "date-time": ["1990-02-31T15:59:59Z", "1963-06-19 08:30:06Z", "1963-06-19", "1998-12-31T22:59:60Z"],
    "duration": ["P", "PT", "P1YT", "PT1D", "P4S", "P1D2H", "PT0.5S", "P1Y2W", "P2S", "1Y"],
    "email": [
        "2962",
        "a@",
        "@b",
        "a..b@c.de",
        ".a@b.de",
        "a.@b.de",
        "a b@c.de",
        "a@b_c.de",
        "a" * 65 + "@b.de",
    ],
    "hostname": ["-a", "a-", "a..b", "a_b", ".", "", "a.", "a" * 64, ".".join(["a" * 63] * 4), "xn--x"],
    "ipv4": ["256.1.1.1", "1.2.3", "01.2.3.4", "1.2.3.4.5", "0x7f.1.1.1"],
    "ipv6": [
        "12345::",
        "1::2::3",
        "1:2:3:4:5:6:7:8:9",
        ":2:3:4:5:6:7:8",
        "fe80::a%eth1",
        "1:1:1:1:1:1:1:1/64",
    ],
    "uri": ["//foo.bar", "/abc", "\\\\WINDOWS", "abc", "http:// a", "http://a/%zz", "http://é/", "<a>"],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4ga-73b441d16380", "2eb8-aa08"],
    "uri-template": ["http://a/{term", "{}", "{a b}", "a b"],
    "json-pointer": ["/~", "/~2", "a", "#/a"],
    "relative-json-pointer": ["01", "-1", "0##", "/a", "+1", ""],
    "byte": ["TWF", "TQ=", "T W F u"],
}


@pytest.mark.parametrize("name", STANDARD)
def test_every_sampled_text_is_valid_to_the_final_check(name: str) -> None:
    expression = format_expression(name)
    assert expression is not None
    validator = jsonschema_rs.validator_for({"type": "string", "format": name}, validate_formats=True)
    source = random.Random(7)
    texts = [json.loads(b'"' + sample(expression, source) + b'"') for _ in range(120)]
    assert [text for text in texts if not validator.is_valid(text)] == []
    assert len(set(texts)) > 20


@pytest.mark.parametrize("name", VALID)
def test_usual_examples_may_be_written(name: str) -> None:
    expression = format_expression(name)
    assert expression is not None
    wrong = [t for t in VALID[name] if not matches(expression, json.dumps(t, ensure_ascii=False)[1:-1])]
    assert wrong == []


@pytest.mark.parametrize("name", INVALID)
def test_usual_mistakes_may_not_be_written(name: str) -> None:
    expression = format_expression(name)
    assert expression is not None
    assert [t for t in INVALID[name] if matches(expression, json.dumps(t, ensure_ascii=False)[1:-1])] == []


def test_every_format_of_the_specification_is_known() -> None:
    assert set(STANDARD) <= KNOWN_FORMATS


@pytest.mark.parametrize("name", ["color", "phone", "binary", "password", "int32", "double", "", "grid"])
def test_other_formats_are_annotations(name: str) -> None:
    assert format_expression(name) is None


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("email", 3, 255),
        ("email", 0, 50),
        ("email", 8, 100),
        ("hostname", 0, 64),
        ("uri", 10, 200),
        ("uuid", 1, 99),
    ],
)
def test_formats_with_lengths_stay_valid_and_within(name: str, low: int, high: int) -> None:
    schema = {"type": "string", "format": name, "minLength": low, "maxLength": high}
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    expression = string_expression(low, high, formats=[name])
    source = random.Random(11)
    texts = [json.loads(sample(expression, source)) for _ in range(60)]
    assert [text for text in texts if not validator.is_valid(text)] == []


@pytest.mark.parametrize(
    "address",
    [
        "a@b.co",
        "john.doe@some-company.com",
        "a" * 43 + "@b.co",
        "x@averyverylongcompanyname.com",
        "a@b.c.d.e",
    ],
)
def test_an_address_may_use_the_length_on_either_side(address: str) -> None:
    assert len(address) <= 50
    assert matches(string_expression(3, 50, formats=["email"]), json.dumps(address))


def test_a_least_length_of_an_address_is_kept_by_one_of_its_sides() -> None:
    expression = string_expression(8, None, formats=["email"])
    long_enough = ["john.doe@a.b", "a@example.com", "ab@localhost"]
    assert [address for address in long_enough if not matches(expression, json.dumps(address))] == []
    assert not matches(expression, json.dumps("a@b.com"))
