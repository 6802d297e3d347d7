"""Patterns to trees, for two dialects: Python's `re`, and ECMA-262 as JSON Schema uses it.

One loop with a stack of open groups, so that neither nesting nor length costs recursion. Where ECMA's
Unicode mode would refuse a pattern that has one sensible reading (`\\-`, a lone `]`, `(?P<name>`, `(?i)`,
`\\A`, `\\Z`), it is read so. What is not regular is refused by name and position.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, replace
from functools import lru_cache

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.regex.characters import ANY_CHARACTER, Ranges, complemented, normalised
from jfbatch.grammar.regex.classes import (
    ECMA_LINE_END,
    NEWLINE,
    case_closed,
    escape_class,
)
from jfbatch.grammar.regex.reader import Dialect, Flags, Reader, shown
from jfbatch.grammar.regex.syntax import (
    AT_END,
    AT_START,
    Alternation,
    Characters,
    Concatenation,
    Condition,
    Context,
    Look,
    Node,
    Repetition,
    alternation,
    characters,
    concatenation,
    is_plain,
    nullable,
    repetition,
)

MAX_DEPTH = 100  # nested groups that are not mere parentheses
MAX_COUNT = 1_000_000_000


@dataclass(slots=True)
class _Group:
    """An open group: alternatives so far, and the items of the current one."""

    start: int
    flags: Flags  # to return to after it
    look: tuple[bool, bool] | None = None  # ahead, negative
    height: int = 0  # of the groups closed within it
    quantified: bool = False
    alternatives: list[Node] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)
    quantifiable: bool = False  # whether the last item may take a quantifier

    def close(self) -> Node:
        if not self.alternatives:
            return concatenation(self.items)
        return alternation([*self.alternatives, concatenation(self.items)])


def parse(pattern: str, dialect: Dialect) -> Node:
    """The tree of a pattern. Raises InvalidGrammar with the position and the reason."""
    if dialect == "python":
        _check_python(pattern)
    return _Parser(pattern, dialect).parse()


def _check_python(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, OverflowError, ValueError) as error:
        raise InvalidGrammar(f"regex {shown(pattern)}: {error}") from None
    except RecursionError:
        raise InvalidGrammar(f"regex {shown(pattern)}: groups nest too deeply") from None


_COUNTS = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_GROUP_NAME = re.compile(r"[^\W\d]\w*|[\w$]+")
_FLAG_GROUP = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")


class _Parser(Reader):
    def parse(self) -> Node:
        pattern = self.pattern
        stack = [_Group(0, self.flags)]
        while self.position < len(pattern):
            group = stack[-1]
            character = pattern[self.position]
            if character in "*+?{" and self.quantify(group):
                continue
            if self.flags.verbose and (character in " \t\n\r\f\v" or character == "#"):
                self.skip_verbose()
                continue
            start = self.position
            self.position += 1
            group.quantifiable = True
            if character == "(":
                opened = self.open_group(start)
                if opened is not None:
                    stack.append(opened)
                else:
                    group.quantifiable = False
            elif character == ")":
                if len(stack) == 1:
                    self.fail("unmatched )", start)
                self.close_group(stack)
            elif character == "|":
                group.alternatives.append(concatenation(group.items))
                group.items = []
                group.quantifiable = False
            else:
                group.items.append(self.atom(character, start))
                group.quantifiable = not isinstance(group.items[-1], Condition | Look)
        if len(stack) > 1:
            self.fail("group is never closed", stack[-1].start)
        return stack[0].close()

    def close_group(self, stack: list[_Group]) -> None:
        closed = stack.pop()
        node = closed.close()
        if closed.look:
            node = look(*closed.look, node)
        self.flags = closed.flags
        parent = stack[-1]
        parent.items.append(node)
        parent.quantifiable = True
        is_mere = not closed.alternatives and len(closed.items) < 2 and not closed.quantified
        parent.height = max(parent.height, closed.height + (not is_mere))
        if parent.height > MAX_DEPTH:
            self.fail(f"groups nest deeper than {MAX_DEPTH}", closed.start)

    def skip_verbose(self) -> None:
        if self.pattern[self.position] == "#":
            end = self.pattern.find("\n", self.position)
            self.position = len(self.pattern) if end < 0 else end
        self.position += 1

    # Groups

    def open_group(self, start: int) -> _Group | None:
        """The group opened at `start`, or None for a comment or a flag setting."""
        flags = self.flags
        if not self.take("?"):
            return _Group(start, flags)
        for mark, kind in (
            ("=", (True, False)),
            ("!", (True, True)),
            ("<=", (False, False)),
            ("<!", (False, True)),
        ):
            if self.take(mark):
                return _Group(start, flags, kind)
        if self.take(":"):
            return _Group(start, flags)
        if self.take(">"):
            self.fail("atomic groups (?>...) are not supported", start)
        if self.take("P=") or self.take("("):
            self.fail("back-references and conditions are not regular, and not supported", start)
        if self.take("#"):
            end = self.pattern.find(")", self.position)
            if end < 0:
                self.fail("comment is never closed", start)
            self.position = end + 1
            return None
        if self.take("P<") or self.take("<"):
            name = _GROUP_NAME.match(self.pattern, self.position)
            if name is None or not self.pattern.startswith(">", name.end()):
                self.fail("malformed group name", start)
            self.position = name.end() + 1
            return _Group(start, flags)
        return self.flag_group(start)

    def flag_group(self, start: int) -> _Group | None:
        match = _FLAG_GROUP.match(self.pattern, self.position)
        if match is None or (match[3] == ")" and not match[1]):
            self.fail("unknown kind of group", start)
        before = self.flags
        settings = {"i": "ignore_case", "m": "multiline", "s": "dot_all", "x": "verbose", "a": "ascii_only"}
        for letters, value in ((match[1], True), (match[2] or "", False)):
            for letter in letters:
                if letter == "u":
                    self.flags = replace(self.flags, ascii_only=False)
                elif letter in settings and not (letter == "a" and self.dialect == "ecma"):
                    self.flags = replace(self.flags, **{settings[letter]: value})
                else:
                    self.fail(f"unknown flag {letter}", start)
        self.position = match.end()
        if match[3] == ":":
            return _Group(start, before)
        if self.dialect == "ecma" and start > 0:
            self.fail("flags may be set at the start only, or for a group (?i:...)", start)
        return None

    # Quantifiers

    def quantify(self, group: _Group) -> bool:
        """Apply the quantifier at the position to the last item; False if it is a literal brace."""
        start = self.position
        character = self.pattern[start]
        low: int
        high: int | None
        if character == "{":
            match = _COUNTS.match(self.pattern, start)
            if match is None or not (match[1] or (match[2] and self.dialect == "python")):
                return False
            low = int(match[1] or 0)
            high = (int(match[3]) if match[3] else None) if match[2] else low
            self.position = match.end()
            if max(low, high or 0) > MAX_COUNT:
                self.fail(f"more than {MAX_COUNT:,} repeats", start)
            if high is not None and high < low:
                self.fail("the bounds of a repeat are out of order", start)
        else:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
            self.position += 1
        if not group.quantifiable:
            self.fail("nothing to repeat", start)
        if self.pattern.startswith("+", self.position) and self.dialect == "python":
            self.fail("possessive quantifiers are not supported", start)
        self.take("?")  # lazy or greedy: the same texts
        item = group.items[-1]
        group.items[-1] = repetition(item, low, high)
        group.quantifiable = False
        group.quantified = True
        return True

    # Atoms

    def atom(self, character: str, start: int) -> Node:
        if character == "[":
            return self.set_of(self.bracket(start))
        if character == ".":
            if self.flags.dot_all:
                return characters(ANY_CHARACTER)
            return characters(complemented(ECMA_LINE_END if self.dialect == "ecma" else NEWLINE))
        if character == "^":
            return Condition(False, Context(self.line_ends(), True)) if self.flags.multiline else AT_START
        if character == "$":
            if self.flags.multiline:
                return Condition(True, Context(self.line_ends(), True))
            if self.dialect == "ecma" or self.position == len(self.pattern):
                return AT_END
            return alternation([AT_END, Look(True, False, concatenation([characters(NEWLINE), AT_END]))])
        if character == "\\":
            return self.escape(start)
        return self.one(ord(character))

    def line_ends(self) -> Ranges:
        return ECMA_LINE_END if self.dialect == "ecma" else NEWLINE

    def one(self, code: int) -> Node:
        if not self.flags.ignore_case:
            return _one_character(code)
        return self.set_of(((code, code),))

    def set_of(self, ranges: Ranges) -> Node:
        if self.flags.ignore_case:
            ranges = case_closed(ranges, self.dialect, self.flags.ascii_only)
        return characters(ranges)

    def escape(self, start: int) -> Node:
        letter = self.peek_escape(start)
        if letter in "bB":
            self.position += 1
            word = escape_class("w", self.dialect, self.flags.ascii_only)
            return word_boundary(letter == "B", word, self.dialect)
        if letter == "A":
            self.position += 1
            return AT_START
        if letter in "zZ" and not (letter == "z" and self.dialect == "python"):
            self.position += 1
            return AT_END
        if letter in "123456789" and not (self.dialect == "python" and self.is_octal()):
            self.fail("back-references are not regular, and not supported", start)
        if letter == "k" and self.pattern.startswith("<", self.position + 1):
            self.fail("back-references are not regular, and not supported", start)
        found = self.shared_escape(start)
        return self.one(found) if isinstance(found, int) else self.set_of(found)


@lru_cache(maxsize=4096)
def _one_character(code: int) -> Node:
    return characters(normalised(((code, code),)))


@lru_cache(maxsize=16)
def word_boundary(negated: bool, word: Ranges, dialect: Dialect) -> Node:
    """\\b (negated: \\B): the characters on the two sides differ (do not) in being of a word."""
    inside, outside = Context(word, False), Context(complemented(word), True)
    if not negated:
        sides = [(inside, outside), (outside, inside)]
    elif dialect == "ecma":
        sides = [(inside, inside), (outside, outside)]
    else:  # Python's \\B does not match the empty text
        other = Context(complemented(word), False)
        sides = [(inside, inside), (other, outside), (outside, other)]
    return alternation(
        [concatenation([Condition(False, left), Condition(True, right)]) for left, right in sides]
    )


def look(ahead: bool, negative: bool, inner: Node) -> Node:
    """A look-around; a `Condition` where it is about one character."""
    context = _one_character_context(inner, ahead)
    if context is None:
        return Look(ahead, negative, inner)
    if negative:
        context = Context(complemented(context.ranges), not context.edge)
    return Condition(ahead, context)


def _one_character_context(inner: Node, ahead: bool) -> Context | None:
    """What must stand beside a place for `inner` to match there, if that is about one character."""
    match inner:
        case Characters(ranges):
            return Context(ranges, False)
        case Condition(side, context) if side is ahead:
            return context
        case Alternation(parts):
            contexts = [_one_character_context(part, ahead) for part in parts]
            known = [context for context in contexts if context is not None]
            if len(known) < len(contexts):
                return None
            ranges = normalised(pair for context in known for pair in context.ranges)
            return Context(ranges, any(context.edge for context in known))
        case Repetition(repeated, low) if low == 1:
            return _one_character_context(repeated, ahead)
        case Concatenation(parts):
            ordered = parts if ahead else parts[::-1]
            while len(ordered) > 1 and is_plain(ordered[-1]) and nullable(ordered[-1]):
                ordered = ordered[:-1]
            if len(ordered) == 1:
                return _one_character_context(ordered[0], ahead)
    if is_plain(inner) and nullable(inner):
        return Context(ANY_CHARACTER, True)
    return None
