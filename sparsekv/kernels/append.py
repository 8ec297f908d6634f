"""Append: scatter new (k, v, position, score) records into the slots of a paged cache, in place.

For every row b, KV head h and i < n, with s = slots[b,h,i] >= 0 and t = index[b,h,i] (or i):

    page, o = block_table[b, h, s // P], s % P
    k_pages[page,o] = k[b,h,t],                    v_pages[page,o] = v[b,h,t],
    positions[page,o] = token_positions[b,h,i],    scores[page,o] = token_scores[b,h,i] (or 0).

s = -1 writes nothing. The slots of a head must be distinct: then no two programs write one place.
Two cases need fewer arguments, so that nothing has to be made for them on the device first:

    kept tokens of a prompt    s = i where index >= 0, position index, source t = index + offset_b
    one decoded token          s = cache_seqlens[b,h], which is then counted up

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
    slots,  # int32 [B, HK, n], or None: see the module
    token_positions,  # int32 [B, HK, n], or None: the index
    index,  # int32 [B, HK, n] or None
    offsets,  # int32 [B], of the source tokens, or None
    seqlens,  # int32 [B, HK], in and out, or None
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
    stride_pb,
    stride_ph,
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
    token = i  # [BLOCK_T]
    if index is not None:
        token = tl.load(index + group * n + i, mask=i < n, other=-1)
    if slots is not None:
        slot = tl.load(slots + group * n + i, mask=i < n, other=-1)
    elif seqlens is not None:
        first = tl.load(seqlens + group)
        slot = tl.where(i < n, first + i, -1)
    else:
        slot = tl.where((i < n) & (token >= 0), i, -1)
    new = slot >= 0
    table = block_table + row * stride_tb + kv_head * stride_th
    page = tl.load(table + slot // P, mask=new, other=0).to(tl.int64)  # page * stride: past 2^31
    offset = slot % P

    if token_positions is not None:
        at = row * stride_pb + kv_head * stride_ph + i
        position = tl.load(token_positions + at, mask=new, other=0)
    else:
        position = token
    if offsets is not None:
        token += tl.load(offsets + row)
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
    if seqlens is not None:  # a token: one program a head
        tl.debug_barrier()  # every warp must have read the count before one warp changes it
        tl.store(seqlens + group, first + n)


def append_kv_triton(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, positions: Tensor, scores: Tensor,
    block_table: Tensor, slots: Tensor | None, token_positions: Tensor | None, *,
    index: Tensor | None = None, offsets: Tensor | None = None,
    cache_seqlens: Tensor | None = None, token_scores: Tensor | None = None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """`append_kv` as one Triton launch; expanded slots, index or scores are copied."""
    _check(k, v, k_pages, v_pages, positions, scores, block_table)
    n = _check_records(k, slots, token_positions, index, offsets, cache_seqlens, token_scores)
    check_scales(k_pages, k_scales, v_scales)
    B, HK = k.shape[:2]
    if not B * HK * n:
        return
    form, block_d = format_of(k_pages), padded_head_dim(k_pages.shape[-1])
    block_t = min(_CONFIG[block_d], triton.next_power_of_2(n))
    _append_kernel[(triton.cdiv(n, block_t), HK, B)](
        *(k, v, k_pages, v_pages, k_scales, v_scales, positions, scores, block_table),
        *(_dense(slots), token_positions, _dense(index), offsets, cache_seqlens),
        *(_dense(token_scores), *k.stride()[:3], *v.stride()[:3]),
        *(*k_pages.stride()[:2], *v_pages.stride()[:2], *block_table.stride()[:2]),
        *((0, 0) if token_positions is None else token_positions.stride()[:2]),
        n,
        D=k_pages.shape[2],
        BLOCK_D=block_d,
        P=k_pages.shape[1],
        BLOCK_T=block_t,
        LIMIT=None if form is None else form.limit,
        **launch_options(4, 1),
    )


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def append_kv_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, positions: Tensor, scores: Tensor,
    block_table: Tensor, slots: Tensor | None, token_positions: Tensor | None, *,
    index: Tensor | None = None, offsets: Tensor | None = None,
    cache_seqlens: Tensor | None = None, token_scores: Tensor | None = None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """The definition, and the CPU path."""
    _check(k, v, k_pages, v_pages, positions, scores, block_table)
    n = _check_records(k, slots, token_positions, index, offsets, cache_seqlens, token_scores)
    check_scales(k_pages, k_scales, v_scales)
    P = k_pages.shape[1]
    if cache_seqlens is not None:
        slots = cache_seqlens[..., None].clone()
        cache_seqlens.add_(1)
    elif slots is None and index is not None:
        slots = torch.where(index >= 0, torch.arange(n, device=index.device), -1)
    assert slots is not None
    b, h, i = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[b, h, i].long()
    page, offset = block_table[b, h, slot // P].long(), slot % P
    t = i if index is None else index[b, h, i].long()
    positions[page, offset] = (t if token_positions is None else token_positions[b, h, i]).int()
    t = t if offsets is None else t + offsets[b]
    _write(k_pages, k_scales, (page, offset), k[b, h, t])
    _write(v_pages, v_scales, (page, offset), v[b, h, t])
    scores[page, offset] = 0.0 if token_scores is None else token_scores[b, h, i]


def _write(pages: Tensor, scales: Tensor | None, at: tuple[Tensor, Tensor], x: Tensor) -> None:
    """x [R, D] into slots (page, offset), quantised if the pages are."""
    form = format_of(pages)
    if form is None or scales is None:
        pages[at] = x.to(pages.dtype)
    else:
        q, scales[at] = quantise(x, form)
        raw(pages)[at] = raw(q)


def _check(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
) -> None:
    check_shape("k", k, (None, None, None, None))
    check_shape("v", v, k.shape)
    width = stored_width(format_of(k_pages), k.shape[-1])
    check_pool(k_pages, v_pages, positions, scores, width)
    check_shape("block_table", block_table, (*k.shape[:2], None))
    check_dtype("block_table", block_table, torch.int32)
    for name, x in (("k", k), ("v", v), ("block_table", block_table)):
        check_last_contiguous(name, x)


def _check_records(
    k: Tensor,
    slots: Tensor | None,
    token_positions: Tensor | None,
    index: Tensor | None,
    offsets: Tensor | None,
    cache_seqlens: Tensor | None,
    token_scores: Tensor | None,
) -> int:
    """n, the records a head; which arguments belong together is said in `append_kv`."""
    B, HK, T, _ = k.shape
    if cache_seqlens is not None:
        given = {"slots": slots, "index": index, "offsets": offsets}
        if T != 1 or any(x is not None for x in given.values()):
            raise ValueError("expected one token and no slots, index or offsets with cache_seqlens")
        check_shape("cache_seqlens", cache_seqlens, (B, HK))
        if not cache_seqlens.is_contiguous():  # written in place: a copy would be lost
            raise ValueError("expected contiguous cache_seqlens, got an expanded or strided one")
    elif slots is None and index is None:
        raise ValueError("expected slots, an index or cache_seqlens, got none")
    if token_positions is None and (slots is not None or index is None):
        raise ValueError("expected token_positions unless index alone says what is kept, got none")
    if offsets is not None:
        check_shape("offsets", offsets, (B,))
        check_last_contiguous("offsets", offsets)
    n = T if index is None else index.shape[-1]
    shaped = {"slots": slots, "index": index, "token_positions": token_positions}
    for name, x in (shaped | {"token_scores": token_scores}).items():
        if x is not None:
            check_shape(name, x, (B, HK, n))
    if token_positions is not None:
        check_last_contiguous("token_positions", token_positions)
    for name, x in (shaped | {"offsets": offsets, "cache_seqlens": cache_seqlens}).items():
        if x is not None:
            check_dtype(name, x, torch.int32)
    if token_scores is not None:
        check_dtype("token_scores", token_scores, torch.float32)
    return n


def append_kv(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, positions: Tensor, scores: Tensor,
    block_table: Tensor, slots: Tensor | None, token_positions: Tensor | None, *,
    index: Tensor | None = None, offsets: Tensor | None = None,
    cache_seqlens: Tensor | None = None, token_scores: Tensor | None = None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes tokens into logical slots of their heads, in place.

    k, v [B,HK,T,D], any strides but stride(-1) == 1, cast to the pages' dtype; k_pages, v_pages
    [N,P,D]; positions int32 [N,P]; scores fp32 [N,P]; block_table int32 [B,HK,maxP]; slots and
    token_positions int32 [B,HK,n] (slot -1: skip; the slots of a head are distinct); index int32
    [B,HK,n], source token (None: 0..n-1, then n == T); token_scores fp32 [B,HK,n] or None: score 0.
    slots None: with an index, entry i goes to slot i unless it is -1, its position is the index
    (token_positions None) and its source token index + offsets int32 [B]; with cache_seqlens
    int32 [B,HK] the one token of each head goes behind the slots in use, which are counted up.
    k_scales, v_scales: fp32 [N,P], with quantised pages (see `_quant.py`) and only then.
    Raises ValueError on shapes and dtypes that do not fit together.
    """
    run = append_kv_triton if k_pages.is_cuda else append_kv_reference
    sources = (k, v, k_pages, v_pages, positions, scores, block_table, slots, token_positions)
    run(
        *sources, index=index, offsets=offsets, cache_seqlens=cache_seqlens,
        token_scores=token_scores, k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch); with index and scores, P = 16."""
    rows = []
    for arch in ARCHS:
        for d in (64, 128, MAX_HEAD_DIM) if arch == "sm90" else (128,):
            rows.append(_aot_row(arch, d, None))
            rows.append(_aot_row(arch, d, None, ("index", "offsets")))
            rows.append(_aot_row(arch, d, None, ("token_positions", "seqlens")))
            rows += [_aot_row(arch, d, form) for form in formats_of(arch)]
    return rows


def _aot_row(
    arch: str,
    head_dim: int,
    form: KVFormat | None,
    where: tuple[str, ...] = ("slots", "index", "token_positions"),
) -> AotRow:
    width, ints = stored_width(form, head_dim), ("positions", "block_table", *where)
    types = dict.fromkeys(ints, "*i32") | {"k": "*bf16", "v": "*bf16"}
    types |= {"scores": "*fp32", "token_scores": "*fp32", "n": "i32"}
    types |= dict.fromkeys(("k_pages", "v_pages"), form.pointer if form else "*bf16")
    types |= dict.fromkeys(("k_scales", "v_scales") if form else (), "*fp32")
    constexprs: dict[str, Any] = {"D": width, "BLOCK_D": width, "P": 16, "BLOCK_T": _CONFIG[width]}
    constexprs["LIMIT"] = form.limit if form else None
    return aot_row(_append_kernel, arch, types, constexprs, launch_options(4, 1))
