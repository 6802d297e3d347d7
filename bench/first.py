"""Imported before torch: lets OpenMP threads sleep while they wait, as `jfbatch run` does."""

from jfbatch.engine.model import prepare_environment

prepare_environment()
