"""Grammar files to rules: GBNF (llama.cpp, `root ::= ...`) and Lark's syntax (`start: ...`).

Both are read as grammars over characters, without a lexer: a terminal stands for its texts wherever it is
named. What is left is made fit for a machine that reads from left to right: every name is defined, every
rule matches something, and no rule calls itself before it has read a byte.
"""

from __future__ import annotations

import re

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.ebnf.gbnf import parse_gbnf
from jfbatch.grammar.ebnf.lark import parse_lark
from jfbatch.grammar.ebnf.left_recursion import without_left_recursion
from jfbatch.grammar.ebnf.soundness import check_names, check_productive
from jfbatch.grammar.ebnf.source import GrammarSyntaxError
from jfbatch.grammar.expression import Reference, RuleSet

__all__ = ["GrammarSyntaxError", "grammar_to_rules"]

_FIRST_DEFINITION = re.compile(r"^[ \t]*[?!]*[\w-]+(?:\{[^}\n]*\})?(?:\.-?[0-9]+)?\s*(::=|:)", re.MULTILINE)


def grammar_to_rules(text: str) -> RuleSet:
    """The rules of a grammar file; its first definition tells which syntax it has.

    The start is `root` in GBNF and `start` in Lark's syntax; characters are spelled in UTF-8. Raises
    GrammarSyntaxError (an InvalidGrammar) with line, column and rule for what cannot be read, for names
    that are not defined and for rules that match nothing; InvalidGrammar naming the rules where left
    recursion cannot be written another way.
    """
    first = _FIRST_DEFINITION.search(text)
    if first is None:
        raise InvalidGrammar("grammar: no rule found; rules are written root ::= ... or start: ...")
    try:
        source = parse_gbnf(text) if first[1] == "::=" else parse_lark(text)
        check_names(source)
        check_productive(source)
        rules = {name: definition.body for name, definition in source.definitions.items()}
        return RuleSet(Reference(source.start), without_left_recursion(rules, source.start))
    except RecursionError:
        raise InvalidGrammar("grammar: groups and repeats nest too deeply") from None
