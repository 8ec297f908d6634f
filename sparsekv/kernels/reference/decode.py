"""Paged decode attention in plain torch: the definition and the CPU path; maths in ../decode.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .._common import check_dtype, check_heads, check_shape
from .._quant import check_scales, dequantise, format_of, raw, stored_width

REDUCTIONS = ("none", "mean", "max", "sum")


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """float64 inputs stay float64, all others compute in fp32. chunk_size changes nothing here."""
    check_decode(q, k_pages, v_pages, block_table, cache_seqlens, sinks, probs)
    check_window(q, k_pages, window, positions, q_positions)
    check_scales(k_pages, k_scales, v_scales)
    used = int(cache_seqlens.max()) if cache_seqlens.numel() else 0
    table = block_table[:, :, : -(-used // k_pages.shape[1])].long()
    valid = torch.arange(used, device=q.device) < cache_seqlens[..., None]  # [B, HK, S]
    k = _gather_values(k_pages, k_scales, table, used)
    v = _gather_values(v_pages, v_scales, table, used).masked_fill_(
        ~valid[..., None], 0
    )  # 0 * NaN is NaN
    if window is not None and positions is not None and q_positions is not None:
        age = q_positions[:, None, None] - _gather_pages(positions, table, used)
        valid = valid & (age < window)
    x = _logits(q, k, softmax_scale, softcap)
    p, lse = _softmax(x.masked_fill_(~valid[:, :, None], float("-inf")), sinks)
    out = torch.einsum("bhgs,bhsd->bhgd", p, v.to(p.dtype)).reshape(q.shape).to(q.dtype)
    if probs is None:
        return out, lse, None
    p = torch.nn.functional.pad(p, (0, block_table.shape[2] * k_pages.shape[1] - used))
    return out, lse, _reduce_group(p, probs).float()


def _gather_pages(pages: Tensor, table: Tensor, used: int) -> Tensor:
    """Dense copy of ragged slots: pages [N,P,...] -> [B,HK,used,...], garbage beyond a length."""
    flat = pages.index_select(0, table.reshape(-1))
    return flat.view(*table.shape[:2], table.shape[2] * pages.shape[1], *pages.shape[2:])[
        :, :, :used
    ]


def _gather_values(pages: Tensor, scales: Tensor | None, table: Tensor, used: int) -> Tensor:
    """`_gather_pages` of K or V: fp32 if quantised."""
    dense = _gather_pages(raw(pages), table, used)
    if scales is None:
        return dense
    return dequantise(dense.view(pages.dtype), _gather_pages(scales, table, used), torch.float32)


def _logits(q: Tensor, k: Tensor, softmax_scale: float, softcap: float | None) -> Tensor:
    """q [B,HQ,D], k [B,HK,S,D] -> [B,HK,G,S]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))
    x = torch.einsum("bhgd,bhsd->bhgs", grouped, k.to(dtype)) * softmax_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _softmax(x: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [B,HK,G,S] with -inf where masked (overwritten) -> (p like x, lse [B,HQ])."""
    lse = torch.logsumexp(x, -1)  # [B, HK, G]
    empty = lse == float("-inf")
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(x.dtype).unflatten(0, (x.shape[1], -1)))
        lse = torch.where(empty, lse, with_sink)
    # an empty row: exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    return x.sub_(lse.masked_fill(empty, 0)[..., None]).exp_(), lse.flatten(1)


def _reduce_group(p: Tensor, probs: str) -> Tensor:
    """p [B,HK,G,S] -> [B,HQ,S] for "none", else [B,HK,S]."""
    if probs == "none":
        return p.flatten(1, 2)
    if probs == "max":
        return p.amax(2)
    return p.mean(2) if probs == "mean" else p.sum(2)


def check_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    sinks: Tensor | None,
    probs: str | None,
) -> None:
    """Raise ValueError for arguments that do not fit together (shapes and dtypes, not values)."""
    check_shape("q", q, (None, None, None))
    B, HQ, D = q.shape
    form = format_of(k_pages)
    check_shape("k_pages", k_pages, (None, None, stored_width(form, D)))
    check_shape("v_pages", v_pages, k_pages.shape)
    check_shape("block_table", block_table, (B, None, None))
    check_heads(HQ, block_table.shape[1])
    check_shape("cache_seqlens", cache_seqlens, block_table.shape[:2])
    check_dtype("k_pages", k_pages, form.dtype if form else q.dtype)
    check_dtype("v_pages", v_pages, k_pages.dtype)
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("cache_seqlens", cache_seqlens, torch.int32)
    if sinks is not None:
        check_shape("sinks", sinks, (HQ,))
    if probs is not None and probs not in REDUCTIONS:
        raise ValueError(f"expected probs to be None or one of {REDUCTIONS}, got {probs!r}")


def check_window(
    q: Tensor,
    k_pages: Tensor,
    window: int | None,
    positions: Tensor | None,
    q_positions: Tensor | None,
) -> None:
    """Raise ValueError unless a window comes with positions int32 [N,P], q_positions int32 [B]."""
    if window is None:
        return
    if window < 1:
        raise ValueError(f"expected window >= 1 or None, got {window}")
    if positions is None or q_positions is None:
        raise ValueError("expected positions and q_positions with a window, got None")
    check_shape("positions", positions, k_pages.shape[:2])
    check_shape("q_positions", q_positions, q.shape[:1])
    check_dtype("positions", positions, torch.int32)
    check_dtype("q_positions", q_positions, torch.int32)
