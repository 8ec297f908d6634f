"""Statistics of attention columns: sums, maxima and low counts of explicit probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.attention import held
from reference.types import Head


def grouped(x: Tensor, kv_heads: int, how: str) -> Tensor:
    """x [HQ, N], reduced over the query heads of each KV head (or of the layer) -> [HK, N]."""
    if how == "layer_mean":
        return x.mean(0).expand(kv_heads, -1)
    groups = x.unflatten(0, (kv_heads, -1))
    return {"mean": groups.mean(1), "sum": groups.sum(1), "max": groups.amax(1)}[how]


def column_sums(probabilities: Tensor, kv_heads: int, group: str) -> Tensor:
    """Sum over query rows, then over the group: [HQ, R, N] -> [HK, N]."""
    return grouped(probabilities.sum(1), kv_heads, group)


def column_maxima(probabilities: Tensor, kv_heads: int) -> Tensor:
    """Largest probability over query rows and group: [HQ, R, N] -> [HK, N]."""
    return grouped(probabilities.amax(1), kv_heads, "max")


def low_counts(probabilities: Tensor, visible: Tensor, kv_heads: int, group: str) -> Tensor:
    """Scissorhands: in how many rows a visible key got less than an even share.

    probabilities [HQ, R, N], visible bool [HQ, R, N] -> [HK, N]; row i's share is 1 / t_i with t_i
    the keys that it sees.
    """
    share = 1.0 / visible.sum(-1, keepdim=True).clamp_min(1)
    # An even share is not a low one, and float64 is not to decide that of 1/3 against 1/3.
    low = (probabilities < share * (1 - 1e-9)) & visible
    return grouped(low.double().sum(1), kv_heads, group)


def pooled(values: list[float], mode: str, kernel: int) -> list[float]:
    """Max or mean over `kernel` neighbours; beyond the ends are zeros that an average counts."""
    if mode == "none":
        return values
    reach = kernel // 2
    around = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    return [max(near) if mode == "max" else sum(near) / kernel for near in around]


def pool_scores(scores: Head, positions: list[int], mode: str, kernel: int) -> Head:
    """The scores at `positions`, ascending, pooled over their neighbours in that list."""
    values = pooled([scores[j] for j in positions], mode, kernel)
    return dict(zip(positions, values, strict=True))


def seen_by(at: list[int], heads: list[Head], seen: int, query_heads: int) -> Tensor:
    """bool [HQ, R, N]: kept keys at or before the queries at positions `at`."""
    position = torch.arange(seen)
    visible = held(heads, seen)[:, None] & (position <= torch.tensor(at)[:, None])
    return visible.repeat_interleave(query_heads // len(heads), 0)


def normalised_sums(probabilities: Tensor) -> Tensor:
    """kvpress' ObservedAttention: column sums by the number of rows that see the key."""
    tokens = probabilities.shape[-1]
    return probabilities.sum(1) / (tokens - torch.arange(tokens))
