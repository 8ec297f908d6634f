"""Paged decode attention: one query token per row over ragged per-KV-head page tables.

For row b, query head h, its KV head h // G and the slots j < n = cache_seqlens[b, h // G]:

    x_j = softmax_scale * <q, k_j>,  then softcap * tanh(x_j / softcap) where there is a softcap,
    j is visible  iff  window is None or q_positions[b] - positions_j < window,
    lse = log(sum_visible exp(x_j) + exp(sink_h)),  p_j = exp(x_j - lse),  out = sum_j p_j v_j.

A head without a visible key gives out = 0, lse = -inf, p = 0 (with a sink too).

Kernel: a program owns one KV head, its G query heads (padded to 16 rows) and one CHUNK of slots.
The chunk size comes from shapes, never from lengths, so the grid is constant (CUDA graphs). The
page ids of a tile are loaded one tile ahead: a table load right in front of a K load would leave
the pipeline one buffer instead of two. Partial (m, l, acc) are merged in chunk order
(`_decode_merge.py`); a single chunk writes the result itself. Slots >= n are never read. Results
do not depend on page ids; they do not depend on the rest of the batch for a given chunk_size.
Quantised pages have a kernel of their own (`_decode_quant.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ._common import (
    ARCHS,
    DTYPES,
    LOG2E,
    PDL_ARCHS,
    AotRow,
    base2_logits,
    check_dtype,
    check_last_contiguous,
    has_dependent_launch,
    launch_options,
    padded_head_dim,
)
from ._decode_merge import combine, merge_signatures, probabilities, softmax_finish
from ._decode_plan import CONFIG, HEAD_DIMS, Plan, make_plan
from ._decode_quant import quantised_decode_kernel, quantised_signatures, word_shape, words
from ._quant import check_scales, format_of
from .reference.decode import check_decode, check_window, paged_decode_attention_reference


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    q,  # [B, HQ, D]
    k_pages,  # [N, P, D]
    v_pages,  # [N, P, D]
    block_table,  # int32 [B, HK, maxP]
    seqlens,  # int32 [B, HK]
    positions,  # int32 [N, P] or None: no window
    q_positions,  # int32 [B] or None
    sinks,  # float [HQ] or None; only where there is one chunk
    out,  # [B, HQ, D] if ONE_CHUNK, else acc fp32 [B, HQ, C, D]
    lse,  # fp32 [B, HQ] if ONE_CHUNK, else (m, l) fp32 [B, HQ, C, 2]
    weights,  # fp16 [B, HQ, S] or None
    tile_max,  # fp32 [B, HQ, tiles] or None
    stride_qb,
    stride_qh,
    stride_kn,
    stride_kp,
    stride_vn,
    stride_vp,
    stride_tb,
    stride_th,
    softmax_scale,
    softcap,
    window,
    capacity,  # S = maxP * P
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    kv_head, row, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = (row * tl.num_programs(0) + kv_head).to(tl.int64)
    n = tl.load(seqlens + group)
    start = chunk * CHUNK
    if (start >= n) & (chunk > 0):  # chunk 0 of an empty head writes its zeros
        return
    end = tl.minimum(n, start + CHUNK)

    offs_n, offs_d, offs_g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    in_d = (offs_d < D)[None, :]
    in_g = offs_g < G
    head = group * G + offs_g  # [BLOCK_G] in B * HQ
    table = block_table + row.to(tl.int64) * stride_tb + kv_head * stride_th
    q_rows = row.to(tl.int64) * stride_qb + (kv_head * G + offs_g) * stride_qh
    q_mask = in_g[:, None] & in_d
    q_tile = tl.load(q + q_rows[:, None] + offs_d[None, :], mask=q_mask, other=0.0)
    if positions is not None:
        oldest = tl.load(q_positions + row) - window  # visible: position > oldest

    if weights is not None:
        tiles = tl.cdiv(capacity, BLOCK_N)
        weights += group * G * capacity
        tile_max += group * G * tiles

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    page = tl.load(table + (start + offs_n) // P, mask=start + offs_n < end, other=0)
    for tile in range(start, end, BLOCK_N):
        slot = tile + offs_n  # [BLOCK_N]
        in_tile = slot < end
        page64, offset = page.to(tl.int64), slot % P  # page * stride passes 2^31 in a big pool
        ahead = slot + BLOCK_N
        page = tl.load(table + ahead // P, mask=ahead < end, other=0)
        # [BLOCK_N, BLOCK_D]
        k_ptrs = k_pages + (page64 * stride_kn + offset * stride_kp)[:, None] + offs_d[None, :]
        v_ptrs = v_pages + (page64 * stride_vn + offset * stride_vp)[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=in_tile[:, None] & in_d, other=0.0)
        v = tl.load(v_ptrs, mask=in_tile[:, None] & in_d, other=0.0)
        seen = in_tile
        if positions is not None:
            seen &= tl.load(positions + page64 * P + offset, mask=in_tile, other=0) > oldest
        # [BLOCK_G, BLOCK_N]
        dots = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        x = base2_logits(dots, softmax_scale, softcap, HAS_SOFTCAP)
        x = tl.where(seen[None, :], x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no visible key so far
        p = tl.exp2(x - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
        if weights is not None:
            w_ptrs = weights + offs_g[:, None] * capacity + slot[None, :]
            tl.store(w_ptrs, p.to(tl.float16), mask=in_g[:, None] & in_tile[None, :])
            tl.store(tile_max + offs_g * tiles + tile // BLOCK_N, m_new, mask=in_g)

    if ONE_CHUNK:
        sink = tl.full([BLOCK_G], float("-inf"), tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + kv_head * G + offs_g, mask=in_g, other=0.0).to(tl.float32)
            sink = sink * LOG2E
        acc, lse_rows = softmax_finish(m, l, acc, sink)
        tl.store(lse + head, lse_rows, mask=in_g)
    else:
        if PDL:
            gdc_launch_dependents()
        head = head * tl.num_programs(2) + chunk
        tl.store(lse + head * 2, m, mask=in_g)
        tl.store(lse + head * 2 + 1, l, mask=in_g)
    o_ptrs = out + head[:, None] * D + offs_d[None, :]
    tl.store(o_ptrs, acc.to(out.dtype.element_ty), mask=q_mask)


def paged_decode_attention_triton(
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
    """`paged_decode_attention` as one or two Triton launches on constant grids; no host sync."""
    check_decode(q, k_pages, v_pages, block_table, cache_seqlens, sinks, probs)
    check_window(q, k_pages, window, positions, q_positions)
    check_scales(k_pages, k_scales, v_scales)
    _check_layout(q, k_pages, v_pages, block_table, positions)
    plan = make_plan(q, k_pages, block_table, chunk_size)
    lens = cache_seqlens.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    near: tuple[Tensor | None, Tensor | None, int] = (None, None, 0)
    if window is not None and q_positions is not None:
        near = (positions, q_positions.contiguous(), window)
    out, lse, parts, raw = _allocate(plan, q, probs is not None)
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    sources = (q, k_pages, v_pages, scales, block_table, lens)
    outputs = [*(parts or (out, lse)), *(raw or (None, None))]
    _launch(plan, *sources, near, sinks, outputs, softmax_scale, softcap)
    if raw is not None and probs is not None:
        finish = (lens, sinks, out, lse, plan.chunk, plan.block_n, probs)
        return out, lse, probabilities(raw, parts, *finish)
    if parts is not None:
        combine(*parts, lens, sinks, out, lse, plan.chunk)
    return out, lse, None


def _allocate(
    plan: Plan, q: Tensor, with_probs: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """(out, lse, partial results or None, raw weights and tile maxima or None)."""
    B, HQ, D = q.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    out, lse = empty(B, HQ, D, dtype=q.dtype), empty(B, HQ)
    parts: tuple[Tensor, Tensor] | None = None
    raw: tuple[Tensor, Tensor] | None = None
    if plan.chunks > 1:  # one chunk writes out and lse itself
        parts = empty(B, HQ, plan.chunks, D), empty(B, HQ, plan.chunks, 2)
    if with_probs:
        raw = empty(B, HQ, plan.capacity, dtype=torch.float16), empty(B, HQ, plan.tiles)
    return out, lse, parts, raw


def _launch(
    plan: Plan,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, ...],
    block_table: Tensor,
    lens: Tensor,
    near: tuple[Tensor | None, Tensor | None, int],
    sinks: Tensor | None,
    outputs: list[Tensor | None],
    softmax_scale: float,
    softcap: float | None,
) -> None:
    B, HK, _ = block_table.shape
    G, D, form = q.shape[1] // HK, q.shape[2], format_of(k_pages)
    shape: dict[str, Any] = {"D": D, "G": G, "BLOCK_G": max(16, triton.next_power_of_2(G))}
    if form is None:
        kernel, pages = _decode_kernel, (k_pages, v_pages)
        shape |= {"BLOCK_D": padded_head_dim(D)}
    else:
        kernel, pages = quantised_decode_kernel, (words(k_pages), words(v_pages))
        shape |= word_shape(D, form)
    kernel[(HK, B, plan.chunks)](
        *(q, *pages, *scales, block_table, lens, *near[:2]),
        sinks if plan.chunks == 1 else None,
        *outputs,
        *(*q.stride()[:2], *pages[0].stride()[:2], *pages[1].stride()[:2]),
        *block_table.stride()[:2],
        *(softmax_scale, 1.0 if softcap is None else softcap, near[2], plan.capacity),
        P=k_pages.shape[1],
        BLOCK_N=plan.block_n,
        CHUNK=plan.chunk,
        ONE_CHUNK=plan.chunks == 1,
        PDL=has_dependent_launch(q.device),
        HAS_SOFTCAP=softcap is not None,
        **shape,
        **launch_options(plan.num_warps, plan.num_stages),
    )


def _check_layout(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, positions: Tensor | None
) -> None:
    tensors = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table}
    for name, x in tensors.items():
        check_last_contiguous(name, x)
    check_dtype("q", q, *DTYPES)
    if positions is not None and not positions.is_contiguous():
        raise ValueError(f"expected contiguous positions, got strides {positions.stride()}")


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of one query token per row over its paged cache.

    q [B,HQ,D]; k_pages, v_pages [N,P,D] in q's dtype, or quantised [N,P,D or D/2] with k_scales,
    v_scales fp32 [N,P] (see `_quant.py`); block_table int32 [B,HK,maxP]; cache_seqlens
    int32 [B,HK], slots in use (0 is legal); sinks float [HQ]; positions int32 [N,P] and q_positions
    int32 [B] are needed with a window only. chunk_size: slots per program, a multiple of 16 (None:
    `default_chunk_size`). probs: None, or "none" for the probabilities of every query head over the
    slots, or their "mean" / "max" / "sum" over the G query heads of a KV head.

    Returns out [B,HQ,D] in q's dtype, lse fp32 [B,HQ] (natural log, sink included) and the
    probabilities fp32 [B,HQ,maxP*P] ("none") or [B,HK,maxP*P], 0 beyond a length; else None. On a
    GPU a probability carries the relative error of fp16. Raises ValueError on arguments that do not
    fit together.
    """
    run = paged_decode_attention_triton if q.is_cuda else paged_decode_attention_reference
    return run(
        *(q, k_pages, v_pages, block_table, cache_seqlens),
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        positions=positions,
        q_positions=q_positions,
        probs=probs,
        chunk_size=chunk_size,
        k_scales=k_scales,
        v_scales=v_scales,
    )


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of every shipped configuration.

    G = 4, P = 16: the plain kernel, the one that writes probabilities, the one with all features.
    """
    rows: list[AotRow] = []
    for arch, d in ((arch, d) for arch in ARCHS for d in HEAD_DIMS):
        block_n, num_warps, num_stages = CONFIG[arch, d]
        plain = ((False, False), (True, False)) if arch == "sm90" else ()  # sm90 budgets registers
        for probs, full in (*plain, (True, True)):
            signature = _signature(probs, full)
            constexprs: dict[str, Any] = {n: None for n, t in signature.items() if t == "constexpr"}
            constexprs |= {"D": d, "BLOCK_D": d, "G": 4, "BLOCK_G": 16, "P": 16, "CHUNK": 256}
            constexprs |= {"BLOCK_N": block_n, "ONE_CHUNK": full, "HAS_SOFTCAP": full}
            constexprs["PDL"] = arch in PDL_ARCHS
            # Four stages where heads are many, see `make_plan`.
            many = d == 128 and (block_n, num_stages) == (64, 3)
            for stages in (3, 4) if many else (num_stages,):
                options = launch_options(num_warps, stages)
                rows.append((_decode_kernel, signature, constexprs, options, arch))
    return rows + quantised_signatures() + merge_signatures()


def _signature(probs: bool, full: bool) -> dict[str, str]:
    none = "constexpr "
    types = "*bf16 " * 3 + "*i32 *i32 " + ("*i32 *i32 *bf16 " if full else none * 3)
    types += "*bf16 *fp32 " if full else "*fp32 *fp32 "
    types += "*fp16 *fp32 " if probs else none * 2
    types += "i32 " * 8 + "fp32 fp32 i32 i32 " + none * 10
    return dict(zip(_decode_kernel.arg_names, types.split(), strict=True))
