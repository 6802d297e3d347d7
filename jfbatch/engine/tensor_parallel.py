"""A model that is too large for one device: its matrices cut over several, by transformers' own plan.

One process, the leader, runs the engine and decides everything. The others, its followers, hold their part
of the weights and of the keys and values, and repeat each step and each change of the pool as the leader
announces it; so nothing that depends on time or chance can tell them apart.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from jfbatch.engine.kv_cache import SlotPool
from jfbatch.engine.model import LoadedModel, check_tensor_parallel, load_model, set_threads
from jfbatch.engine.runner import KV_DTYPES, LateTokens, Runner, Segment
from jfbatch.errors import ModelError, UsageError

_END, _FORWARD, _RESIZE, _COPY, _ERASE, _CLEAR = range(6)
_PATIENCE = 10.0  # seconds that the leader has to notice by itself that a follower is gone
_FOREVER = timedelta(days=365)  # followers wait as long as the leader has nothing to compute


@dataclass(frozen=True)
class TensorParallelOrder:
    """What every process of the group loads; the arguments of `load_model`, and its CPU threads."""

    count: int
    name: str
    device: str
    dtype: str
    kv_dtype: str
    cache_dir: str
    trust_remote_code: bool
    threads: int

    def load(self) -> LoadedModel:
        """This process's part of the model. Raises ModelError."""
        set_threads(self.threads)
        return load_model(
            self.name,
            self.device,
            self.dtype,
            self.cache_dir,
            self.trust_remote_code,
            tensor_parallel=self.count,
        )


class Channel:
    """Lists of numbers from the leader to all followers, over the CPU whatever the device."""

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=_FOREVER)

    def send(self, *numbers: int) -> None:
        """Announce something. Raises RuntimeError where a follower is gone."""
        self._broadcast(torch.tensor([len(numbers)]))
        self._broadcast(torch.tensor(numbers))

    def receive(self) -> list[int]:
        """What the leader announces next."""
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length)
        numbers = torch.zeros(int(length), dtype=torch.int64)
        self._broadcast(numbers)
        received: list[int] = numbers.tolist()
        return received

    def _broadcast(self, tensor: Tensor) -> None:
        distributed.broadcast(tensor, src=0, group=self._group)


def encode(segments: Sequence[Segment]) -> list[int]:
    """A step as numbers."""
    numbers = []
    for segment in segments:
        head = (segment.slot, segment.start, segment.prompt, len(segment.token_ids), len(segment.logits))
        numbers += [*head, *segment.token_ids, *segment.logits]
    return numbers


def decode(numbers: Sequence[int]) -> list[Segment]:
    """The step that `encode` made numbers of."""
    segments = []
    at = 0
    while at < len(numbers):
        slot, start, prompt, tokens, logits = numbers[at : at + 5]
        middle, end = at + 5 + tokens, at + 5 + tokens + logits
        segments.append(Segment(slot, start, numbers[at + 5 : middle], numbers[middle:end], prompt))
        at = end
    return segments


class LeadingPool(SlotPool):
    """A pool whose changes the followers repeat."""

    channel: Channel | None = None

    def _announce(self, *numbers: int) -> None:
        if self.channel is not None:
            self.channel.send(*numbers)

    def resize(self, slots: int, length: int) -> None:
        """See SlotPool."""
        self._announce(_RESIZE, slots, length)
        super().resize(slots, length)

    def copy(self, source: int, target: int, length: int) -> None:
        """See SlotPool."""
        self._announce(_COPY, source, target, length)
        super().copy(source, target, length)

    def erase(self, slot: int) -> None:
        """See SlotPool."""
        self._announce(_ERASE, slot)
        super().erase(slot)

    def clear(self) -> None:
        """See SlotPool."""
        self._announce(_CLEAR)
        super().clear()


