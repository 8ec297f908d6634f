"""Statistics of keys alone. k [N, D] of one KV head, after RoPE, only what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.noise import uniform


def norms(k: Tensor) -> Tensor:
    """|k_j|_2, [N]; in fp32, as any score: RoPE keeps norms, so equal tokens nearly tie."""
    return torch.linalg.vector_norm(k.float(), dim=-1)


def anchor(k: Tensor) -> Tensor:
    """Mean of the normalised keys, itself not normalised, [D]."""
    return (k / k.norm(dim=-1, keepdim=True)).mean(0)


def anchor_cosines(k: Tensor) -> Tensor:
    """KeyDiff: cos(k_j, anchor), [N]; the least similar keys stay."""
    return torch.nn.functional.cosine_similarity(k, anchor(k)[None], dim=-1)


def redundancy(k: Tensor, threshold: float) -> Tensor:
    """R-KV: softmax over keys of the mean cosine of the others with it, [N].

    Each row's last neighbour above the threshold is excused: the newest of a cluster stays. A row
    without one excuses nobody.
    """
    unit = k / k.norm(dim=-1, keepdim=True)
    cosine = unit @ unit.T
    cosine.fill_diagonal_(0.0)
    for i, row in enumerate(cosine.clone()):
        near = (row > threshold).nonzero().flatten()
        if len(near):
            cosine[i, near[-1]] = 0.0
    return cosine.mean(0).softmax(0)


def random_scores(seed: int, layer: int, head: int, positions: list[int]) -> list[float]:
    """One number in (0, 1) a position."""
    return uniform(seed, layer, head, positions).tolist()
