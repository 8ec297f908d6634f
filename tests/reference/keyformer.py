"""Keyformer: softmax of logits with Gumbel noise, at a temperature that rises while decoding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from reference.noise import gumbel


def perturbed(logits: Tensor, noise: Tensor, tau: float) -> Tensor:
    """softmax((x + zeta) / tau) of logits [HQ, R, N]; masked entries stay masked."""
    return ((logits + noise) / tau).softmax(-1).nan_to_num(0.0)


def temperature(start: float, end: float, steps: int, iteration: int) -> float:
    """tau after `iteration` decode steps; 0 in the prompt."""
    return min(end, start + iteration * (end - start) / steps)


def gumbel_noise(seed: int, layer: int, heads: int, at: list[int], seen: int) -> Tensor:
    """zeta [HQ, R, N] of queries at positions `at` on keys 0 .. seen - 1, by position."""
    h, i, j = np.ix_(range(heads), at, range(seen))
    return torch.from_numpy(gumbel(seed, layer, h, i, j))
