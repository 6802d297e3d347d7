"""`python -m jfbatch.grammar.backends` prints docs/backends.md; with a file name it rewrites that file.

What stands below the marker in the file, measurements of one machine, is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jfbatch.grammar.backends.page import MARKER, backends_page

if __name__ == "__main__":
    if len(sys.argv) > 1:
        file = Path(sys.argv[1])
        _, marker, measured = (
            file.read_text(encoding="utf-8").partition(MARKER) if file.exists() else ("", "", "")
        )
        file.write_text(backends_page() + (measured if marker else ""), encoding="utf-8")
    else:
        print(backends_page(), end="")
