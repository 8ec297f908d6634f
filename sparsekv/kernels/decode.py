"""Paged decode attention: one query token per row over ragged per-KV-head page tables.

For row b, query head h, KV head g = h // G and the slots j < cache_seqlens[b, g]:

    x_j = softmax_scale * <q[b,h], k_j>,  then c * tanh(x_j / c) with a softcap c,
    visible_j = window is None or q_positions[b] - positions_j < window,
    lse = log(sum_visible exp(x_j) + exp(sink_h)),  p_j = exp(x_j - lse),  out = sum_j p_j v_j.

A head without a visible key gives out = 0, lse = -inf, p = 0 (with a sink too).
"""

from __future__ import annotations

import torch
from torch import Tensor

PROBS = (None, "none", "mean", "max", "sum")


def _gather_pages(pages: Tensor, block_table: Tensor, valid: Tensor) -> Tensor:
    """Dense view of ragged slots: pages [N,P,...] -> [B,HK,S,...], 0 beyond a length."""
    rows = pages[block_table]  # [B, HK, maxP, P, ...]
    rows = rows.flatten(2, 3)[:, :, : valid.shape[-1]]
    mask = valid.view(*valid.shape, *(1,) * (rows.dim() - 3))
    return rows.masked_fill(~mask, 0)


def _reduce_group(p: Tensor, probs: str) -> Tensor:
    """p [B,HK,G,S] -> [B,HQ,S] for "none", else [B,HK,S]."""
    if probs == "none":
        return p.flatten(1, 2)
    if probs == "max":
        return p.amax(2)
    return p.mean(2) if probs == "mean" else p.sum(2)


def paged_decode_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    positions: Tensor | None = None,
    q_positions: Tensor | None = None,
    probs: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The definition, and the CPU path. float64 inputs stay float64, all others compute in fp32."""
    B, HQ, D = q.shape
    HK, capacity = block_table.shape[1], block_table.shape[2] * k_pages.shape[1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    used = int(cache_seqlens.max()) if cache_seqlens.numel() else 0
    table = block_table[:, :, : -(-used // k_pages.shape[1])].long()
    valid = torch.arange(used, device=q.device) < cache_seqlens[..., None]  # [B, HK, S]
    k = _gather_pages(k_pages, table, valid).to(dtype)
    v = _gather_pages(v_pages, table, valid).to(dtype)

    x = torch.einsum("bhgd,bhsd->bhgs", q.view(B, HK, -1, D).to(dtype), k) * softmax_scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if window is not None:
        pos = _gather_pages(positions, table, valid)
        valid = valid & (q_positions[:, None, None] - pos < window)
    x = x.masked_fill(~valid[:, :, None], float("-inf"))
    lse = torch.logsumexp(x, -1)  # [B, HK, G]
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(dtype).view(HK, -1))
        lse = torch.where(lse == float("-inf"), lse, with_sink)
    # an empty row has lse = -inf: exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    p = torch.exp(x - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    out = torch.einsum("bhgs,bhsd->bhgd", p, v).reshape(B, HQ, D).to(q.dtype)
    if probs is None:
        return out, lse.reshape(B, HQ), None
    p = torch.nn.functional.pad(p, (0, capacity - used))
    return out, lse.reshape(B, HQ), _reduce_group(p, probs)


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    window: int | None,
    positions: Tensor | None,
    q_positions: Tensor | None,
    probs: str | None,
) -> None:
    if q.dim() != 3 or k_pages.dim() != 3 or block_table.dim() != 3:
        raise ValueError(
            "expected q [B,HQ,D], k_pages [N,P,D], block_table [B,HK,maxP], got "
            f"{tuple(q.shape)}, {tuple(k_pages.shape)}, {tuple(block_table.shape)}"
        )
    B, HQ, D = q.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[-1] != D:
        raise ValueError(
            f"expected k_pages and v_pages [N,P,{D}], "
            f"got {tuple(k_pages.shape)}, {tuple(v_pages.shape)}"
        )
    HK = block_table.shape[1]
    if block_table.shape[0] != B or HQ % HK or cache_seqlens.shape != (B, HK):
        raise ValueError(
            f"expected block_table [{B},HK,maxP] and cache_seqlens [{B},HK] with HK dividing {HQ}, "
            f"got {tuple(block_table.shape)}, {tuple(cache_seqlens.shape)}"
        )
    if window is not None and (positions is None or q_positions is None):
        raise ValueError("expected positions [N,P] and q_positions [B] with a window, got None")
    if probs not in PROBS:
        raise ValueError(f"expected probs in {PROBS}, got {probs!r}")


def paged_decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    positions: Tensor | None = None,
    q_positions: Tensor | None = None,
    probs: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of one query token per row over its paged cache.

    q [B,HQ,D]; k_pages, v_pages [N,P,D]; block_table int32 [B,HK,maxP]; cache_seqlens int32 [B,HK]
    slots in use (0 is legal); sinks [HQ]; positions int32 [N,P] and q_positions int32 [B] are
    needed with a window only. probs: None, or "none" for per-query-head probabilities over the
    slots, or "mean" / "max" / "sum" over the G query heads of a KV head.

    Returns out [B,HQ,D] in q's dtype, lse fp32 [B,HQ] (natural log, sink included) and the
    probabilities fp32 [B,HQ,maxP*P] ("none") or [B,HK,maxP*P], 0 beyond a length; else None.
    """
    _check(q, k_pages, v_pages, block_table, cache_seqlens, window, positions, q_positions, probs)
    return paged_decode_attention_reference(
        q,
        k_pages,
        v_pages,
        block_table,
        cache_seqlens,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        positions=positions,
        q_positions=q_positions,
        probs=probs,
        chunk_size=chunk_size,
    )
