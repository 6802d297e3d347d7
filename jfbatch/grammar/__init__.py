"""Which texts are allowed: patterns to automata, token masks and forced bytes. Knows nothing of models."""

from typing import TYPE_CHECKING, Any

from jfbatch.errors import GrammarError, InvalidGrammar, UnsupportedSchema
from jfbatch.grammar.grammar import Grammar
from jfbatch.grammar.matcher import Matcher
from jfbatch.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from jfbatch.grammar.logits_processor import LogitsProcessor

__all__ = [
    "Grammar",
    "GrammarError",
    "InvalidGrammar",
    "LogitsProcessor",
    "Matcher",
    "UnsupportedSchema",
    "Vocabulary",
]


def __getattr__(name: str) -> Any:
    """LogitsProcessor on first use: it brings torch and transformers, which nothing else here needs."""
    if name == "LogitsProcessor":
        from jfbatch.grammar.logits_processor import LogitsProcessor

        return LogitsProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
