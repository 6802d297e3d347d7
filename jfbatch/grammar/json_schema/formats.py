"""The string formats of JSON Schema as trees over characters.

Each format is one anchored pattern, written after the specification it names and read by the regex
front end, so it combines with lengths and other patterns. Where jsonschema-rs, which checks every
output, is stricter than the specification, the pattern is the stricter one. Fields without a limit in
their specification have a generous one (12 fraction digits of a second, 9 digits of a duration).

Names that are not listed are annotations, as the specification says: `format_tree` returns None.
Among those: binary, password, color, phone and the number formats int32, int64, float, double.
"""

from __future__ import annotations

from functools import lru_cache

from jfbatch.grammar.expression import Expression
from jfbatch.grammar.regex import JSON_STRING, Node, pattern_tree, tree_to_expression
from jfbatch.grammar.regex.syntax import ANY, NOTHING, alternation, concatenation, conjunction, repetition

# RFC 3339 sections 5.6 and 5.7 -------------------------------------------------------------------

_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|" + _LEAP_YEAR + r"-02-29)"
)
_FRACTION = r"(?:\.\d{1,12})?"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d" + _FRACTION
# A leap second is the last one of a day in UTC; offsets of whole hours say so without arithmetic on minutes.
_LEAP_SECOND = "|".join(
    [rf"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"]
    + [rf"{(23 + hours) % 24:02}:59:60{_FRACTION}\+{hours:02}:00" for hours in range(1, 24)]
    + [rf"{(23 - hours) % 24:02}:59:60{_FRACTION}-{hours:02}:00" for hours in range(1, 24)]
)
_TIME = rf"(?:{_CLOCK}(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)|{_LEAP_SECOND})"

# RFC 3339 appendix A
_N = r"\d{1,9}"
_DURATION_TIME = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = (
    rf"P(?:{_N}W|{_DURATION_TIME}"
    rf"|(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_DURATION_TIME})?)"
)

# RFC 1123 section 2.1: labels of at most 63 characters. A label never has "--" third and fourth, which is
# kept for A-labels.
_MAX_HOSTNAME = 253
_MAX_LABEL = 63
_ALNUM = "[A-Za-z0-9]"
_MIDDLE = "[A-Za-z0-9-]"


def _label(longest: int, shortest: int = 1) -> str:
    longest = min(longest, _MAX_LABEL)
    if shortest <= longest < 5:
        return _ALNUM if longest == 1 else rf"(?:{_ALNUM}(?:{_MIDDLE}{{0,{longest - 2}}}{_ALNUM})?)"
    least = max(shortest - 5, 0)
    long = rf"{_ALNUM}{_MIDDLE}(?:{_ALNUM}{_MIDDLE}|-{_ALNUM}){_MIDDLE}{{{least},{longest - 5}}}{_ALNUM}"
    return long if shortest > 1 else rf"(?:{_ALNUM}(?:{_MIDDLE}{{0,2}}{_ALNUM})?|{long})"


def _hostname(longest: int, first_label: int = 1) -> str:
    """Host names of at most so many characters, in shapes that stay within without counting twice.

    The first label has at least `first_label` (1, or 5 and more) characters. Shapes overlap and leave out
    only names of many long labels.
    """
    shapes = [(longest, 0, (0, 0)), (longest - 4, 3, (1, 1)), (longest - 8, 3, (2, 2))]
    for least, most in ((1, 1), (2, 2), (3, 3), (4, 7), (8, 11), (12, 41)):
        further = (longest + 1) // (most + 1) - 1
        shapes.append((longest - most * (min(further, _MAX_LABEL) + 1), further, (least, most)))
    written = [
        _label(first, first_label) + (rf"(?:\.{_label(further)}){{{least},{most}}}" if most else "")
        for first, further, (least, most) in shapes
        if first >= first_label <= _MAX_LABEL and (further > 0 or most == 0)
    ]
    return f"(?:{'|'.join(dict.fromkeys(written))})"


_HOSTNAME = _hostname(_MAX_HOSTNAME)

# RFC 2673 section 3.2 and RFC 4291 section 2.2
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    rf"(?:(?:{_H16}:){{6}}{_LS32}|::(?:{_H16}:){{5}}{_LS32}|(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}|(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}"
    rf"|(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}|(?:(?:{_H16}:){{0,6}}{_H16})?::)"
)

