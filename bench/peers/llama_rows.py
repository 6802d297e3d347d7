"""llama.cpp's server on the rows: eight slots with continuous batching, the schema with each request.

The server is started for this run, so that it remembers no prompt of an earlier one.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import workload
from bench.peers.environments import llama_server
from bench.peers.meter import Meter
from bench.peers.worker import arguments_of

_SLOTS = 8
_CONTEXT = 512  # tokens per slot
_START_SECONDS = 60


def run(arguments: argparse.Namespace) -> None:
    """One measured run over all rows, as many requests at once as there are slots."""
    binary = llama_server(Path(sys.executable))
    port = _free_port()
    threads = str(arguments.threads)
    command = [
        *(str(binary), "-m", arguments.model, "-np", str(_SLOTS), "-c", str(_CONTEXT * _SLOTS)),
        *("-t", threads, "-tb", threads, "-cb", "--host", "127.0.0.1", "--port", str(port)),
        *("-fa", "auto", "--cache-ram", "0"),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(port, server)
        _post(port, {"prompt": "hi", "n_predict": 2})
        meter = Meter([server.pid])
        with ThreadPoolExecutor(_SLOTS) as pool:
            answers = list(
                pool.map(lambda prompt: _post(port, _request(prompt)), workload.prompts(arguments.rows))
            )
        texts = [str(answer["content"]) for answer in answers]
        tokens = sum(int(answer["tokens_predicted"]) for answer in answers)
        meter.stop(texts, tokens, {"llama.cpp": _version(binary)}).write(arguments.result)
    finally:
        server.terminate()
        server.wait()


def _request(prompt: str) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": workload.MAX_TOKENS,
        "temperature": 0.0,
        "top_k": 1,
        "samplers": ["top_k"],
        "cache_prompt": True,
        "seed": 1,
        "json_schema": workload.SCHEMA,
    }


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    latest = time.monotonic() + _START_SECONDS
    while time.monotonic() < latest:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if json.load(answer)["status"] == "ok":
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"llama-server was not ready after {_START_SECONDS} s")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


def _version(binary: Path) -> str:
    found = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=True)
    return (found.stderr or found.stdout).strip().splitlines()[0]


if __name__ == "__main__":
    run(arguments_of(__doc__))
