"""The exceptions a user can meet. Each carries fields and formats itself once, as one line with a way out.

Everything derives from JfbatchError, so the process boundary (cli.py) and the row boundary
(job.py) can tell our own words from a fault of the program.
"""

from __future__ import annotations


class JfbatchError(Exception):
    """Base of every error whose text is meant for the user. `exit_code` is what the process ends with."""

    exit_code = 1


class UsageError(JfbatchError):
    """The command line, the configuration or a file it names is wrong; nothing has been started."""

    exit_code = 2


class InputError(JfbatchError):
    """An input file cannot be read further. `place` names the file and, where known, the line."""

    exit_code = 65

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class OutputError(JfbatchError):
    """The output cannot be written; what was committed before is intact."""

    exit_code = 74


class ModelError(JfbatchError):
    """The model or its tokenizer cannot be loaded or run."""

    exit_code = 2


class GrammarError(JfbatchError):
    """A matcher was given a token its mask forbids, or a rollback past its start."""


class InvalidGrammar(JfbatchError):
    """A pattern cannot become a grammar. `reason` goes to exactly the rows that carry the pattern."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GrammarTooLarge(InvalidGrammar):
    """A pattern passed its limit of states, memory or time."""


class NothingMatches(InvalidGrammar):
    """A pattern that no text obeys."""

    def __init__(self) -> None:
        super().__init__("nothing can match this pattern")


class UnsupportedSchema(InvalidGrammar):
    """A JSON Schema uses what cannot be enforced.

    `path` is the JSON pointer of the subschema ("" is the root), `keyword` the keyword at fault.
    """

    def __init__(self, path: str, keyword: str, reason: str) -> None:
        super().__init__(f"schema at {path or '#'}: {keyword}: {reason}")
        self.path = path
        self.keyword = keyword
        self.reason = reason


class Unsatisfiable(UnsupportedSchema):
    """A JSON Schema that no value satisfies: no other engine can do more with it."""

    def __init__(self) -> None:
        super().__init__("", "schema", "no value can satisfy it")
