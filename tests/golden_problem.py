"""The worked example of the goldens: one layer, 2 query heads on 1 KV head, 8 tokens and a 9th.

Keys and queries stand after RoPE, the softmax scale is 1/2, everything is float64.
"""

from __future__ import annotations

import torch
from reference.attention import causal

# fmt: off
_K = [[0, 0, 1, 2], [-2, -2, 2, 2], [-1, -1, 2, 0], [-1, 2, -1, 0], [1, 0, -2, -2], [2, 1, 2, 0],
      [2, -1, 0, 1], [-2, -1, -2, 0], [2, -2, -1, 0]]
_V = [[-2, 1, -2, -1], [0, 0, -2, 2], [1, 2, -2, 1], [-1, 0, 2, -1], [1, -2, -1, 2], [0, 0, -1, -2],
      [0, 1, 0, 1], [-1, 1, 1, 2], [0, -2, 1, 0]]
_Q = [
    [[0, 1, 1, 2], [-1, 0, 2, -1], [-1, 2, 0, 0], [1, 0, 2, 1], [-2, -2, 0, 2], [-2, 1, 1, 1],
     [2, -2, 0, 2], [-1, -2, 0, -2], [-1, 2, 1, 2]],
    [[1, -1, 2, -2], [2, 1, -1, 1], [0, 2, 2, -1], [0, -1, 1, 1], [2, 2, 2, 2], [2, -2, -2, 0],
     [-1, 2, 1, 0], [0, 0, 2, -2], [0, 1, 0, 2]],
]
# fmt: on
SCALE = 0.5
KEYS = torch.tensor(_K, dtype=torch.float64)  # [9, D]
VALUES = torch.tensor(_V, dtype=torch.float64)  # [9, D]
QUERIES = torch.tensor(_Q, dtype=torch.float64)  # [HQ, 9, D]
PROMPT = KEYS[:8]
ROWS = causal(QUERIES[:, :8], PROMPT[None], SCALE)  # [HQ, 8, 8]
LOGITS = (SCALE * QUERIES[:, :8] @ PROMPT.T).masked_fill(ROWS == 0, -torch.inf)


def scores(values, first=0):
    """position -> score, from a row of scores that starts at position `first`."""
    return {j: float(s) for j, s in enumerate(values, start=first)}