# RFC 5321 section 4.1.2. RFC 6531 adds the characters beyond ASCII.
_ATEXT = r"A-Za-z0-9!#$%&'*+/=?^_`{|}~\-"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\"){0,31}"'
_MAIL_LITERAL = rf"\[(?:{_IPV4}|IPv6:{_IPV6})\]"


# Letters that are themselves in IDNA 2008 (lower case, left to right, no context rules).
_IDN = r"A-Za-z0-9\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f\u4e00-\u9fa5\uac00-\ud7a3"
_IDN_LABEL = rf"[{_IDN}](?:[{_IDN}]{{0,10}}[{_IDN}])?"
_IDN_HOSTNAME = rf"(?:{_HOSTNAME}|{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}})"

# RFC 3986 appendix A and RFC 3987 section 2.2
_UCSCHAR = (
    r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(rf"\u{{{plane:x}0000}}-\u{{{plane:x}fffd}}" for plane in range(1, 14))
    + r"\u{e1000}-\u{efffd}"
)
_IPRIVATE = r"\ue000-\uf8ff\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"
_PERCENT = "%[0-9A-Fa-f]{2}"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"


def _identifier(more: str, private: str, absolute: bool, literals: bool = True) -> str:
    """URI or URI-reference; `more` are the characters an IRI has beyond; `literals` are [IP addresses]."""
    unreserved = rf"A-Za-z0-9._~\-!$&'()*+,;={more}"
    segment = rf"(?:[{unreserved}:@]|{_PERCENT})"
    name = rf"(?:[{unreserved}]|{_PERCENT})*"
    user = rf"(?:(?:[{unreserved}:]|{_PERCENT})*@)?"
    ascii_only = unreserved.replace(more, "") if more else unreserved  # as IP literals are
    host = rf"(?:\[(?:{_IPV6}|v[0-9A-Fa-f]+\.[{ascii_only}:]+)\]|{name})" if literals else name
    authority = rf"{user}{host}(?::\d{{0,5}})?"
    below = rf"(?:/{segment}*)*"
    rooted = rf"//{authority}{below}|/(?:{segment}+{below})?"
    end = rf"(?:\?(?:[{unreserved}:@/?{private}]|{_PERCENT})*)?(?:#(?:[{unreserved}:@/?]|{_PERCENT})*)?"
    full = rf"{_SCHEME}:(?:{rooted}|{segment}+{below})?{end}"
    if absolute:
        return full
    first = rf"(?:[{unreserved}@]|{_PERCENT})+"
    return rf"(?:{full}|(?:{rooted}|{first}{below})?{end})"


# RFC 6570 section 2
_VARIABLE = rf"(?:[A-Za-z0-9_]|{_PERCENT})(?:\.?(?:[A-Za-z0-9_]|{_PERCENT}))*(?::[1-9]\d{{0,3}}|\*)?"
_URI_TEMPLATE = (
    rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCSCHAR}{_IPRIVATE}]|{_PERCENT}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

_UUID = "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"
_JSON_POINTER = r"(?:/(?:[^~/]|~[01])*)*"


def _regex_source() -> str:
    """A regular part of ECMA-262's patterns: groups nest twice."""
    plain = r"[A-Za-z0-9 !\"#%&',:;<=>@_`~\u00a1-\u00ff-]|\\[dDwWsSnrtfv^$\\.*+?()\[\]{}|/]|\."
    in_set = r"(?:[A-Za-z0-9 _.,:;!#%&@+*]|a-z|A-Z|0-9|a-f|A-F|\\[dDwWsS\]\[\\^-])"
    one_digit = "|".join(f"{low},[{low}-9]" for low in range(10))
    count = rf"(?:[*+?]|\{{(?:\d{{1,3}},?|\d,[1-9]\d{{1,2}}|{one_digit})\}})?"
    atom = rf"(?:(?:{plain}|\[\^?{in_set}+\]){count})"
    for _ in range(2):
        branch = rf"\^?{atom}*\$?"
        atom = rf"(?:(?:{plain}|\[\^?{in_set}+\]|\((?:\?:)?{branch}(?:\|{branch})*\)){count})"
    branch = rf"\^?{atom}*\$?"
    return rf"{branch}(?:\|{branch})*"


_MAX_LOCAL_PART = 64  # RFC 5321 section 4.5.3.1.1


