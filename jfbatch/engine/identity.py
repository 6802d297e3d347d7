"""Which weights a model name stands for, told without loading them.

Two runs may be joined only if they used the same weights. Sizes and samples of the files tell
different weights apart without reading gigabytes, and do not change when a directory is copied.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from jfbatch.engine.model import DEMO, demo_file

_SAMPLE = 1 << 16  # bytes read at each end of a file
_MODEL_FILES = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt")


def model_identity(name: str) -> str:
    """The model's name and, for local files, a digest of their names, sizes and both ends.

    A hub name stands for itself: its files may not be here yet.
    """
    if name == DEMO:
        return f"demo:{_digest([demo_file()])}"
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(_MODEL_FILES))
        return f"{path.name}:{_digest(files)}"
    if path.is_file():
        return f"{path.name}:{_digest([path])}"
    return name


def _digest(files: list[Path]) -> str:
    hashed = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        hashed.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            hashed.update(stream.read(_SAMPLE))
            if size > _SAMPLE:
                stream.seek(max(_SAMPLE, size - _SAMPLE))
                hashed.update(stream.read())
    return hashed.hexdigest()[:16]
