"""jfbatch on the rows, measured as its peers are: everything but loading the model and writing the table."""

from __future__ import annotations

import argparse

from bench.decoding import Bench
from bench.peers.meter import Meter
from bench.peers.worker import arguments_of, versions_of
from jfbatch import __version__
from jfbatch.engine.engine import EngineConfig
from jfbatch.engine.model import set_threads


def run(arguments: argparse.Namespace) -> None:
    """One measured run over all rows at once, after a short one that warms up."""
    set_threads(arguments.threads)
    bench = Bench.load(arguments.model, arguments.dtype)
    settings = EngineConfig(batch_size=arguments.rows, context_length=bench.loaded.context_length)
    meter = Meter()
    measured = bench.run(settings, arguments.rows)
    versions = {"jfbatch": __version__, **versions_of("torch", "transformers")}
    meter.stop(measured.texts, measured.output_tokens, versions).write(arguments.result)


if __name__ == "__main__":
    run(arguments_of(__doc__))
