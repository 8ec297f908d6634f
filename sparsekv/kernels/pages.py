"""Page bounds: which pages a query could attend most, found without reading their keys (Quest).

Per page and channel the smallest and the largest key, m_i and M_i, are kept beside the page. For
every query head and every key of the page sum_i q_i k_i <= U, and of a KV head the group decides:

    U[b,h,p] = max_{g in group} sum_i max(q_gi m_pi, q_gi M_pi)

Three operations, one decode step of a layer:

    update_bounds  the new tokens, the last of their heads, are folded into the pages they lie in;
                   a page whose first slot is new forgets what stood there before
    page_scores    U, pages in use c = ceil(n / P) of every head, and how many of them to attend:
                   all if n <= budget, else max(2, budget // P), the first and the last among them
    page_table     the block table of chosen pages, and its length: every page is full but the last

Pages are numbered 0 .. c-1 inside a head. Nothing here reads keys that are stored, so bounds are
those of the keys as the model made them, also where pages are quantised.
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
    check_heads,
    check_last_contiguous,
    check_shape,
    launch_options,
    padded_head_dim,
)

# padded head_dim -> pages a program scores: 4096 values of each bound, 4 warps, any arch
_CONFIG = {d: min(64, 4096 // d) for d in (16, 32, 64, 128, 256)}
_TABLE_BLOCK = 256  # entries of a block table that a program writes at a time
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["tokens"])
def _update_bounds_kernel(
    k,  # [B, HK, T, D]
    page_min,  # [N, D], in and out
    page_max,  # [N, D], in and out
    block_table,  # int32 [B, HK, maxP]
    seqlens,  # int32 [B, HK], the new tokens counted
    lengths,  # int32 [B]
    stride_kb,
    stride_kh,
    stride_kt,
    stride_tb,
    stride_th,
    tokens,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
):
    kv_head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n = tl.load(seqlens + row * tl.num_programs(1) + kv_head)
    first = n - tl.load(lengths + row)  # slot of the first new token
    column = first // P + tl.program_id(0)
    start = column * P
    if start < n:
        slot = start + tl.arange(0, P)
        new = (slot >= first) & (slot < n)
        offs_d = tl.arange(0, BLOCK_D)
        token = (tokens - n + slot).to(tl.int64)  # the last slot holds the last token
        source = k + row * stride_kb + kv_head * stride_kh + token * stride_kt
        keys = tl.load(
            source[:, None] + offs_d[None, :], mask=new[:, None] & (offs_d < D)[None, :], other=0.0
        ).to(tl.float32)  # [P, BLOCK_D]
        low = tl.min(tl.where(new[:, None], keys, float("inf")), 0)
        high = tl.max(tl.where(new[:, None], keys, float("-inf")), 0)
        page = tl.load(block_table + row * stride_tb + kv_head * stride_th + column).to(tl.int64)
        at = page * D + offs_d
        if start < first:
            low = tl.minimum(low, tl.load(page_min + at, mask=offs_d < D).to(tl.float32))
            high = tl.maximum(high, tl.load(page_max + at, mask=offs_d < D).to(tl.float32))
        tl.store(page_min + at, low.to(page_min.dtype.element_ty), mask=offs_d < D)
        tl.store(page_max + at, high.to(page_max.dtype.element_ty), mask=offs_d < D)


@triton.jit(do_not_specialize=["capacity"])
def _page_scores_kernel(
    q,  # [B, HQ, D]
    page_min,  # [N, D]
    page_max,  # [N, D]
    block_table,  # int32 [B, HK, maxP]
    seqlens,  # int32 [B, HK]
    budget,  # int32 [B]
    scores,  # fp32 [B, HK, maxP], out
    pages,  # int32 [B, HK], out
    quota,  # int32 [B, HK], out
    stride_qb,
    stride_qh,
    stride_tb,
    stride_th,
    capacity,  # maxP
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIN_ENDS: tl.constexpr,
):
    block, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = row * tl.num_programs(1) + kv_head
    n = tl.load(seqlens + group)
    in_use = tl.cdiv(n, P)
    if block == 0:
        limit = tl.load(budget + row)
        tl.store(pages + group, in_use)
        tl.store(quota + group, tl.where(n <= limit, in_use, tl.maximum(limit // P, 2)))
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    held = column < in_use
    offs_d = tl.arange(0, BLOCK_D)
    tile = held[:, None] & (offs_d < D)[None, :]  # [BLOCK_N, BLOCK_D]
    table = block_table + row * stride_tb + kv_head * stride_th
    page = tl.load(table + column, mask=held, other=0).to(tl.int64)
    at = page[:, None] * D + offs_d[None, :]
    low = tl.load(page_min + at, mask=tile, other=0.0).to(tl.float32)
    high = tl.load(page_max + at, mask=tile, other=0.0).to(tl.float32)
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for g in range(G):
        source = q + row * stride_qb + (kv_head * G + g) * stride_qh + offs_d
        x = tl.load(source, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
        best = tl.maximum(best, tl.sum(tl.maximum(x * low, x * high), 1))
    if PIN_ENDS:
        ends = (column == 0) | (column == in_use - 1)
        best = tl.where(ends, float("inf"), tl.minimum(best, _LARGEST))
    best = tl.where(held, best, float("-inf"))
    tl.store(scores + group * capacity + column, best, mask=column < capacity)


@triton.jit(do_not_specialize=["width"])
def _page_table_kernel(
    index,  # int32 [B, HK, K]
    count,  # int32 [B, HK]
    pages,  # int32 [B, HK]
    block_table,  # int32 [B, HK, maxP]
    seqlens,  # int32 [B, HK]
    table,  # int32 [B, HK, K], out
    lens,  # int32 [B, HK], out
    stride_tb,
    stride_th,
    width,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kv_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = row * tl.num_programs(0) + kv_head
    left_out = tl.load(pages + group) - tl.load(count + group)
    tl.store(lens + group, tl.load(seqlens + group) - left_out * P)
    source = block_table + row * stride_tb + kv_head * stride_th
    for start in range(0, width, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        column = tl.load(index + group * width + entry, mask=entry < width, other=-1)
        page = tl.load(source + column, mask=column >= 0, other=0)
        tl.store(table + group * width + entry, page, mask=entry < width)


def update_bounds_triton(
    k: Tensor, page_min: Tensor, page_max: Tensor, block_table: Tensor, seqlens: Tensor,
    lengths: Tensor, page_size: int,
) -> None:  # fmt: skip
    """`update_bounds` as one launch, a program a page."""
    _check_bounds(k, page_min, page_max, block_table, seqlens, lengths)
    batch, heads, tokens, dim = k.shape
    touched = 1 if tokens == 1 else triton.cdiv(tokens, page_size) + 1
    _update_bounds_kernel[(touched, heads, batch)](
        k, page_min, page_max, block_table, seqlens.contiguous(), lengths,
        *k.stride()[:3], *block_table.stride()[:2], tokens,
        D=dim, BLOCK_D=padded_head_dim(dim), P=page_size, **launch_options(4, 1),
    )  # fmt: skip


def update_bounds_reference(
    k: Tensor, page_min: Tensor, page_max: Tensor, block_table: Tensor, seqlens: Tensor,
    lengths: Tensor, page_size: int,
) -> None:  # fmt: skip
    """`update_bounds` by a scatter over the pages of each token."""
    _check_bounds(k, page_min, page_max, block_table, seqlens, lengths)
    tokens, dim = k.shape[2:]
    token = torch.arange(tokens, device=k.device)
    slot = seqlens[..., None] - tokens + token  # [B, HK, T]
    first = (seqlens - lengths[:, None])[..., None]
    column = slot.clamp_min(0) // page_size
    page = block_table.long().gather(-1, column)
    # Tokens of padding and pages whose first slot is new: nothing of what stood there counts.
    new = slot >= first
    fresh = page[new & (column * page_size >= first)]
    page_min[fresh], page_max[fresh] = torch.inf, -torch.inf
    at = page[new][:, None].expand(-1, dim)
    page_min.scatter_reduce_(0, at, k[new].to(page_min.dtype), "amin")
    page_max.scatter_reduce_(0, at, k[new].to(page_max.dtype), "amax")


def update_bounds(
    k: Tensor, page_min: Tensor, page_max: Tensor, block_table: Tensor, seqlens: Tensor,
    lengths: Tensor, page_size: int,
) -> None:  # fmt: skip
    """Fold keys into the bounds of the pages they were written to, in place.

    k [B,HK,T,D], of row b the last lengths[b] int32 [B] tokens, which took the last slots of each
    head: seqlens int32 [B,HK] counts them. page_min, page_max [N,D] in the dtype of k; block_table
    int32 [B,HK,maxP]. Raises ValueError on shapes, dtypes or strides that do not fit.
    """
    run = update_bounds_triton if k.is_cuda else update_bounds_reference
    run(k, page_min, page_max, block_table, seqlens, lengths, page_size)


def page_scores_triton(
    q: Tensor, page_min: Tensor, page_max: Tensor, block_table: Tensor, seqlens: Tensor,
    budget: Tensor, page_size: int, *, pin_ends: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`page_scores` as one launch on a grid that depends on shapes only."""
    _check_scores(q, page_min, page_max, block_table, seqlens, budget)
    batch, heads, capacity = block_table.shape
    dim = q.shape[-1]
    block_d = padded_head_dim(dim)
    scores = torch.empty(block_table.shape, dtype=torch.float32, device=q.device)
    pages, quota = torch.empty_like(seqlens), torch.empty_like(seqlens)
    _page_scores_kernel[(triton.cdiv(capacity, _CONFIG[block_d]), heads, batch)](
        q, page_min, page_max, block_table, seqlens, budget, scores, pages, quota,
        *q.stride()[:2], *block_table.stride()[:2], capacity,
        D=dim, BLOCK_D=block_d, G=q.shape[1] // heads, P=page_size, BLOCK_N=_CONFIG[block_d],
        PIN_ENDS=pin_ends, **launch_options(4, 1),
    )  # fmt: skip
    return scores, pages, quota


