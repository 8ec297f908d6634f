"""Quest: pages whose channel-wise key ranges allow the largest logits are attended."""

from __future__ import annotations

import torch
from torch import Tensor


def page_bounds(q: Tensor, k: Tensor, page: int) -> Tensor:
    """U of every page of `page` keys: q [D], k [N, D] -> [ceil(N / page)], at least each q k_j."""
    parts = k.split(page)
    low = torch.stack([part.amin(0) for part in parts])
    high = torch.stack([part.amax(0) for part in parts])
    return torch.maximum(q * low, q * high).sum(-1)


def select_pages(bounds: Tensor, count: int) -> list[int]:
    """Pages to attend, ascending: the first, the last, and the best others; ties to the newer.

    bounds [G, P]: the largest of the group counts.
    """
    best = bounds.amax(0).tolist()
    ends = {0, len(best) - 1}
    others = sorted(set(range(len(best))) - ends, key=lambda p: (-best[p], -p))
    return sorted(ends | set(others[: max(count - len(ends), 0)]))


def attended(q: Tensor, k: Tensor, positions: list[int], page: int, tokens: int) -> list[int]:
    """Positions that the step attends: q [G, D] of a KV head, k [N, D] of its kept `positions`."""
    if len(positions) <= tokens:
        return positions
    bounds = torch.stack([page_bounds(row, k, page) for row in q])
    pages = select_pages(bounds, tokens // page)
    return [j for p in pages for j in positions[p * page : (p + 1) * page]]
