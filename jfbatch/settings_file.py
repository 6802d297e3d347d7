"""A YAML file with settings, read as YAML 1.2 has it: what looks like text is text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from jfbatch.errors import UsageError


class _Yaml12Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as 1.2 reads it: only true and false are booleans (yes, no, on and off are texts), dates are
    texts, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else None)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Yaml12Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|false"), ["t", "f"])


def read_settings(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UsageError naming the file and, where known, the line."""
    try:
        document = yaml.load(file.read_text(encoding="utf-8-sig"), Loader=_Yaml12Loader)  # a SafeLoader
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror or error}; give --config a YAML file that exists"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        raise UsageError(
            f"{file}: not valid YAML{place}: {getattr(error, 'problem', None) or error}"
        ) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{file}: must be a mapping of settings to values, not a {type(document).__name__}")
    return {str(name): value for name, value in document.items()}
