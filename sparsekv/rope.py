"""Rotating queries and keys that are already rotated: R_{p+delta} k = R_delta (R_p k).

StreamingLLM gives cached tokens contiguous positions. Keys are cached after RoPE at their true
position, and RoPE scores depend on distances only; the recent keys are contiguous anyway, so it is
enough to move the sinks closer by the number of tokens evicted between them and the recents.
ExpectedAttention asks for queries before RoPE, R_{-p} q, and for the mean of R over positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotate-half RoPE of a model.

    inv_freq: fp32 [R/2] radians a position; the first R dims of a head are rotated, the others left
    alone.
    """

    inv_freq: Tensor
    _device: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> Tensor:
        """inv_freq on `device`, copied there once: a captured step cannot copy from the host."""
        if device not in self._device:
            self._device[device] = self.inv_freq.to(device)
        return self._device[device]

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., D] moved by `positions`, int or fp32, which broadcast over x.shape[:-1]; fp32."""
        angle = positions.float()[..., None] * self.on(x.device)
        return rotate_half(x, angle.cos(), angle.sin())

    def mean(self, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Mean cosine and sine over positions first .. first + count - 1: int [B] -> [B, R/2]."""
        positions = first[:, None] + torch.arange(count, device=first.device)
        angle = positions.float()[..., None] * self.on(first.device)  # [B, count, R/2]
        return angle.cos().mean(1), angle.sin().mean(1)


@dataclass(frozen=True)
class SinkShift:
    """sinks: keys to move, the first slots of every head. rotary: by what."""

    sinks: int
    rotary: Rotary

    def rotate(self, k: Tensor, delta: Tensor) -> Tensor:
        """k [B, HK, S, D] moved by delta int [B] positions, in k's dtype; the maths is fp32."""
        return self.rotary.turn(k, delta[:, None, None]).to(k.dtype)


@torch.no_grad()
def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] with dims i and i + R/2 turned by the angles of cos, sin [..., R/2]; fp32."""
    half = cos.shape[-1]
    left, right = x[..., :half], x[..., half : 2 * half]
    # Written in place: beside it only a temporary of half its size.
    out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    torch.mul(left, cos, out=out[..., :half]).sub_(right * sin)
    torch.mul(right, cos, out=out[..., half : 2 * half]).add_(left * sin)
    return out
