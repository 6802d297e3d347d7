"""`python -m jfbatch` is the command jfbatch."""

from jfbatch.cli import main

main()
