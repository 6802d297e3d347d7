"""Python types that say what a JSON Schema says: pydantic models and dataclasses.

pydantic makes the schema; what it cannot describe is refused in its words.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jfbatch.errors import UnsupportedSchema


def schema_of(value: Any) -> Any:
    """The JSON Schema of a pydantic model or dataclass; anything else is returned as it is.

    As pydantic validates: properties with a default are optional, names are the fields' aliases. Raises
    UnsupportedSchema where a field's type has no JSON Schema.
    """
    if not isinstance(value, type):
        return value
    import pydantic  # here, because schemas from files do not need it

    is_model = issubclass(value, pydantic.BaseModel)
    if not (is_model or dataclasses.is_dataclass(value)):
        raise UnsupportedSchema(
            "",
            value.__name__,
            "a class is taken as a schema if it is a pydantic model or a dataclass",
        )
    try:
        return pydantic.TypeAdapter(value).json_schema()
    except pydantic.errors.PydanticUserError as error:
        raise UnsupportedSchema("", value.__name__, str(error).split("\n", 1)[0]) from None
