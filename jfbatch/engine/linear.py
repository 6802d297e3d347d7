"""Linear layers with weights packed once for the CPU.

oneDNN's packed weights beat F.linear by a quarter at 64 rows. The operators are private to torch,
so a layer they cannot take stays an ordinary nn.Linear, with the same results.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH_HINT = 64  # tokens per step that the packed layout is tuned for
# One row takes another way through oneDNN, with other roundings, and two or three take longer than four.
FEWEST = 4


class PackedLinear(nn.Module):
    """y = x W^T + b with W in oneDNN's own layout. `weight` is a meta tensor: shape and dtype, no data."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), BATCH_HINT)

    def forward(self, inputs: Tensor, added: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], in the dtype of the weights; `added` [..., out] is added."""
        if inputs.numel() == 0:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        output: Tensor
        rows = inputs.numel() // self.in_features
        if rows < FEWEST:
            output = self.forward(_in_company(inputs), None if added is None else _in_company(added))
            return output[:rows].view(*inputs.shape[:-1], self.out_features)
        if added is None:
            output = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        else:
            output = torch.ops.mkldnn._linear_pointwise.binary(inputs, added, self._packed, self.bias, "add")
        return output


def _in_company(rows: Tensor) -> Tensor:
    """[..., width], less than FEWEST -> [FEWEST, width], with the first row again and again after them."""
    flat = rows.reshape(-1, rows.shape[-1])
    return torch.cat([flat, flat[:1].expand(FEWEST - len(flat), -1)])


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN takes packed weights of this dtype."""
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_linears(model: nn.Module) -> int:
    """Replace every plain nn.Linear on the CPU by its packed form, in place; returns how many.

    Subclasses of nn.Linear keep their own forward and are left alone. A weight that another module
    shares (a tied embedding) stays alive through that module.
    """
    packed: dict[int, PackedLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.device.type != "cpu":
                continue
            if not can_pack(child.weight.dtype):
                continue
            if id(child) not in packed:
                packed[id(child)] = PackedLinear(child)
            setattr(parent, name, packed[id(child)])
    return len(packed)
