"""Timing the parts of the forward pass for `--profile`: hooks on the model's modules, put there on request.

Without them a run has no cost at all. On a GPU they time the launches, not the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from jfbatch.engine.decoder_stack import DecoderStack
from jfbatch.engine.elementwise import SiluGates

Span = Callable[[str], AbstractContextManager[object]]
"""Times what is done inside it under the name given; `contextlib.nullcontext` times nothing."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def watched(span: Span, name: str, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function` with a span around each call; the function itself where nothing is timed.

    For what is called for every row of every step, where even an empty context manager would show.
    """
    if span is nullcontext:
        return function

    @wraps(function)
    def timed(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        with span(name):
            return function(*arguments, **options)

    return timed


def watch_modules(model: Any, span: Span) -> int:
    """Put spans around the model's modules by what they do; returns how many modules have one.

    What is left of an attention module, less the linear layers inside it where it has any, is rotation, KV
    writes and attention; of a gated layer, the activation; of the forward pass, embedding and the layout. A
    DecoderStack tells itself what its time went to, in its first thread: its spans can `contain` parts, as
    those of a Trace.
    """
    head = model.get_output_embeddings()
    watched = 0
    for module in model.modules():
        if name := _kind(module, head):
            _watch(module, name, span)
            watched += 1
    return watched


def _kind(module: nn.Module, head: nn.Module | None) -> str | None:
    if module is head:
        return "LM head"
    if isinstance(module, DecoderStack):
        return "layers"
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    if isinstance(module, SiluGates) or (hasattr(module, "gate_proj") and hasattr(module, "up_proj")):
        return "gates"
    if hasattr(module, "layer_idx") and hasattr(module, "head_dim"):
        return "attention"
    return "norm" if "norm" in type(module).__name__.lower() else None


def _watch(module: nn.Module, name: str, span: Span) -> None:
    running: list[Any] = []

    def enter(*_arguments: Any) -> None:
        running.append(span(name))
        running[-1].__enter__()

    def leave(*_arguments: Any) -> None:
        ended = running.pop()
        if isinstance(module, DecoderStack):
            ended.contain(module.spent)
        ended.__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
