"""Statistics of values: their length, and what the output projection makes of them."""

from __future__ import annotations

from torch import Tensor


def norms(v: Tensor) -> Tensor:
    """|v_j|_2 of v [HK, N, D] -> [HK, N]."""
    return v.norm(dim=-1)


def projected_norms(v: Tensor, w_o: Tensor, query_heads: int) -> Tensor:
    """mean over the group of |W_O^(h) v_j|_1: v [HK, N, D], w_o [D_model, HQ * D] -> [HK, N]."""
    kv_heads, _, width = v.shape
    blocks = w_o.unflatten(1, (query_heads, width))  # [D_model, HQ, D]
    group = query_heads // kv_heads
    rows = []
    for h in range(kv_heads):
        norms = [
            (v[h] @ blocks[:, h * group + g].T).abs().sum(-1)  # [N]
            for g in range(group)
        ]
        rows.append(sum(norms) / group)
    return rows[0].new_tensor([row.tolist() for row in rows])
