"""ExpectedAttention: what future queries would give to a key, if they were Gaussian.

Queries before RoPE have mean mu and population covariance Sigma; turned to the positions to come,
on average over `future` of them, log E exp(q k / sqrt D) is linear plus quadratic in the key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.attention import frequencies


def moments(q: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] and population covariance [D, D] of the queries q [M, D]."""
    mean = q.mean(0)
    centred = q - mean
    return mean, centred.T @ centred / len(q)


def mean_rotation(width: int, theta: float, start: int, future: int) -> Tensor:
    """Average rotate-half RoPE matrix [D, D] over positions start .. start + future - 1."""
    half = width // 2
    angle = torch.arange(start, start + future)[:, None] * frequencies(half, theta)
    cos, sin = torch.diag(angle.cos().mean(0)), torch.diag(angle.sin().mean(0))
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)], 0)


def log_expectation(k: Tensor, mean: Tensor, covariance: Tensor | None, scale: float) -> Tensor:
    """z_j = k_j mu / sqrt D + k_j Sigma k_j / (2 D) of k [N, D] -> [N]; scale is 1 / sqrt D."""
    z = scale * k @ mean
    if covariance is not None:
        z = z + scale**2 / 2 * torch.einsum("nd,de,ne->n", k, covariance, k)
    return z


def probability(
    k: Tensor,
    queries: Tensor,
    first: int,
    scale: float,
    rotation: Tensor | None,
    covariance: bool = True,
) -> Tensor:
    """Group mean of softmax(z) over k [N, D] from `first` on; keys before it get 0.

    queries [G, M, D] before RoPE; rotation [D, D] or None.
    """
    total = torch.zeros(len(k), dtype=k.dtype)
    if queries.shape[1] == 0 or first >= len(k):
        return total
    for q in queries:
        mean, spread = moments(q)
        if rotation is not None:
            mean, spread = rotation @ mean, rotation @ spread @ rotation.T
        z = log_expectation(k[first:], mean, spread if covariance else None, scale)
        total[first:] += z.softmax(0) / len(queries)
    return total
