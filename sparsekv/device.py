"""The device that kernels are launched on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one of this layer."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
