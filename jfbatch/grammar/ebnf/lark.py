"""Lark's grammar syntax: `name: alternatives`, starting at `start`; terminals have upper-case names.

After https://lark-parser.readthedocs.io/en/stable/grammar.html. The text is read without a lexer, as by
Lark's Earley parser with lexer="dynamic_complete": priorities, aliases and the marks ? and ! choose or
shape a parse tree and change nothing here. What %ignore names may stand before every token and at the end.
"""

from __future__ import annotations

import re

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.ebnf.source import MAX_DEPTH, Definition, Mention, Reader, Source
from jfbatch.grammar.ebnf.terminals import NAMES, standard_terminal
from jfbatch.grammar.expression import Expression, Reference, choice, literal, optional, repeat, sequence
from jfbatch.grammar.regex import RAW_UTF8, regex_to_expression
from jfbatch.grammar.regex.characters import character_expression, normalised
from jfbatch.grammar.regex.parser import parse
from jfbatch.grammar.regex.syntax import is_plain

START = "start"
IGNORED = "%ignore"  # the rule of any number of ignored texts; no name in a file looks like this
_WHOLE = "%start"

_NAME = re.compile(r"_?(?:[a-z][_a-z0-9]*|[A-Z][_A-Z0-9]*)(?![A-Za-z0-9_])")
_WORD = re.compile(r"[A-Za-z0-9_]+")
_DEFINITION = re.compile(r"[?!]{0,2}([A-Za-z0-9_]+)(\{[^}\n]*\})?(?:\.-?[0-9]+)?[ \t]*:")
_DIRECTIVE = re.compile(r"%([a-z]+)")
_SPACE = re.compile(r"(?:[ \t\f\r\n]+|\\[ ]*\r?\n|//[^\n]*|#[^\n]*)+")
_STRING = re.compile(r'"((?:\\.|[^"\\\n])*)"(i?)')
_REGEX = re.compile(r"/(?![/*])((?:\\.|[^/\\])*)/([a-z]*)", re.DOTALL)
_ALIAS = re.compile(r"->\s*[A-Za-z0-9_]+")
# What a regular expression is made of as far as it matters for finding a lazy quantifier (group 1) in it.
_LAZY = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|((?:[*+?]|\{[0-9]*,?[0-9]*\})\?)", re.DOTALL)
_CONTINUED = re.compile(r"\\[ ]*\r?\n")
_CASE_OF_NAMES = "a name is all lower case (a rule) or all upper case (a terminal)"
_FAULTS = {'"': "the literal is never closed", "/": "the regular expression is never closed"} | {
    mark: f"nothing to repeat before {mark!r}" for mark in "*+?~"
}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


def parse_lark(text: str) -> Source:
    """The rules of a file in Lark's syntax. Raises GrammarSyntaxError."""
    return _LarkReader(text).read()


