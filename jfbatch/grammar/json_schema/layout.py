"""How JSON text is laid out: one fixed style, so that white space is never a choice.

`spaced` is what json.dumps prints, `compact` has no white space, `pretty` indents by two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["spaced", "compact", "pretty"]
STYLES: tuple[Style, ...] = ("spaced", "compact", "pretty")


@dataclass(frozen=True)
class Layout:
    """The white space of one style. `depth` counts the containers around; only pretty depends on it."""

    style: Style

    @property
    def depends_on_depth(self) -> bool:
        return self.style == "pretty"

    def opening(self, depth: int) -> str:
        """What stands between an opening bracket and the first element, at `depth` of the container."""
        return "\n" + "  " * (depth + 1) if self.style == "pretty" else ""

    def separator(self, depth: int) -> str:
        """What stands between two elements."""
        if self.style == "pretty":
            return ",\n" + "  " * (depth + 1)
        return ", " if self.style == "spaced" else ","

    def closing(self, depth: int) -> str:
        """What stands between the last element and the closing bracket."""
        return "\n" + "  " * depth if self.style == "pretty" else ""

    @property
    def colon(self) -> str:
        return ":" if self.style == "compact" else ": "

    def dumps(self, value: Any, depth: int = 0) -> str:
        """A JSON value as this style prints it at a depth."""
        if self.style != "pretty":
            separators = (",", ":") if self.style == "compact" else (", ", ": ")
            return json.dumps(value, ensure_ascii=False, separators=separators)
        text = json.dumps(value, ensure_ascii=False, indent=2)
        # A newline never stands inside a JSON string, so every one begins an indented line.
        return text.replace("\n", "\n" + "  " * depth) if depth else text
