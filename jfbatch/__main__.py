"""The command `jfbatch`, also as `python -m jfbatch`: from its first moment on a run minds its signals."""

import sys

from jfbatch.signals import keep_early_signals


def main() -> None:
    """Run the command line and exit (see cli.main)."""
    if sys.argv[1:2] == ["run"]:
        keep_early_signals()
    from jfbatch import cli  # here, because it takes its time

    cli.main()


if __name__ == "__main__":
    main()
