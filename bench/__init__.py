"""Measurements: of the whole program, of its parts, and of its peers on the same rows."""
