"""Fields of a request to other engines that change its output there and have no effect here.

Nobody should have to find out by the outputs. What is asked for and only shapes the choice of tokens is told
with the number of its rows; where rows would get less than they ask for, they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jfbatch.rows.row import RowProblem

_SHAPES_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
}
"""They choose among the likely tokens, and so mean nothing where the likeliest is taken."""

_SHAPES_OUTPUT: dict[str, tuple[Any, ...]] = {
    **{"stop": ("", []), "stop_token_ids": ([],), "bad_words": ([],), "allowed_token_ids": ([],)},
    **{"min_tokens": (0,), "ignore_eos": (False,), "suffix": ("",), "echo": (False,)},
    **{
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
    },
    **{"logit_bias": ({},), "use_beam_search": (False,), "reasoning_effort": ()},
    **{"logprobs": (False, 0), "top_logprobs": (0,), "prompt_logprobs": (0,)},
    **{"chat_template": (), "chat_template_kwargs": ({},)},
    **{"add_generation_prompt": (True,), "continue_final_message": (False,)},
}
"""By name, the values that ask for nothing; null is one of each."""

_ORDINARY_WORDS = frozenset({"suffix", "echo"})
"""Names that a row which is no request may well have for something else."""

FIELDS = frozenset({*_SHAPES_SAMPLING, *_SHAPES_OUTPUT})
"""The fields that have no effect."""


def unheeded(
    fields: Mapping[str, Any], kept: Collection[str], is_request: bool, temperature: float | None
) -> tuple[str, ...]:
    """The fields of a row that ask for something and have no effect, by name. Raises RowProblem on others.

    `kept` are fields to carry to the output, which are the user's own. `is_request`: the row has the form of
    a request (a body, or messages), so that its names are the API's.
    """
    if is_request:
        _refuse_several_outputs(fields, kept)
    _refuse_functions(fields, kept)
    return tuple(
        name
        for name in fields
        if name in FIELDS
        and name not in kept
        and (is_request or name not in _ORDINARY_WORDS)
        and not (temperature == 0 and name in _SHAPES_SAMPLING)
        and _asks(fields[name], _SHAPES_OUTPUT.get(name) or _SHAPES_SAMPLING.get(name, ()))
    )


def _refuse_several_outputs(fields: Mapping[str, Any], kept: Collection[str]) -> None:
    for name in ("n", "best_of"):
        if name not in kept and _asks(fields.get(name), (1,)):
            raise RowProblem(
                f"{name} must be 1: a row has one output; repeat the row with other ids and seeds for more",
                name,
            )


def _refuse_functions(fields: Mapping[str, Any], kept: Collection[str]) -> None:
    neutral: dict[str, Iterable[Any]] = {"functions": ([], {}), "function_call": ("none", "auto")}
    for name, values in neutral.items():
        value = fields.get(name)
        # A text or number of that name is a field of the user's own.
        if isinstance(value, list | dict) and name not in kept and _asks(value, values):
            raise RowProblem(f"{name} is not known: give tools and tool_choice in its place", name)


def _asks(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether the value differs from those that ask for nothing; a table's cell may hold it as text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    if isinstance(value, str):
        texts = {text for other in neutral for text in (str(other), str(other).lower())}
        return value not in texts and not any(_is_number(value, other) for other in neutral)
    return value not in list(neutral)


def _is_number(text: str, number: Any) -> bool:
    try:
        return not isinstance(number, str) and float(text) == number
    except ValueError:
        return False
