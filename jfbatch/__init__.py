"""jfbatch: offline batch inference whose every output obeys its row's schema, regex or grammar."""

__version__ = "0.1.0"
