"""The last check before a row is written: does the output obey the schema that the row gave?

jsonschema-rs judges, formats included; this module makes sure that no text, however odd, makes it crash.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jsonschema_rs

from jfbatch.errors import InvalidGrammar
from jfbatch.rows.columns import parse_output
from jfbatch.rows.json_text import RepeatedKey, check_nesting, is_utf8, unique_keys
from jfbatch.rows.row import Pattern, RowProblem


class SchemaValidator:
    """A JSON Schema, ready to check outputs. Raises InvalidGrammar where the schema itself is not valid.

    Without "$schema" it is draft 2020-12. References are followed inside the schema only, never fetched.
    """

    def __init__(self, schema: Any) -> None:
        try:
            self._validator = jsonschema_rs.validator_for(
                schema, validate_formats=True, retriever=_refuse_to_fetch
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            message = getattr(error, "message", None) or str(error)
            raise InvalidGrammar(f"not a valid JSON Schema: {_one_line(message)}") from None

    def check(self, text: str) -> str | None:
        """None if `text` is one JSON document that the schema allows, else what is wrong with it.

        An object with the same key twice is refused, although JSON's grammar would let it pass.
        """
        try:
            check_nesting(text)
            value = _parse(text)
            self._validator.validate(value)
        except RowProblem as problem:
            return problem.reason
        except RepeatedKey as error:
            return str(error)
        except json.JSONDecodeError as error:
            return f"not JSON: {error.msg} (character {error.pos + 1})"
        except jsonschema_rs.ValidationError as error:
            place = "".join(f"/{part}" for part in error.instance_path) or "the value"
            return _one_line(f"{place}: {error.message}")
        except UnicodeEncodeError:
            return "a string holds a lone surrogate"
        except ValueError as error:
            return _one_line(f"cannot be checked: {error}")
        return None


@lru_cache(maxsize=1024)
def validator(pattern: Pattern) -> SchemaValidator:
    """The validator of a "schema" pattern; made once per schema. Raises InvalidGrammar."""
    return SchemaValidator(pattern.schema)


def _parse(text: str) -> Any:
    return parse_output(text, unique_keys)


def _refuse_to_fetch(address: str) -> Any:
    raise ValueError(f"a reference outside the schema: {address}")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    line = line if is_utf8(line) else ascii(line)
    return line if len(line) <= 300 else f"{line[:296]}..."