def _email_tree(name: str, shortest: int, longest: int | None) -> Node:
    """Addresses of a length, where that may be told from one side of the @ at a time."""
    atext, hostname = _EMAILS[name]
    if shortest <= 3 and (longest is None or longest > _MAX_LOCAL_PART + _MAX_HOSTNAME):
        return _email_with(atext, rf"{hostname}|{_MAIL_LITERAL}", 1, _MAX_LOCAL_PART, _tree(_QUOTED))
    most = _MAX_LOCAL_PART + _MAX_HOSTNAME + 1 if longest is None else longest
    room = most - 1
    splits = {min(room - 6, _MAX_LOCAL_PART), room // 2, room // 4, room // 8, 1}
    options = []
    for local in sorted(split for split in splits if 0 < split <= _MAX_LOCAL_PART and split < room):
        behind = min(room - local, _MAX_HOSTNAME)
        if shortest <= 3:
            options.append(_email_with(atext, _hostname(behind), 1, local))
            continue
        enough = shortest - 2  # on one side; the other has at least one, and there is the @
        if enough <= local:
            options.append(_email_with(atext, _hostname(behind), enough, local))
        options.append(_email_with(atext, _hostname(behind, max(enough, 5)), 1, local))
    return alternation(options)


def _email_with(atext: str, hostname: str, shortest: int, longest: int, other: Node = NOTHING) -> Node:
    local = conjunction(_tree(rf"[{atext}]+(?:\.[{atext}]+)*"), repetition(ANY, shortest, longest))
    behind = _tree(rf"@(?:{hostname})") if hostname != "(?:)" else NOTHING
    return concatenation([alternation([local, other]), behind])


_EMAILS = {
    "email": (_ATEXT, _HOSTNAME),
    "idn-email": (_ATEXT + r"\u00a1-\u1fff\u2c00-\u2dff\u3041-\ud7ff\uf900-\ufaff", _IDN_HOSTNAME),
}

_IDENTIFIERS = {
    "uri": ("", "", True),
    "uri-reference": ("", "", False),
    "url": ("", "", False),
    "iri": (_UCSCHAR, _IPRIVATE, True),
    "iri-reference": (_UCSCHAR, _IPRIVATE, False),
}

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "hostname": _HOSTNAME,
    "idn-hostname": _IDN_HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    **{name: _identifier(*arguments) for name, arguments in _IDENTIFIERS.items()},
    "uuid": _UUID,
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _JSON_POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d{{0,8}})(?:#|{_JSON_POINTER})",
    "regex": _regex_source(),
    # Unofficial names in common use
    "ip-address": _IPV4,  # draft 3
    "host-name": _HOSTNAME,  # draft 3
    "ip": rf"(?:{_IPV4}|{_IPV6})",
    "guid": _UUID,
    "iso-date": _DATE,
    "iso-time": rf"(?:{_TIME}|{_CLOCK})",
    "iso-date-time": rf"{_DATE}[Tt ](?:{_TIME}|{_CLOCK})",
    "json-pointer-uri-fragment": rf"#(?:/(?:[a-z0-9_\-.!$&'()*+,;:=@]|{_PERCENT}|~[01])*)*",
    "byte": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}

KNOWN_FORMATS = frozenset(_PATTERNS) | frozenset(_EMAILS)


def _tree(pattern: str) -> Node:
    return pattern_tree(f"^(?:{pattern})$", "ecma")


@lru_cache(maxsize=256)
def format_tree(name: str, shortest: int = 0, longest: int | None = None) -> Node | None:
    """The texts of a format as a tree over characters; None if the format is an annotation only.

    `shortest` and `longest` say that texts of other lengths will be taken away. Where that would need a
    large automaton, the tree is then a subset that needs a small one or none: no IPv6 address as host, no
    address of which both sides are very long or both too short.
    """
    if name in _EMAILS:
        return _email_tree(name, shortest, longest)
    if longest is not None and name in _IDENTIFIERS:
        return _tree(_identifier(*_IDENTIFIERS[name], literals=False))
    if longest is not None and name in ("hostname", "host-name"):
        return _tree(_hostname(min(longest, _MAX_HOSTNAME)))
    pattern = _PATTERNS.get(name)
    return None if pattern is None else _tree(pattern)


@lru_cache(maxsize=64)
def format_expression(name: str) -> Expression | None:
    """The texts of a format as they stand between the quotes of a JSON string; None for annotations."""
    tree = format_tree(name)
    return None if tree is None else tree_to_expression(tree, JSON_STRING)