class _LarkReader(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text.removeprefix("\ufeff"))
        self.definitions: dict[str, Definition] = {}
        self.mentions: list[Mention] = []
        self.ignored: list[Expression] = []
        self.ignores = re.search(r"^[ \t]*%ignore\b", self.text, re.MULTILINE) is not None
        self.in_terminal = False
        self.line_start = 0  # where the last space that ended a line led to
        self.depth = 0

    def read(self) -> Source:
        self.skip_space()
        while self.position < len(self.text):
            self.rule = ""
            if self.at("%"):
                self.directive()
            else:
                self.definition()
            if self.position < len(self.text) and not self.begins_statement():
                self.fail(f"expected an item or the next rule, but found {self.shown()}")
        start = START
        if self.ignored and START in self.definitions:
            start = _WHOLE
            gap = Reference(IGNORED)
            self.add(IGNORED, repeat(choice(*self.ignored), 0, None), 0)
            self.add(_WHOLE, sequence(Reference(START), gap), self.definitions[START].position)
        return Source(self.text, start, self.definitions, tuple(self.mentions))

    def add(self, name: str, body: Expression, position: int) -> None:
        if name in self.definitions:
            self.fail(f"{name!r} is defined twice", position)
        self.definitions[name] = Definition(name, body, position)

    def skip_space(self) -> None:
        found = self.match(_SPACE)
        if found is not None and "\n" in _CONTINUED.sub("", found[0]):
            self.line_start = self.position

    def begins_statement(self) -> bool:
        """Whether a rule or a directive begins here: they begin in lines of their own."""
        if self.position != self.line_start:
            return False
        return self.at("%") or _DEFINITION.match(self.text, self.position) is not None

    # Definitions and directives

    def definition(self) -> None:
        start = self.position
        found = self.match(_DEFINITION)
        if found is None:
            self.fail(f"expected a rule, name: ..., but found {self.shown()}")
        self.rule = name = found[1]
        if not _NAME.fullmatch(name):
            self.fail(_CASE_OF_NAMES, start)
        if found[2]:
            self.fail("templates name{...} are not supported: write the rule out", start)
        self.in_terminal = _is_terminal(name)
        self.skip_space()
        self.add(name, self.alternatives(), start)

    def directive(self) -> None:
        start = self.position
        found = self.match(_DIRECTIVE)
        self.skip_space()
        if found is not None and found[1] == "ignore":
            self.in_terminal = True
            self.ignored.append(self.alternatives())
        elif found is not None and found[1] == "import":
            self.imports()
        else:
            self.fail(f"the directive {found[0] if found else '%'} is not supported", start)

    def imports(self) -> None:
        """common.NAME, common.NAME -> OTHER or common (NAME, NAME, ...)"""
        start = self.position
        if not self.take("common"):
            self.fail("only terminals of common can be imported, as in %import common.INT")
        self.skip_space()
        if self.take("."):
            name, place = self.imported_name()
            self.skip_space()
            alias = name
            if self.take("->"):
                self.skip_space()
                alias, place = self.imported_name()
            self.add_standard(name, alias, place)
        elif self.take("("):
            while True:
                self.skip_space()
                name, place = self.imported_name()
                self.add_standard(name, name, place)
                self.skip_space()
                if not self.take(","):
                    break
            if not self.take(")"):
                self.fail("the list of names is never closed", start)
        else:
            self.fail(f"expected .NAME or (NAME, ...), but found {self.shown()}")
        self.skip_space()

    def imported_name(self) -> tuple[str, int]:
        start = self.position
        found = self.match(_NAME)
        if found is None or not _is_terminal(found[0]):
            self.fail("expected the name of a terminal", start)
        return found[0], start

    def add_standard(self, name: str, alias: str, position: int) -> None:
        body = standard_terminal(name)
        if body is None:
            self.fail(f"common has no terminal {name}; it has {', '.join(NAMES)}", position)
        self.add(alias, body, position)

    # Expressions

    def alternatives(self) -> Expression:
        parts = [self.items()]
        while self.take("|"):
            self.skip_space()
            parts.append(self.items())
        return choice(*parts)

    def items(self) -> Expression:
        """Items one after the other, up to | or a closing bracket or the next statement."""
        parts: list[Expression] = []
        while self.position < len(self.text) and self.text[self.position] not in "|)]":
            if self.begins_statement():
                break
            if self.match(_ALIAS) is not None:
                self.skip_space()
                break
            item = self.item()
            self.skip_space()
            if not self.begins_statement() and (repeated := self.repeated(item)) is not None:
                item = repeated
                self.skip_space()
            parts.append(item)
        return sequence(*parts)

    def item(self) -> Expression:
        start = self.position
        for opening, closing in ("()", "[]"):
            if self.take(opening):
                inner = self.group(closing, start)
                return inner if opening == "(" else optional(inner)
        if (string := self.match(_STRING)) is not None:
            return self.token(self.string(string, start))
        if (regex := self.match(_REGEX)) is not None:
            return self.token(self.regex(regex, start))
        if (name := self.match(_NAME)) is not None:
            return self.name(name[0], start)
        if _WORD.match(self.text, start):
            self.fail(_CASE_OF_NAMES)
        fault = _FAULTS.get(self.text[start], "expected a literal, a regular expression, a name or a group")
        return self.fail(f"{fault}, but found {self.shown()}" if fault.startswith("expected") else fault)

    def group(self, closing: str, start: int) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"groups nest deeper than {MAX_DEPTH}", start)
        self.skip_space()
        inner = self.alternatives()
        if not self.take(closing):
            self.fail("the group is never closed", start)
        self.depth -= 1
        return inner

    def name(self, name: str, start: int) -> Expression:
        if self.at("{"):
            self.fail("templates name{...} are not supported: write the rule out", start)
        if self.in_terminal and not _is_terminal(name):
            self.fail(f"a terminal cannot be made of the rule {name!r}", start)
        self.mentions.append(Mention(name, self.rule, start))
        return self.token(Reference(name)) if _is_terminal(name) else Reference(name)

    def token(self, expression: Expression) -> Expression:
        """A terminal; in a rule, with what is ignored before it."""
        if self.in_terminal or not self.ignores:
            return expression
        return sequence(Reference(IGNORED), expression)

    def repeated(self, item: Expression) -> Expression | None:
        """`item` with the quantifier that stands here, None if there is none."""
        for mark, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.take(mark):
                return repeat(item, low, high)
        start = self.position
        if not self.take("~"):
            return None
        self.skip_space()
        least = self.count()
        most = least
        before = self.position
        self.skip_space()
        if self.take(".."):
            self.skip_space()
            most = self.count()
        else:
            self.position = before
        if least is None or most is None:
            self.fail("a repeat is written ~ n or ~ n..m", start)
        if most < least:
            self.fail("the bounds of the repeat are out of order", start)
        return repeat(item, least, most)

    def string(self, found: re.Match[str], start: int) -> Expression:
        """A literal, a literal in any case, or a range of characters."""
        text = self.unescaped(found.start(1), found.end(1))
        end = self.position
        self.skip_space()
        if not self.take(".."):
            self.position = end
            return _any_case(text) if found[2] else literal(text)
        self.skip_space()
        other = self.match(_STRING)
        last = self.unescaped(other.start(1), other.end(1)) if other is not None else ""
        if other is None or found[2] or other[2] or len(text) != 1 or len(last) != 1:
            self.fail('a range is written "a".."z", one character on each side', start)
        if last < text:
            self.fail("the range is out of order", start)
        return character_expression(normalised([(ord(text), ord(last))]), RAW_UTF8)

    def unescaped(self, start: int, end: int) -> str:
        """The characters that text[start:end], the inside of a literal, stands for."""
        after, characters = self.position, []
        self.position = start
        while self.position < end:
            place = self.position
            self.position += 1
            character = self.text[place]
            if character == "\\":
                letter = self.text[self.position]
                self.position += 1
                if letter in "xuU":
                    character = chr(self.code_point(letter, place))
                elif letter in _ESCAPES:
                    character = _ESCAPES[letter]
                else:
                    self.fail(f"unknown escape \\{letter}", place)
            characters.append(character)
        self.position = after
        return "".join(characters)

    def regex(self, found: re.Match[str], start: int) -> Expression:
        body, flags = found[1], "".join(dict.fromkeys(found[2]))
        if not set(flags) <= set("imsux"):
            self.fail(f"the flags of a regular expression are i, m, s, u and x, not {found[2]}", start)
        flags = flags.replace("u", "")
        if flags:
            body = f"(?{flags}:{body}\n)" if "x" in flags else f"(?{flags}:{body})"
        if any(lazy[1] for lazy in _LAZY.finditer(body)):
            self.fail("lazy quantifiers are not supported: say instead what the terminal may not hold", start)
        try:
            tree = parse(body, "python")
            expression = regex_to_expression(body, dialect="python", alphabet=RAW_UTF8)
        except InvalidGrammar as error:
            self.fail(error.reason, start)
        if not is_plain(tree):
            self.fail(
                "anchors, \\b and look-arounds reach beyond their terminal: they are not supported", start
            )
        return expression


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _any_case(text: str) -> Expression:
    """`text` with each letter in lower or upper case, where that is one character."""
    parts = []
    for character in text:
        cases = {form for form in (character, character.lower(), character.upper()) if len(form) == 1}
        parts.append(character_expression(normalised((ord(form), ord(form)) for form in cases), RAW_UTF8))
    return sequence(*parts)
