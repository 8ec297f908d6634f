"""PyramidInfer's arithmetic: how many tokens each layer sees, and which of them.

The last 1 + R tokens are the tail and stay in every layer; the tokens before it are the context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keep_ratio(layer: int, layers: int, decay: float) -> float:
    """Share of the context that goes on to the next layer: 1 at layer 0, falling towards decay."""
    return (1 - decay) * (math.cos(math.pi * layer / layers) + 1) / 2 + decay


def kept_context(
    context: int, layer: int, layers: int, decay: float, least: int, interval: int
) -> int:
    """Context tokens after `layer`, of `context` before it."""
    ratio = keep_ratio(layer, layers, decay)
    if context <= least or ratio >= 1 or layer % interval:
        return context
    keep = int(context * ratio)
    return keep if keep > least else context


def layer_tokens(
    layers: int, tokens: int, recent: int, decay: float, min_context: int, interval: int = 1
) -> list[int]:
    """Tokens that enter each layer, and what is left after the last: L + 1 counts."""
    context = tokens - 1 - recent
    least, held = min(min_context, context), [tokens]
    for layer in range(layers):
        context = kept_context(context, layer, layers, decay, least, interval)
        held.append(context + 1 + recent)
    return held


def tail_scores(rows: Tensor, distance_weight: float) -> Tensor:
    """Mean over rows [HQ, R, C] of the head mean, later rows weighted up to distance_weight."""
    weight = torch.linspace(1.0, distance_weight, rows.shape[1], dtype=torch.float64)
    return (weight[:, None] * rows.mean(0)).mean(0)


def keep_context(scores: Tensor, keep: int, sinks: int) -> list[int]:
    """Indices of the `keep` best context tokens, ascending; the first `sinks` always."""
    ranking = scores.clone()
    ranking[:sinks] = math.inf
    order = sorted(range(len(ranking)), key=lambda j: (-float(ranking[j]), -j))
    return sorted(order[:keep])
