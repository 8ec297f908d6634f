"""Compaction by hole filling: keep exactly the kept slots of a head, with as few moves as possible.

With n = cache_seqlens, keep restricted to slots < n and new = sum(keep):

    sources      kept slots    >= new, in ascending order,
    destinations evicted slots <  new, in ascending order.

Both lists have the same length; the i-th source record (k, v, position, score) moves into the i-th
destination. Sources and destinations are disjoint and each is touched once, so the moves need no
order and no second buffer. The order of slots inside a head is lost on purpose: attention does not
depend on it, and windows use `positions`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compact_kv_reference(
    keep: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
) -> Tensor:
    """The definition, and the CPU path."""
    P = k_pages.shape[1]
    slot = torch.arange(keep.shape[-1], device=keep.device)
    valid = slot < cache_seqlens[..., None]  # [B, HK, S]
    keep = keep & valid
    new = keep.sum(-1, dtype=torch.int32)
    inside = slot < new[..., None]
    # nonzero is ordered by (row, head, slot) and both masks have equal counts per head: ranks match
    b, h, src = (keep & ~inside).nonzero(as_tuple=True)
    dst = (~keep & inside).nonzero(as_tuple=True)[2]
    src_page, dst_page = block_table[b, h, src // P].long(), block_table[b, h, dst // P].long()
    for pages in (k_pages, v_pages, positions, scores):
        pages[dst_page, dst % P] = pages[src_page, src % P]
    return new


def _check(keep: Tensor, k_pages: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> None:
    if keep.dim() != 3 or keep.dtype != torch.bool or keep.shape[:2] != cache_seqlens.shape:
        raise ValueError(
            f"expected keep bool [{','.join(map(str, cache_seqlens.shape))},S], "
            f"got {keep.dtype} {tuple(keep.shape)}"
        )
    if block_table.shape[:2] != cache_seqlens.shape:
        raise ValueError(
            f"expected block_table [B,HK,maxP] with [B,HK] = {tuple(cache_seqlens.shape)}, "
            f"got {tuple(block_table.shape)}"
        )


def compact_kv(
    keep: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
) -> Tensor:
    """Moves the kept records of every head into its first slots, in place; returns the new lengths.

    keep bool [B,HK,S] with S >= every length (entries beyond a length are ignored); k_pages,
    v_pages [N,P,D]; positions int32 [N,P]; scores fp32 [N,P]; block_table int32 [B,HK,maxP];
    cache_seqlens int32 [B,HK]. Returns new_seqlens int32 [B,HK]; cache_seqlens is not modified.
    Nothing syncs with the host on a GPU.
    """
    _check(keep, k_pages, block_table, cache_seqlens)
    return compact_kv_reference(
        keep, k_pages, v_pages, positions, scores, block_table, cache_seqlens
    )