def page_scores_reference(
    q: Tensor, page_min: Tensor, page_max: Tensor, block_table: Tensor, seqlens: Tensor,
    budget: Tensor, page_size: int, *, pin_ends: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`page_scores` as it is defined; float64 queries are scored in float64."""
    _check_scores(q, page_min, page_max, block_table, seqlens, budget)
    heads, table = block_table.shape[1], block_table.long()
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    query = q.to(wide).unflatten(1, (heads, -1))  # [B, HK, G, D]
    low, high = page_min[table].to(wide), page_max[table].to(wide)  # [B, HK, maxP, D]
    scores = torch.full(table.shape, -torch.inf, dtype=wide, device=q.device)
    for head in query.unbind(2):
        x = head[:, :, None]
        scores = torch.maximum(scores, torch.maximum(x * low, x * high).sum(-1))
    pages = -(-seqlens // page_size)
    quota = torch.where(
        seqlens <= budget[:, None], pages, (budget[:, None] // page_size).clamp_min(2)
    )
    column = torch.arange(table.shape[-1], device=q.device)
    if pin_ends:
        ends = (column == 0) | (column == pages[..., None] - 1)
        scores = scores.clamp_max(_LARGEST.value).masked_fill(ends, torch.inf)
    return scores.masked_fill(column >= pages[..., None], -torch.inf), pages, quota.int()


def page_scores(
    q: Tensor, page_min: Tensor, page_max: Tensor, block_table: Tensor, seqlens: Tensor,
    budget: Tensor, page_size: int, *, pin_ends: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(U fp32 [B,HK,maxP], pages in use int32 [B,HK], pages to attend int32 [B,HK]).

    q [B,HQ,D] after RoPE; page_min, page_max [N,D]; block_table int32 [B,HK,maxP]; seqlens int32
    [B,HK]; budget int32 [B] in tokens. U is -inf beyond the pages in use; pin_ends: +inf for the
    first and the last of them, and for no other. Raises ValueError on what does not fit.
    """
    run = page_scores_triton if q.is_cuda else page_scores_reference
    return run(q, page_min, page_max, block_table, seqlens, budget, page_size, pin_ends=pin_ends)


def page_table_triton(
    index: Tensor, count: Tensor, pages: Tensor, block_table: Tensor, seqlens: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`page_table` as one launch, a program a head."""
    _check_table(index, count, pages, block_table, seqlens)
    batch, heads, width = index.shape
    table, lens = torch.empty_like(index), torch.empty_like(seqlens)
    _page_table_kernel[(heads, batch)](
        index, count, pages, block_table, seqlens, table, lens, *block_table.stride()[:2], width,
        P=page_size, BLOCK=_TABLE_BLOCK, **launch_options(4, 1),
    )  # fmt: skip
    return table, lens


def page_table_reference(
    index: Tensor, count: Tensor, pages: Tensor, block_table: Tensor, seqlens: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`page_table` by a gather."""
    _check_table(index, count, pages, block_table, seqlens)
    chosen = block_table.gather(-1, index.clamp_min(0).long())
    return torch.where(index >= 0, chosen, 0), seqlens - (pages - count) * page_size


def page_table(
    index: Tensor, count: Tensor, pages: Tensor, block_table: Tensor, seqlens: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Block table int32 [B,HK,K] and lengths int32 [B,HK] of chosen pages.

    index int32 [B,HK,K]: page numbers in ascending order, the last page in use among them, then -1;
    count int32 [B,HK]: how many; pages int32 [B,HK]: how many are in use; block_table int32
    [B,HK,maxP] and seqlens int32 [B,HK] of the whole cache. Raises ValueError on what does not fit.
    """
    run = page_table_triton if index.is_cuda else page_table_reference
    return run(index, count, pages, block_table, seqlens, page_size)


def _check_bounds(k, page_min, page_max, block_table, seqlens, lengths) -> None:
    check_shape("k", k, (None, None, None, None))
    check_last_contiguous("k", k)
    _check_pages(page_min, page_max, k, block_table, seqlens)
    check_shape("lengths", lengths, k.shape[:1])
    check_dtype("lengths", lengths, torch.int32)
    check_last_contiguous("lengths", lengths)
    check_shape("block_table", block_table, (*k.shape[:2], None))


def _check_scores(q, page_min, page_max, block_table, seqlens, budget) -> None:
    check_shape("q", q, (None, None, None))
    check_last_contiguous("q", q)
    _check_pages(page_min, page_max, q, block_table, seqlens)
    check_heads(q.shape[1], block_table.shape[1])
    check_shape("budget", budget, q.shape[:1])
    check_dtype("budget", budget, torch.int32)
    check_last_contiguous("budget", budget)


def _check_pages(page_min, page_max, x, block_table, seqlens) -> None:
    for name, bound in (("page_min", page_min), ("page_max", page_max)):
        check_shape(name, bound, (None, x.shape[-1]))
        check_dtype(name, bound, x.dtype)
        if not bound.is_contiguous():
            raise ValueError(f"expected contiguous {name}, got strides {bound.stride()}")
    check_shape("block_table", block_table, (x.shape[0], None, None))
    check_last_contiguous("block_table", block_table)
    check_shape("seqlens", seqlens, block_table.shape[:2])
    for name, x in (("block_table", block_table), ("seqlens", seqlens)):
        check_dtype(name, x, torch.int32)


def _check_table(index, count, pages, block_table, seqlens) -> None:
    check_shape("index", index, (*block_table.shape[:2], None))
    check_last_contiguous("block_table", block_table)
    for name, x in (("count", count), ("pages", pages), ("seqlens", seqlens)):
        check_shape(name, x, index.shape[:2])
    for name, x in (("index", index), ("count", count), ("pages", pages), ("seqlens", seqlens)):
        check_dtype(name, x, torch.int32)
        if not x.is_contiguous():
            raise ValueError(f"expected contiguous {name}, got strides {x.stride()}")


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) with G = 4, P = 16."""
    rows = []
    ints = dict.fromkeys(("block_table", "seqlens", "lengths", "budget", "pages", "quota"), "*i32")
    ints |= dict.fromkeys(("index", "count", "table", "lens"), "*i32")
    types = ints | dict.fromkeys(("k", "q", "page_min", "page_max"), "*bf16")
    types |= {"scores": "*fp32"} | dict.fromkeys(("tokens", "capacity", "width"), "i32")
    cases = [(_page_table_kernel, {"P": 16, "BLOCK": _TABLE_BLOCK})]
    for d, pages in _CONFIG.items():
        if d >= 64:
            shape = {"D": d, "BLOCK_D": d, "P": 16}
            more = {"G": 4, "BLOCK_N": pages, "PIN_ENDS": True}
            cases += [(_update_bounds_kernel, shape), (_page_scores_kernel, shape | more)]
    for arch in ARCHS:
        for kernel, constexprs in cases:
            given = {name: kind for name, kind in types.items() if name in kernel.arg_names}
            rows.append(aot_row(kernel, arch, given, constexprs, launch_options(4, 1)))
    return rows
