"""The tag at which a reasoning model stops thinking: found in chat templates, and splitting outputs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from jfbatch.errors import UsageError
from jfbatch.rows.json_text import is_utf8

_END_TAG = re.compile(r"</(think|thinking|thought|reasoning)>((?:\\n|\n){0,2})")


@dataclass(frozen=True)
class ReasoningEnd:
    """`end` ends the thinking, `after` (white space) stands before the output proper."""

    end: str
    after: str = ""

    @property
    def pattern(self) -> str:
        """The text of a "reasoning" pattern."""
        return json.dumps({"end": self.end, "after": self.after})

    @property
    def start(self) -> str:
        """The tag with which thinking begins, "" where that is not known."""
        return f"<{self.end[2:]}" if self.end.startswith("</") else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a vocabulary may have as tokens of their own."""
        return tuple(filter(None, (self.start, self.end)))

    def is_over(self, prompt: str) -> bool:
        """Whether the prompt itself ends the thinking, so that none is left to the model."""
        return prompt.rstrip().endswith(self.end)

    def split(self, text: bytes) -> tuple[bytes, bytes]:
        """An output as (thinking, output proper); all of it is thinking where the tag does not stand."""
        thinking, found, rest = text.partition(self.end.encode())
        thinking = thinking.strip()
        thinking = thinking.removeprefix(self.start.encode()).lstrip()
        return thinking, rest.removeprefix(self.after.encode()) if found else b""


def reasoning_end(setting: str, template: str) -> ReasoningEnd | None:
    """The end tag that --reasoning-end asks for; None where there is no thinking.

    "auto" takes it, and the line ends behind it, from the chat template if that has one. White space at the
    end of a tag that is given stands behind it too; \\n is a line end. Raises UsageError.
    """
    if setting == "none":
        return None
    if setting == "auto":
        found = list(_END_TAG.finditer(template))
        if not found:
            return None
        name = found[-1][1]
        after = max((match[2].replace("\\n", "\n") for match in found if match[1] == name), key=len)
        return ReasoningEnd(f"</{name}>", after)
    text = setting.replace("\\n", "\n")
    end = text.rstrip()
    if not is_utf8(text):
        raise UsageError("--reasoning-end: not UTF-8 text")
    if not end:
        raise UsageError("--reasoning-end: give auto, none or a tag such as </think>, not white space")
    return ReasoningEnd(end, text[len(end) :])
