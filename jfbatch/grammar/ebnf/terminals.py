"""The terminals that Lark's grammars import from `common`, as regular expressions.

After lark/grammars/common.lark. There, ESCAPED_STRING and C_COMMENT end at the first end mark because
a lexer takes their shortest match; here they say themselves that they hold no end mark.
"""

from __future__ import annotations

from jfbatch.grammar.expression import Expression
from jfbatch.grammar.regex import RAW_UTF8, regex_to_expression

_INT = "[0-9]+"
_EXPONENT = f"[eE][+-]?{_INT}"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = f"(?:{_INT}{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"

_REGEXES = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": _INT,
    "SIGNED_INT": f"[+-]?{_INT}",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"{_FLOAT}|{_INT}",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_INT})",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}

NAMES = tuple(_REGEXES)


def standard_terminal(name: str) -> Expression | None:
    """The texts of common.NAME, None if there is no such terminal."""
    regex = _REGEXES.get(name)
    return None if regex is None else regex_to_expression(regex, dialect="python", alphabet=RAW_UTF8)
