"""`python -m jfbatch` is the command jfbatch."""

from jfbatch.cli import main

if __name__ == "__main__":
    main()
