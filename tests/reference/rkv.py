"""R-KV: importance to the last queries against redundancy among the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.keys import redundancy
from reference.votes import pooled


def importance(q: Tensor, k: Tensor, window: int, scale: float) -> Tensor:
    """I_j [N - window]: mean over rows of softmax_j of the largest logit in the group.

    q [G, R, D] the last queries of one group, k [N, D]; the last `window` keys take no part.
    """
    logits = scale * torch.einsum("grd,nd->grn", q, k[: len(k) - window]).amax(0)
    return logits.softmax(-1).mean(0)


def ranking(
    q: Tensor, k: Tensor, window: int, scale: float, kernel: int, similarity: float, mix: float
) -> Tensor:
    """Z_j [N - window] = mix * maxpool(I) - (1 - mix) * R."""
    votes = pooled(importance(q, k, window, scale).tolist(), "max", kernel)
    apart = redundancy(k, similarity)[: len(k) - window]
    return mix * apart.new_tensor(votes) - (1 - mix) * apart
