"""Fixtures that tests of several packages share."""

from tests.tiny_model import tiny_model

__all__ = ["tiny_model"]