class LeadingRunner(Runner):
    """A runner whose steps the followers repeat. What goes wrong in one process ends the run in all.

    Its steps are not replayed as graphs: one that could not be recorded everywhere would leave the others
    waiting.
    """

    pool_type = LeadingPool

    def __init__(self, model: Any, kv_dtype: torch.dtype | None) -> None:
        self.channel: Channel | None = None  # while the model is proved, all processes do the same anyway
        super().__init__(model, kv_dtype, pack=False, static=False)

    def lead(self, channel: Channel) -> None:
        """From now on followers hear of everything."""
        assert isinstance(self.pool, LeadingPool)
        self.channel = self.pool.channel = channel

    def forward(self, segments: Sequence[Segment], late: LateTokens | None = None) -> Tensor:
        """See Runner. Raises ModelError for whatever goes wrong: the others wait in the middle of a step."""
        if self.channel is None:
            return super().forward(segments, late)
        assert late is None, "the followers could not know them"
        try:
            self.channel.send(_FORWARD, *encode(segments))
            return super().forward(segments)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"--tensor-parallel: a step failed ({reason}); what is finished is kept, and the same "
                "command continues, with a smaller --batch-size or --kv-memory where memory ran out"
            ) from error


@torch.inference_mode()
def follow(order: TensorParallelOrder) -> None:
    """Repeat what the leader announces, until it says that this is the end."""
    runner = Runner(order.load().model, KV_DTYPES[order.kv_dtype], pack=False, static=False)
    channel = Channel()
    changes: dict[int, Callable[..., None]] = {
        _RESIZE: runner.pool.resize,
        _COPY: runner.pool.copy,
        _ERASE: runner.pool.erase,
        _CLEAR: runner.pool.clear,
    }
    while (announced := channel.receive())[0] != _END:
        operation, *numbers = announced
        if operation == _FORWARD:
            runner.forward(decode(numbers))
        else:
            changes[operation](*numbers)
    distributed.destroy_process_group()


class TensorParallelGroup:
    """The leader's side: starts the followers, loads, and ends them; a context manager."""

    def __init__(self, order: TensorParallelOrder) -> None:
        if "RANK" in os.environ:
            raise UsageError(
                "--tensor-parallel starts its processes itself: run jfbatch without torchrun (RANK is set)"
            )
        if order.device not in ("auto", "cuda", "cpu") or (
            order.device == "cpu" and torch.cuda.is_available()
        ):
            raise UsageError("--tensor-parallel takes the first devices there are: leave out --device")
        if torch.cuda.is_available() and torch.cuda.device_count() < order.count:
            raise UsageError(
                f"--tensor-parallel {order.count}: there are {torch.cuda.device_count()} CUDA devices"
            )
        check_tensor_parallel(order.name, order.cache_dir, order.count, order.trust_remote_code)
        self._order = order
        self._ending = False
        self._channel: Channel | None = None
        self._followers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> TensorParallelGroup:
        common = {"WORLD_SIZE": str(self._order.count), "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(_free_port())
        for rank in range(1, self._order.count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            follower = subprocess.Popen(
                [sys.executable, "-m", "jfbatch.engine.follower"],
                env={**os.environ, **common, **place},
                stdin=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C on the terminal is for the leader
            )
            assert follower.stdin is not None
            follower.stdin.write(json.dumps(asdict(self._order)).encode() + b"\n")
            follower.stdin.flush()
            self._followers.append(follower)
            threading.Thread(target=self._watch, args=(rank, follower), daemon=True).start()
        os.environ.update({**common, "RANK": "0", "LOCAL_RANK": "0"})
        return self

    def load(self) -> tuple[LoadedModel, Runner]:
        """The model, and the runner that leads. Raises ModelError."""
        loaded = self._order.load()
        runner = LeadingRunner(loaded.model, KV_DTYPES[self._order.kv_dtype])
        self._channel = Channel()
        runner.lead(self._channel)
        return loaded, runner

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending = True
        in_order = self._channel is not None and value is None
        if in_order and self._channel is not None:
            self._channel.send(_END)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        for follower in self._followers:
            assert follower.stdin is not None
            if not in_order:
                follower.kill()  # it may wait in the middle of a step
            follower.wait()
            follower.stdin.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _watch(self, rank: int, follower: subprocess.Popen[bytes]) -> None:
        """Ends this process where a follower is gone and the leader waits for it in vain."""
        code = follower.wait()
        if self._ending:
            return
        time.sleep(_PATIENCE)
        if not self._ending:
            told = (
                f"jfbatch: process {rank} of --tensor-parallel ended with code {code}: what is finished is "
                "kept, and the same command continues\n"
            )
            os.write(2, told.encode())
            os._exit(ModelError.exit_code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
