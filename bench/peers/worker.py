"""The command line that every peer's script shares. Needs nothing but Python."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path


def arguments_of(description: str | None) -> argparse.Namespace:
    """model: directory or file; dtype: f32 or bf16; rows, threads; result: where the outcome is written."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16", "q4_1"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", default="")
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def versions_of(*packages: str) -> dict[str, str]:
    """The installed versions of packages."""
    return {package: importlib.metadata.version(package) for package in packages}
