"""Append: scatter new (k, v, position, score) records into the slots of a paged cache, in place.

    t = index[b,h,i] or i,  s = slots[b,h,i],  page = block_table[b,h,s // P],  o = s % P:
    k_pages[page,o] = k[b,h,t]; v_pages likewise; positions[page,o] = token_positions[b,h,i];
    scores[page,o] = token_scores[b,h,i] or 0.   s = -1 writes nothing.

Slots of one head must be distinct, so that no two programs write the same place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def append_kv_reference(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    slots: Tensor,
    token_positions: Tensor,
    *,
    index: Tensor | None = None,
    token_scores: Tensor | None = None,
) -> None:
    """The definition, and the CPU path."""
    P = k_pages.shape[1]
    b, h, i = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[b, h, i].long()
    page, offset = block_table[b, h, slot // P].long(), slot % P
    t = i if index is None else index[b, h, i].long()
    k_pages[page, offset] = k[b, h, t].to(k_pages.dtype)
    v_pages[page, offset] = v[b, h, t].to(v_pages.dtype)
    positions[page, offset] = token_positions[b, h, i].to(positions.dtype)
    new = torch.zeros_like(slot) if token_scores is None else token_scores[b, h, i]
    scores[page, offset] = new.to(scores.dtype)


def _check(k: Tensor, v: Tensor, k_pages: Tensor, slots: Tensor, index: Tensor | None) -> None:
    if k.dim() != 4 or k.shape != v.shape or k.shape[-1] != k_pages.shape[-1]:
        raise ValueError(
            f"expected k and v [B,HK,T,{k_pages.shape[-1]}], got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if slots.dim() != 3 or slots.shape[:2] != k.shape[:2]:
        raise ValueError(f"expected slots [{k.shape[0]},{k.shape[1]},n], got {tuple(slots.shape)}")
    if index is None and slots.shape[2] != k.shape[2]:
        raise ValueError(
            f"expected {k.shape[2]} slots per head without an index, got {slots.shape[2]}"
        )


def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    slots: Tensor,
    token_positions: Tensor,
    *,
    index: Tensor | None = None,
    token_scores: Tensor | None = None,
) -> None:
    """Writes tokens into logical slots of their heads, in place.

    k, v [B,HK,T,D] with stride(-1) == 1; k_pages, v_pages [N,P,D]; positions int32 [N,P]; scores
    fp32 [N,P]; block_table int32 [B,HK,maxP]; slots, token_positions int32 [B,HK,n] (slot -1:
    skip); index int32 [B,HK,n] source token (None: 0..n-1, then n == T); token_scores fp32
    [B,HK,n] or None (score 0).
    """
    _check(k, v, k_pages, slots, index)
    append_kv_reference(
        k,
        v,
        k_pages,
        v_pages,
        positions,
        scores,
        block_table,
        slots,
        token_positions,
        index=index,
        token_scores=token_scores,
    )
