"""Small copies between host and device that wait for nothing.

An ordinary copy to a CUDA device waits until the device has done all that it was given, which would keep the
host from being ahead of it. Copies from and to page-locked memory only take their place in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` (numbers, or lists of them) as a tensor on the device, in the order of its stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def copied_to(device: torch.device, array: NDArray[np.int32]) -> Tensor:
    """A copy of `array` on the device, in the order of its stream."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Reading:
    """A tensor on its way to the host: the copy begins where this is made and is waited for in `wait`.

    What the device is given in between, it does meanwhile; the wait is not for that.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.cpu()

    def wait(self) -> NDArray[np.int64]:
        """The numbers, once the device has come this far."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: NDArray[np.int64] = self._host.numpy()
        return numbers
