"""Which texts are allowed: patterns to automata, token masks and forced bytes. Knows nothing of models."""

from jfbatch.errors import GrammarError, InvalidGrammar, UnsupportedSchema
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.matcher import Matcher
from jfbatch.grammar.vocabulary import Vocabulary

__all__ = ["Grammar", "GrammarError", "InvalidGrammar", "Matcher", "UnsupportedSchema", "Vocabulary"]
