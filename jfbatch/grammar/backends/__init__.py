"""The same Matcher over other grammar engines: which there are, what they can do, which are installed.

Nothing of an engine is imported before a pattern asks for it.
"""

from __future__ import annotations

from importlib.util import find_spec

from jfbatch.errors import InvalidGrammar
from jfbatch.grammar.backends import fsm, llguidance, outlines, xgrammar
from jfbatch.grammar.backends.protocol import Backend, BackendName, Capabilities, CompiledGrammar
from jfbatch.grammar.grammar import JsonStyle, Objects
from jfbatch.grammar.vocabulary import Vocabulary

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendName",
    "Capabilities",
    "CompiledGrammar",
    "check_supported",
    "is_installed",
    "open_backend",
    "why_missing",
]

BACKENDS: dict[BackendName, Capabilities] = {
    module.CAPABILITIES.name: module.CAPABILITIES for module in (fsm, llguidance, xgrammar, outlines)
}
"""What each backend says of itself."""

_PACKAGES: dict[BackendName, str | None] = {
    "fsm": None,
    "llguidance": "llguidance",
    "xgrammar": "xgrammar",
    "outlines": "outlines_core",
}


def is_installed(name: BackendName) -> bool:
    """Whether the backend's package is there. Does not import it."""
    package = _PACKAGES[name]
    return package is None or find_spec(package) is not None


def why_missing(name: BackendName) -> str | None:
    """One line with the way out where a backend is not installed, else None."""
    if is_installed(name):
        return None
    return f"the backend {name} is not installed: pip install 'jfbatch[{name}]'"


def open_backend(name: BackendName, vocabulary: Vocabulary) -> Backend:
    """A backend other than fsm for this vocabulary; takes up to seconds. Raises InvalidGrammar."""
    if reason := why_missing(name):
        raise InvalidGrammar(reason)
    try:
        if name == "llguidance":
            return llguidance.LlguidanceBackend(vocabulary)
        if name == "xgrammar":
            return xgrammar.XgrammarBackend(vocabulary)
        if name == "outlines":
            return outlines.OutlinesBackend(vocabulary)
    except ImportError as error:
        reason = f"the backend {name} cannot be loaded ({error}): pip install 'jfbatch[{name}]'"
        raise InvalidGrammar(reason) from None
    raise ValueError(f"{name} is no backend of another engine")


def check_supported(name: BackendName, kind: str, style: JsonStyle, objects: Objects, strict: bool) -> None:
    """Raise InvalidGrammar where a backend's capabilities rule a pattern out."""
    backend = BACKENDS[name]
    if kind not in backend.kinds:
        kinds = ", ".join(backend.kinds)
        raise InvalidGrammar(f"{name}: patterns of kind {kind!r} are not supported; it takes {kinds}")
    if kind != "schema":
        return
    if style not in backend.styles:
        styles = " or ".join(backend.styles)
        raise InvalidGrammar(
            f"{name}: JSON in the style {style!r} is not supported; use --json-style {styles}"
        )
    if strict and not backend.vouches:
        raise InvalidGrammar(f"{name}: it does not say which keywords it leaves out; --strict needs fsm")
