"""Append: scatter new (k, v, position, score) records into the slots of a paged cache, in place.

For every row b, KV head h and i < n, with s = slots[b,h,i] >= 0 and t = index[b,h,i] (or i):

    page, o = block_table[b, h, s // P], s % P
    k_pages[page,o] = k[b,h,t],                    v_pages[page,o] = v[b,h,t],
    positions[page,o] = token_positions[b,h,i],    scores[page,o] = token_scores[b,h,i] (or 0).

s = -1 writes nothing. The slots of a head must be distinct: then no two programs write one place.
Into quantised pages k and v go by the rule of `_quant.py`, with their scales beside them.
A program copies BLOCK_T tokens of one head; rows of K and V move as whole vectors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    MAX_HEAD_DIM,
    AotRow,
    aot_row,
    check_dtype,
    check_last_contiguous,
    check_shape,
    launch_options,
    padded_head_dim,
)
from ._pool import check_pool
from ._quant import (
    KVFormat,
    check_scales,
    format_of,
    formats_of,
    quantise,
    raw,
    store_quantised,
    stored_width,
)

# padded head_dim -> BLOCK_T tokens a program: 4096 values of K and of V, 4 warps, any arch
_CONFIG = {d: min(64, 4096 // d) for d in (16, 32, 64, 128, MAX_HEAD_DIM)}


@triton.jit(do_not_specialize=["n"])
def _append_kernel(
    k,  # [B, HK, T, D]
    v,  # [B, HK, T, D]
    k_pages,  # [N, P, D], out
    v_pages,  # [N, P, D], out
    k_scales,  # fp32 [N, P], out, or None: pages are not quantised
    v_scales,  # fp32 [N, P], out, or None
    positions,  # int32 [N, P], out
    scores,  # fp32 [N, P], out
    block_table,  # int32 [B, HK, maxP]
    slots,  # int32 [B, HK, n]
    token_positions,  # int32 [B, HK, n]
    index,  # int32 [B, HK, n] or None
    token_scores,  # fp32 [B, HK, n] or None
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_kn,
    stride_kp,
    stride_vn,
    stride_vp,
    stride_tb,
    stride_th,
    n,
    D: tl.constexpr,  # elements of a page row
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LIMIT: tl.constexpr,  # of the quantised format, or None
):
    kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = row * tl.num_programs(1) + kv_head
    i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slots + group * n + i, mask=i < n, other=-1)  # [BLOCK_T]
    new = slot >= 0
    token = i
    if index is not None:
        token = tl.load(index + group * n + i, mask=new, other=0)
    table = block_table + row * stride_tb + kv_head * stride_th
    page = tl.load(table + slot // P, mask=new, other=0).to(tl.int64)  # page * stride: past 2^31
    offset = slot % P

    position = tl.load(token_positions + group * n + i, mask=new, other=0)
    tl.store(positions + page * P + offset, position, mask=new)
    score = tl.zeros([BLOCK_T], tl.float32)
    if token_scores is not None:
        score = tl.load(token_scores + group * n + i, mask=new, other=0.0)
    tl.store(scores + page * P + offset, score, mask=new)

    offs_d = tl.arange(0, BLOCK_D)
    tile = new[:, None] & (offs_d < D)[None, :]  # [BLOCK_T, BLOCK_D]
    k_src = k + row * stride_kb + kv_head * stride_kh + token.to(tl.int64) * stride_kt
    v_src = v + row * stride_vb + kv_head * stride_vh + token.to(tl.int64) * stride_vt
    if k_scales is None:
        k_new = tl.load(k_src[:, None] + offs_d[None, :], mask=tile)
        v_new = tl.load(v_src[:, None] + offs_d[None, :], mask=tile)
    k_dst = k_pages + page * stride_kn + offset * stride_kp
    v_dst = v_pages + page * stride_vn + offset * stride_vp
    if k_scales is None:
        tl.store(k_dst[:, None] + offs_d[None, :], k_new.to(k_pages.dtype.element_ty), mask=tile)
        tl.store(v_dst[:, None] + offs_d[None, :], v_new.to(v_pages.dtype.element_ty), mask=tile)
    else:
        place = page * P + offset
        store_quantised(k_src, k_dst, k_scales + place, new, LIMIT, D, BLOCK_D)
        store_quantised(v_src, v_dst, v_scales + place, new, LIMIT, D, BLOCK_D)


def append_kv_triton(
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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """`append_kv` as one Triton launch; expanded slots, positions, index or scores are copied."""
    _check(k, v, k_pages, v_pages, positions, scores, block_table, slots, token_positions)
    _check_sources(k, slots, index, token_scores)
    check_scales(k_pages, k_scales, v_scales)
    B, HK, n = slots.shape
    if slots.numel() == 0:
        return
    width, form = k_pages.shape[-1], format_of(k_pages)
    block_d = padded_head_dim(width)
    block_t = min(_CONFIG[block_d], triton.next_power_of_2(n))
    _append_kernel[(triton.cdiv(n, block_t), HK, B)](
        *(k, v, k_pages, v_pages, k_scales, v_scales, positions, scores, block_table),
        *(slots.contiguous(), token_positions.contiguous()),
        None if index is None else index.contiguous(),
        None if token_scores is None else token_scores.contiguous(),
        *(*k.stride()[:3], *v.stride()[:3]),
        *(*k_pages.stride()[:2], *v_pages.stride()[:2], *block_table.stride()[:2]),
        n,
        D=width,
        BLOCK_D=block_d,
        P=k_pages.shape[1],
        BLOCK_T=block_t,
        LIMIT=None if form is None else form.limit,
        **launch_options(4, 1),
    )


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """The definition, and the CPU path."""
    _check(k, v, k_pages, v_pages, positions, scores, block_table, slots, token_positions)
    _check_sources(k, slots, index, token_scores)
    check_scales(k_pages, k_scales, v_scales)
    P = k_pages.shape[1]
    b, h, i = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[b, h, i].long()
    page, offset = block_table[b, h, slot // P].long(), slot % P
    t = i if index is None else index[b, h, i].long()
    form = format_of(k_pages)
    for x, pages, scale in ((k, k_pages, k_scales), (v, v_pages, v_scales)):
        if form is None or scale is None:
            pages[page, offset] = x[b, h, t].to(pages.dtype)
        else:
            q, scale[page, offset] = quantise(x[b, h, t], form)
            raw(pages)[page, offset] = raw(q)
    positions[page, offset] = token_positions[b, h, i]
    scores[page, offset] = 0.0 if token_scores is None else token_scores[b, h, i]


def _check(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    slots: Tensor,
    token_positions: Tensor,
) -> None:
    check_shape("k", k, (None, None, None, None))
    check_shape("v", v, k.shape)
    width = stored_width(format_of(k_pages), k.shape[-1])
    check_pool(k_pages, v_pages, positions, scores, width)
    check_shape("block_table", block_table, (*k.shape[:2], None))
    check_shape("slots", slots, (*k.shape[:2], None))
    check_shape("token_positions", token_positions, slots.shape)
    for name, x in (("slots", slots), ("token_positions", token_positions)):
        check_dtype(name, x, torch.int32)
    check_dtype("block_table", block_table, torch.int32)
    for name, x in (("k", k), ("v", v), ("block_table", block_table)):
        check_last_contiguous(name, x)


def _check_sources(
    k: Tensor, slots: Tensor, index: Tensor | None, token_scores: Tensor | None
) -> None:
    if index is None:
        check_shape("slots (without an index)", slots, k.shape[:3])
    else:
        check_shape("index", index, slots.shape)
        check_dtype("index", index, torch.int32)
    if token_scores is not None:
        check_shape("token_scores", token_scores, slots.shape)
        check_dtype("token_scores", token_scores, torch.float32)


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Writes tokens into logical slots of their heads, in place.

    k, v [B,HK,T,D], any strides but stride(-1) == 1, cast to the pages' dtype; k_pages, v_pages
    [N,P,D]; positions int32 [N,P]; scores fp32 [N,P]; block_table int32 [B,HK,maxP]; slots and
    token_positions int32 [B,HK,n] (slot -1: skip; the slots of a head are distinct); index int32
    [B,HK,n], source token (None: 0..n-1, then n == T); token_scores fp32 [B,HK,n] or None: score 0.
    k_scales, v_scales: fp32 [N,P], with quantised pages (see `_quant.py`) and only then.
    Raises ValueError on shapes and dtypes that do not fit together.
    """
    run = append_kv_triton if k_pages.is_cuda else append_kv_reference
    sources = (k, v, k_pages, v_pages, positions, scores, block_table, slots, token_positions)
    run(
        *sources, index=index, token_scores=token_scores, k_scales=k_scales, v_scales=v_scales
    )  # fmt: skip


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch); with index and scores, P = 16."""
    rows = []
    for arch in ARCHS:
        for d in (64, 128, MAX_HEAD_DIM) if arch == "sm90" else (128,):
            rows.append(_aot_row(arch, d, None))
            rows += [_aot_row(arch, d, form) for form in formats_of(arch)]
    return rows


def _aot_row(arch: str, head_dim: int, form: KVFormat | None) -> AotRow:
    width, ints = stored_width(form, head_dim), ("positions", "block_table", "slots", "index")
    types = dict.fromkeys((*ints, "token_positions"), "*i32") | {"k": "*bf16", "v": "*bf16"}
    types |= {"scores": "*fp32", "token_scores": "*fp32", "n": "i32"}
    types |= dict.fromkeys(("k_pages", "v_pages"), form.pointer if form else "*bf16")
    types |= dict.fromkeys(("k_scales", "v_scales") if form else (), "*fp32")
    constexprs: dict[str, Any] = {"D": width, "BLOCK_D": width, "P": 16, "BLOCK_T": _CONFIG[width]}
    constexprs["LIMIT"] = form.limit if form else None
    return aot_row(_append_kernel, arch, types, constexprs, launch_options(4, 1))
