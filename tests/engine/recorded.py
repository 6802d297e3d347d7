"""Recorded work on a CPU: what a CUDA graph does, for tests.

Every operation is written down with the very tensors that it read and wrote, and a replay does the same
operations on the same tensors. So what was decided in Python, or read from another tensor, stays as it
was when recorded; what would wait for the device cannot be recorded, as on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2")
_TORCH = "called a synchronizing CUDA operation"  # what torch says there


class _Watch(TorchDispatchMode):
    def __init__(self, seen: Callable[..., None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITING or (name == "index" and _by_truth(args[1])):
            raise RuntimeError(f"{_TORCH}: {name}")
        output = function(*args, **(kwargs or {}))
        self.seen(function, args, kwargs or {}, output)
        return output


def _by_truth(indices: Iterable[Any]) -> bool:
    """Whether an index is a mask, whose number of elements the host must know."""
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


class RecordedWork:
    """The operations, in their order."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.released = False

    def seen(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.operations.append((function, args, kwargs, output))

    def replay(self) -> None:
        assert not self.released
        self.replays += 1
        for function, args, kwargs, output in self.operations:
            new = function(*args, **kwargs)
            for old_part, new_part in zip(tree_leaves(output), tree_leaves(new), strict=True):
                same = isinstance(old_part, Tensor) and old_part.data_ptr() == new_part.data_ptr()
                if isinstance(old_part, Tensor) and not same:
                    old_part.copy_(new_part)


class WorkRecorder:
    """A Recorder for the CPU. `faults` are raised by the next recordings, one each; None raises nothing."""

    def __init__(self, faults: Iterable[Exception | None] = ()) -> None:
        self.faults = list(faults)
        self.made: list[RecordedWork] = []
        self.rehearsals = 0

    def rehearse(self, work: Callable[[], None]) -> None:
        self.rehearsals += 1
        with _Watch(lambda *_anything: None):
            work()

    def record(self, work: Callable[[], None]) -> RecordedWork:
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        made = RecordedWork()
        with _Watch(made.seen):
            work()
        self.made.append(made)
        return made

    def release(self, graphs: Iterable[Any]) -> None:
        for graph in graphs:
            graph.released = True

    @property
    def live(self) -> list[RecordedWork]:
        return [made for made in self.made if not made.released]
