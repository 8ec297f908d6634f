"""Softmax over what is kept, rotations, and what a quantised cache gives back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.types import Head


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """x [HK, ...] for each of the HQ query heads of q [HQ, ...]."""
    return x.repeat_interleave(len(q) // len(x), 0)


def held(heads: list[Head], seen: int) -> Tensor:
    """bool [HK, seen]: the positions that each head keeps."""
    kept = torch.zeros(len(heads), seen, dtype=torch.bool)
    for row, head in zip(kept, heads, strict=True):
        row[list(head)] = True
    return kept


def masked_logits(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Logits of q [HQ, R, D] on k [HK, N, D], -inf where visible [HK, R, N] is False."""
    logits = scale * q @ repeated(k, q).transpose(1, 2)
    return logits.masked_fill(~repeated(visible, q), -math.inf)


def softmax_rows(logits: Tensor) -> Tensor:
    """softmax over the last axis; a query that sees no key has no vote."""
    return logits.softmax(-1).nan_to_num(0.0)


def causal(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Probabilities [HQ, T, T] of a prompt whose keys are all kept."""
    visible = torch.ones(len(k), q.shape[1], k.shape[1], dtype=torch.bool).tril()
    return softmax_rows(masked_logits(q, k, visible, scale))


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate-half RoPE of x [H, N, D] by positions [N]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * frequencies(half, theta)
    left, right = x[..., :half], x[..., half:]
    turned = (left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin())
    return torch.cat(turned, -1)


def frequencies(half: int, theta: float) -> Tensor:
    """Angle a position of each of the D / 2 planes."""
    return theta ** (-torch.arange(half, dtype=torch.float64) / half)


def rounded(x: Tensor, kv_dtype: str) -> Tensor:
    """x [..., D] as a cache of that format gives it back: largest value to the format's largest."""
    x = x.float()
    floats = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    if kv_dtype in floats:
        limit = torch.finfo(floats[kv_dtype]).max
    else:
        limit = {"int8": 127.0, "int4": 7.0}[kv_dtype]
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, limit) / limit
    steps = x / scale
    steps = steps.to(floats[kv_dtype]).float() if kv_dtype in floats else torch.round(steps)
    return (steps * scale).double()
