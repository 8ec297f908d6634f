"""Compaction by hole filling: keep exactly the kept slots of a head, with as few moves as possible.

With n = cache_seqlens, keep restricted to slots < n and new = sum(keep):

    sources       kept slots    >= new, ascending,
    destinations  evicted slots <  new, ascending.

Both lists have the same length, at most n / 2; the i-th source record (k, v, position, score, and
the scales of a quantised k and v) moves into the i-th destination. Sources and destinations are
disjoint and each is touched once, so the moves need neither an order nor a second buffer. The order
of slots inside a head is lost on purpose: attention does not depend on it, and windows use
`positions`.

Two launches: one program a head counts and ranks (running sums, ascending blocks), then programs of
BLOCK_R moves copy the records. Nothing is sized by a count on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    AotRow,
    aot_row,
    check_dtype,
    check_last_contiguous,
    check_shape,
    launch_options,
    padded_head_dim,
)
from ._pool import check_pool
from ._quant import check_scales, raw

_BLOCK_S = 1024  # slots a step of the ranking
# padded head_dim -> BLOCK_R moves a program: 4096 values of K and of V, 4 warps, any arch
_CONFIG = {d: min(64, 4096 // d) for d in (16, 32, 64, 128, 256)}


@triton.jit(do_not_specialize=["slots", "max_moves"])
def _rank_kernel(
    keep,  # bool [B, HK, S] as uint8
    seqlens,  # int32 [B, HK]
    new_seqlens,  # int32 [B, HK], out
    num_moves,  # int32 [B, HK], out
    sources,  # int32 [B, HK, max_moves], out
    destinations,  # int32 [B, HK, max_moves], out
    stride_b,
    stride_h,
    slots,
    max_moves,
    BLOCK_S: tl.constexpr,
):
    kv_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = row * tl.num_programs(0) + kv_head
    keep += row * stride_b + kv_head * stride_h
    n = tl.minimum(tl.load(seqlens + group), slots)
    new = 0
    for start in range(0, n, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)  # [BLOCK_S]
        kept = tl.load(keep + slot, mask=slot < n, other=0) != 0
        new += tl.sum(kept.to(tl.int32))
    tl.store(new_seqlens + group, new)

    sources += group * max_moves
    destinations += group * max_moves
    found, holes = 0, 0  # sources and destinations so far
    for start in range(0, n, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        kept = tl.load(keep + slot, mask=slot < n, other=0) != 0
        is_source = kept & (slot >= new)
        is_hole = (slot < new) & (kept == 0)
        rank = found + tl.cumsum(is_source.to(tl.int32)) - 1
        tl.store(sources + rank, slot, mask=is_source)
        rank = holes + tl.cumsum(is_hole.to(tl.int32)) - 1
        tl.store(destinations + rank, slot, mask=is_hole)
        found += tl.sum(is_source.to(tl.int32))
        holes += tl.sum(is_hole.to(tl.int32))
    tl.store(num_moves + group, found)


@triton.jit(do_not_specialize=["max_moves"])
def _move_kernel(
    k_pages,  # [N, P, D], in place
    v_pages,  # [N, P, D], in place
    positions,  # int32 [N, P], in place
    scores,  # fp32 [N, P], in place
    block_table,  # int32 [B, HK, maxP]
    num_moves,  # int32 [B, HK]
    sources,  # int32 [B, HK, max_moves]
    destinations,  # int32 [B, HK, max_moves]
    k_scales,  # fp32 [N, P], in place, or None
    v_scales,  # fp32 [N, P], in place, or None
    stride_kn,
    stride_kp,
    stride_vn,
    stride_vp,
    stride_tb,
    stride_th,
    max_moves,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = row * tl.num_programs(1) + kv_head
    count = tl.load(num_moves + group)
    first = tl.program_id(0) * BLOCK_R
    if first >= count:
        return
    move = first + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    todo = move < count
    src = tl.load(sources + group * max_moves + move, mask=todo, other=0)
    dst = tl.load(destinations + group * max_moves + move, mask=todo, other=0)
    table = block_table + row * stride_tb + kv_head * stride_th
    src_page = tl.load(table + src // P, mask=todo, other=0).to(tl.int64)  # page * stride: > 2^31
    dst_page = tl.load(table + dst // P, mask=todo, other=0).to(tl.int64)
    src, dst = src % P, dst % P

    position = tl.load(positions + src_page * P + src, mask=todo)
    tl.store(positions + dst_page * P + dst, position, mask=todo)
    score = tl.load(scores + src_page * P + src, mask=todo)
    tl.store(scores + dst_page * P + dst, score, mask=todo)
    if k_scales is not None:
        k_scale = tl.load(k_scales + src_page * P + src, mask=todo)
        tl.store(k_scales + dst_page * P + dst, k_scale, mask=todo)
        v_scale = tl.load(v_scales + src_page * P + src, mask=todo)
        tl.store(v_scales + dst_page * P + dst, v_scale, mask=todo)

    offs_d = tl.arange(0, BLOCK_D)
    tile = todo[:, None] & (offs_d < D)[None, :]  # [BLOCK_R, BLOCK_D]
    k_src = k_pages + (src_page * stride_kn + src * stride_kp)[:, None] + offs_d[None, :]
    k_dst = k_pages + (dst_page * stride_kn + dst * stride_kp)[:, None] + offs_d[None, :]
    v_src = v_pages + (src_page * stride_vn + src * stride_vp)[:, None] + offs_d[None, :]
    v_dst = v_pages + (dst_page * stride_vn + dst * stride_vp)[:, None] + offs_d[None, :]
    k, v = tl.load(k_src, mask=tile), tl.load(v_src, mask=tile)
    tl.store(k_dst, k, mask=tile)
    tl.store(v_dst, v, mask=tile)


def compact_kv_triton(
    keep: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """`compact_kv` as two Triton launches on grids that depend on shapes only; no host sync."""
    _check(keep, k_pages, v_pages, positions, scores, block_table, cache_seqlens)
    check_scales(k_pages, k_scales, v_scales)
    B, HK, slots = keep.shape
    max_moves = max(1, slots // 2)
    lens = cache_seqlens.contiguous()
    new_lens, num_moves = torch.empty_like(lens), torch.empty_like(lens)
    lists = torch.empty(2, B, HK, max_moves, dtype=torch.int32, device=keep.device)
    keep = keep if keep.stride(-1) == 1 else keep.contiguous()
    _rank_kernel[(HK, B)](
        *(keep.view(torch.uint8), lens, new_lens, num_moves, lists[0], lists[1]),
        *(keep.stride(0), keep.stride(1), slots, max_moves),
        BLOCK_S=min(_BLOCK_S, max(16, triton.next_power_of_2(slots))),
        **launch_options(4, 1),
    )
    D, block_d = k_pages.shape[2], padded_head_dim(k_pages.shape[2])
    _move_kernel[(triton.cdiv(max_moves, _CONFIG[block_d]), HK, B)](
        *(raw(k_pages), raw(v_pages), positions, scores, block_table, num_moves),
        *(lists[0], lists[1], k_scales, v_scales),
        *(*k_pages.stride()[:2], *v_pages.stride()[:2], *block_table.stride()[:2]),
        max_moves,
        D=D,
        BLOCK_D=block_d,
        P=k_pages.shape[1],
        BLOCK_R=_CONFIG[block_d],
        **launch_options(4, 1),
    )
    return new_lens


def compact_kv_reference(
    keep: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """The definition, and the CPU path."""
    _check(keep, k_pages, v_pages, positions, scores, block_table, cache_seqlens)
    check_scales(k_pages, k_scales, v_scales)
    P = k_pages.shape[1]
    slot = torch.arange(keep.shape[-1], device=keep.device)
    keep = keep & (slot < cache_seqlens[..., None])  # [B, HK, S]
    new = keep.sum(-1, dtype=torch.int32)
    inside = slot < new[..., None]
    # nonzero is ordered by (row, head, slot) and both masks have equal counts per head: ranks match
    b, h, src = (keep & ~inside).nonzero(as_tuple=True)
    dst = (~keep & inside).nonzero(as_tuple=True)[2]
    src_page, dst_page = block_table[b, h, src // P].long(), block_table[b, h, dst // P].long()
    for pages in (raw(k_pages), raw(v_pages), positions, scores, k_scales, v_scales):
        if pages is not None:
            pages[dst_page, dst % P] = pages[src_page, src % P]
    return new


def _check(
    keep: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
) -> None:
    check_pool(k_pages, v_pages, positions, scores)
    check_shape("cache_seqlens", cache_seqlens, (None, None))
    check_shape("keep", keep, (*cache_seqlens.shape, None))
    check_shape("block_table", block_table, (*cache_seqlens.shape, None))
    check_dtype("keep", keep, torch.bool)
    check_dtype("cache_seqlens", cache_seqlens, torch.int32)
    check_dtype("block_table", block_table, torch.int32)
    check_last_contiguous("block_table", block_table)


def compact_kv(
    keep: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    scores: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Moves the kept records of every head into its first slots, in place; returns the new lengths.

    keep bool [B,HK,S] with S >= every length (entries beyond a length are ignored); k_pages,
    v_pages [N,P,D]; positions int32 [N,P]; scores fp32 [N,P]; block_table int32 [B,HK,maxP];
    cache_seqlens int32 [B,HK]; k_scales, v_scales fp32 [N,P] of quantised pages. No page may belong
    to two heads. Returns new_seqlens int32 [B,HK]; cache_seqlens is not modified. Nothing syncs
    with the host on a GPU. Raises ValueError on shapes and dtypes that do not fit together.
    """
    run = compact_kv_triton if keep.is_cuda else compact_kv_reference
    args = (keep, k_pages, v_pages, positions, scores, block_table, cache_seqlens)
    return run(*args, k_scales=k_scales, v_scales=v_scales)


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) with P = 16."""
    types = "*u8 " + "*i32 " * 5 + "i32 " * 4 + "constexpr "
    rank = dict(zip(_rank_kernel.arg_names, types.split(), strict=True))
    rows: list[AotRow] = []
    for arch in ARCHS:
        rows.append((_rank_kernel, rank, {"BLOCK_S": _BLOCK_S}, launch_options(4, 1), arch))
        for d in (64, 128, 256) if arch == "sm90" else (128,):
            rows += [_move_row(arch, d, quantised) for quantised in (False, True)]
    return rows


def _move_row(arch: str, width: int, quantised: bool) -> AotRow:
    ints = ("positions", "block_table", "num_moves", "sources", "destinations")
    types = dict.fromkeys(ints, "*i32") | {"scores": "*fp32", "max_moves": "i32"}
    types |= dict.fromkeys(("k_pages", "v_pages"), "*u8" if quantised else "*bf16")
    types |= dict.fromkeys(("k_scales", "v_scales") if quantised else (), "*fp32")
    constexprs = {"D": width, "BLOCK_D": width, "P": 16, "BLOCK_R": _CONFIG[width]}
    return aot_row(_move_kernel, arch, types, constexprs, launch_options(4, 1))
