"""The command line of a run again, for the processes that run it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jfbatch.config import RunConfig, from_environment, settings


def as_arguments(
    config: RunConfig, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> list[str]:
    """The command-line arguments that say what flags and environment said, inputs first.

    `config` is what they were loaded to; settings of a YAML file are left to `--config`.
    """
    environment = os.environ if environment is None else environment
    given = {**from_environment(environment), **flags}
    inputs, arguments = [], []
    for setting in settings():
        value = getattr(config, setting.field)
        if setting.name not in given or value is None:
            continue
        if setting.field == "inputs":
            inputs = [f"./{name}" if name.startswith("-") and name != "-" else name for name in value]
        elif setting.is_switch:
            arguments.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        elif setting.annotation is bool:
            arguments += [setting.flag, "on" if value else "off"]
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            arguments.append(f"{setting.flag}={text}" if text.startswith("-") else setting.flag)
            arguments += [] if text.startswith("-") else [text]
    return [*inputs, *arguments]
