"""A sparse cache has no gradients: forwards that record them run, backward passes are refused.

The kernels would cut the graph in silence, and every gradient but those behind the attention would
be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def needs_gradients(*tensors: Tensor) -> bool:
    """Whether autograd would record what is computed from these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def refuse_backward(out: Tensor, source: Tensor) -> Tensor:
    """`out`, computed from `source` without autograd; a backward pass is a ValueError."""
    refused: Tensor = _NoBackward.apply(out, source)
    return refused


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, source: Tensor) -> Tensor:
        """The values of `out`."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Raises ValueError."""
        raise ValueError(
            "expected no backward pass through a SparseCache, which keeps no gradients, got one: "
            "train with use_cache=False"
        )
