"""docs/configuration.md, made from the list of settings: `python -m jfbatch.config` prints it."""

from __future__ import annotations

from jfbatch.config import settings, shown_default


def configuration_page() -> str:
    """docs/configuration.md: every setting with its flag, variable, default and description."""
    lines = [
        "# Configuration",
        "",
        "A setting comes from its default, the YAML file given with `--config` (or `JFBATCH_CONFIG`), its",
        "environment variable or its flag; later ones win. A pattern (`schema`, `regex`, `choice` or",
        "`grammar`) replaces the pattern of a weaker source, of whatever kind. Unknown settings are refused.",
        "Paths are relative to the directory the program is started in. Lists take commas in flags and",
        "variables, and are lists in YAML.",
        "",
        "This page is made from the program's own list: `python -m jfbatch.config > docs/configuration.md`.",
    ]
    panel = ""
    for setting in settings():
        if setting.panel != panel:
            panel = setting.panel
            lines += [
                "",
                f"## {panel}",
                "",
                "| setting | flag | variable | default | |",
                "|---|---|---|---|---|",
            ]
        flag = f"`{setting.flag}`" + (f", `{setting.short}`" if setting.short else "")
        default = shown_default(setting)
        cells = (
            f"`{setting.name}`",
            flag,
            f"`{setting.variable}`",
            f"`{default}`" if default else "",
            setting.description,
        )
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"
