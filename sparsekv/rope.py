"""Rotating keys that are already rotated: R_{p+delta} k = R_delta (R_p k).

StreamingLLM gives cached tokens contiguous positions. Keys are cached after RoPE at their true
position, and RoPE scores depend on distances only; the recent keys are contiguous anyway, so it is
enough to move the sinks closer by the number of tokens evicted between them and the recents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class SinkShift:
    """Rotate-half RoPE of a model.

    sinks: keys to move, the first slots of every head. inv_freq: fp32 [R/2] radians a position; the
    first R dims of a head are rotated, the others left alone.
    """

    sinks: int
    inv_freq: Tensor
    _device: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Tensor:
        """inv_freq on `device`, copied there once: a captured step cannot copy from the host."""
        if device not in self._device:
            self._device[device] = self.inv_freq.to(device)
        return self._device[device]

    def rotate(self, k: Tensor, delta: Tensor) -> Tensor:
        """k [B, HK, S, D] moved by delta int [B] positions, in k's dtype; the maths is fp32."""
        half = len(self.inv_freq)
        angle = delta.float()[:, None] * self.on(k.device)  # [B, R/2]
        cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
        left, right, rest = k.float().tensor_split([half, 2 * half], dim=-1)
        turned = (left * cos - right * sin, right * cos + left * sin, rest)
        return torch.cat(turned, dim=-1).to(k.dtype)
