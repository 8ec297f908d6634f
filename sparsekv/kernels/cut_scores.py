"""Who stays pinned where blocks must go: scores of the candidates, in many layers at once.

See `_cut_layers` for what is held and who competes. `cut_scores` asks R queries of a ring, where
query r is that of the newest position = r modulo R:

    score_j = reduce_{g in group} sum_r A_grj          A the softmax over what the query sees of n

`sum_scores` reads what every query so far has given from running sums beside the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    AotRow,
    Reduction,
    aot_row,
    block_logits,
    check_dtype,
    check_heads,
    check_reduction,
    check_shape,
    launch_options,
    lookup,
    padded_head_dim,
)
from ._cut_layers import UNIT, PagedCuts, block_of, cache_strides, check_sums, cut_request, own_row

MAX_ROWS = 128  # queries of a ring that vote, at most

# (arch, padded head_dim) -> (keys a tile, num_warps, num_stages)
_CONFIG = {(arch, d): (64, 8, 2) for arch in ARCHS for d in (16, 32, 64, 128)}
_CONFIG |= {(arch, 256): (32, 8, 1) for arch in ARCHS}
_CONFIG |= {(arch, 128): (32, 8, 1) for arch in ("sm89", "sm120", "gfx942")}
_CONFIG |= {("fp32", d): (32, 8, 1) for d in (16, 32, 64, 128, 256)}
_SUM_BLOCK = 256


@triton.jit
def _vote_logits(
    q, cache, table, slot, end, pinned, gap, P: tl.constexpr, stride_cn, stride_cp, offs_d, in_d,
    softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [BLOCK_M, BLOCK_N] of the keys in these slots."""
    seen = slot < end
    return block_logits(
        q, cache, block_of(table, slot, seen, pinned, gap, P), slot % P, seen, stride_cn, stride_cp,
        offs_d, in_d, softmax_scale, softcap, HAS_SOFTCAP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def _vote_kernel(
    ring,  # [S, R, HQ, D] of the first layer
    cache,  # [N, HK, P, 2 D] of the first layer
    table,  # int32 [B, columns] of the first layer
    offsets,  # int64 [3, L]
    requests,  # int64 [5, M]
    scores,  # fp32 [L, M, HK, width], out
    stride_rs,
    stride_rr,
    stride_cn,
    stride_ch,
    stride_cp,
    stride_tb,
    pinned,
    width,
    softmax_scale,
    softcap,
    R: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,  # numbers of the cache in UNIT bytes
    REDUCTION: tl.constexpr,
    BLOCK_R: tl.constexpr,  # power of two >= R
    HEADS: tl.constexpr,  # query heads of a tile
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    head = tl.program_id(0)
    row, slot, computed, gap, candidates, at_cache, at_table, at_ring = cut_request(
        requests, offsets, P, pinned
    )
    n = computed - gap * P
    cache += at_cache * UNIT + head * stride_ch
    table += at_table * 4 + row * stride_tb
    ring += at_ring * UNIT + slot * stride_rs
    scores += own_row() * width
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    offs_m = tl.arange(0, HEADS * BLOCK_R)
    in_d = (offs_d < D)[None, :]
    r = offs_m % BLOCK_R
    # Of the slots held, the query's own: it sees those up to it.
    own = n - 1 - (computed - 1 - r % R) % R
    for tile in tl.static_range(TILES):
        g = tile * HEADS + offs_m // BLOCK_R
        votes = (r < R) & (g < G)
        q_rows = r * stride_rr + (head * G + g) * D
        q = tl.load(ring + q_rows[:, None] + offs_d[None, :], mask=votes[:, None] & in_d, other=0.0)
        m = tl.full([HEADS * BLOCK_R], float("-inf"), tl.float32)
        l = tl.zeros([HEADS * BLOCK_R], tl.float32)
        for start in range(0, n, BLOCK_N):
            held = start + offs_n
            x = _vote_logits(
                q, cache, table, held, n, pinned, gap, P, stride_cn, stride_cp, offs_d, in_d,
                softmax_scale, softcap, HAS_SOFTCAP,
            )  # fmt: skip
            x = tl.where(held[None, :] <= own[:, None], x, float("-inf"))
            m_new = tl.maximum(m, tl.max(x, 1))
            l = l * tl.exp2(m - m_new) + tl.sum(tl.exp2(x - m_new[:, None]), 1)
            m = m_new
        lse = m + tl.log2(l)
        for start in range(0, candidates, BLOCK_N):
            held = start + offs_n
            x = _vote_logits(
                q, cache, table, held, candidates, pinned, gap, P, stride_cn, stride_cp, offs_d,
                in_d, softmax_scale, softcap, HAS_SOFTCAP,
            )  # fmt: skip
            p = tl.where(votes[:, None], tl.exp2(x - lse[:, None]), 0.0)
            inside = held < candidates
            if REDUCTION == "max":
                share = tl.max(tl.sum(tl.reshape(p, [HEADS, BLOCK_R, BLOCK_N]), 1), 0)
                if tile > 0:
                    share = tl.maximum(share, tl.load(scores + held, mask=inside, other=0.0))
            else:
                share = tl.sum(p, 0)
                if REDUCTION == "mean":
                    share /= G
                if tile > 0:
                    share += tl.load(scores + held, mask=inside, other=0.0)
            tl.store(scores + held, share, mask=inside)
        if TILES > 1:
            tl.debug_barrier()  # the next tile reads what this one has written


@triton.jit(do_not_specialize=["width"])
def _sums_kernel(
    sums,  # fp32 [N, HK, P] of the first layer
    table,  # int32 [B, columns] of the first layer
    offsets,  # int64 [3, L]
    requests,  # int64 [5, M]
    scores,  # fp32 [L, M, HK, width], out
    stride_tb,
    pinned,
    width,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, heads = tl.program_id(0), tl.num_programs(0)
    row, _, _, gap, candidates, _, at_table, at_sums = cut_request(requests, offsets, P, pinned)
    sums += at_sums * 4
    table += at_table * 4 + row * stride_tb
    scores += own_row() * width
    for start in range(0, candidates, BLOCK):
        held = start + tl.arange(0, BLOCK)
        inside = held < candidates
        block = block_of(table, held, inside, pinned, gap, P)
        value = tl.load(sums + (block * heads + head) * P + held % P, mask=inside)
        tl.store(scores + held, value, mask=inside)


def cut_scores_triton(
    cuts: PagedCuts, *, softmax_scale: float, softcap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """`cut_scores` in one launch for all layers; no host sync."""
    ring, cache = cuts.others[0], cuts.caches[0]
    rows, heads, dim = ring.shape[1:]
    group = heads // cache.shape[1]
    scores = cuts.empty_scores()
    block_n, num_warps, num_stages = lookup(_CONFIG, ring[..., 0, :])
    block_r, tile = _vote_tile(rows, group)
    _vote_kernel[cuts.grid](
        ring, cache, cuts.tables[0], cuts.offsets, cuts.requests, scores,
        ring.stride(0), ring.stride(1), *cache_strides(cache), cuts.tables[0].stride(0),
        cuts.pinned, cuts.width, softmax_scale, 1.0 if softcap is None else softcap,
        R=rows, G=group, D=dim, P=cache.shape[2], UNIT=UNIT // cache.element_size(),
        REDUCTION=reduction, BLOCK_R=block_r, HEADS=tile, TILES=triton.cdiv(group, tile),
        BLOCK_D=padded_head_dim(dim), BLOCK_N=block_n, HAS_SOFTCAP=softcap is not None,
        **launch_options(num_warps, num_stages),
    )  # fmt: skip
    return scores


def _vote_tile(rows: int, group: int) -> tuple[int, int]:
    """(padded rows, query heads) of a tile: at least 16 rows in all, at most 128."""
    block_r = triton.next_power_of_2(rows)
    heads = min(triton.next_power_of_2(group), max(1, MAX_ROWS // block_r))
    return max(block_r, 16 // heads), heads


def cut_scores_reference(
    cuts: PagedCuts, *, softmax_scale: float, softcap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """`cut_scores` in plain torch, request by request."""
    scores, candidates = cuts.empty_scores(), cuts.candidates().tolist()
    kv_heads, requests, layers = cuts.grid
    for layer in range(layers):
        ring, cache = cuts.others[layer], cuts.caches[layer]
        rows, dim = ring.shape[1], ring.shape[3]
        for m in range(requests):
            blocks, offsets = cuts.held(layer, m)
            keys, n = cache[blocks, :, offsets, :dim].float(), len(blocks)  # [n, HK, D]
            slot, computed = int(cuts.requests[1, m]), int(cuts.requests[2, m])
            r = torch.arange(rows, device=ring.device)
            own = n - 1 - (computed - 1 - r) % rows
            q = ring[slot].float().unflatten(1, (kv_heads, -1))  # [R, HK, G, D]
            x = torch.einsum("rhgd,nhd->hgrn", q, keys) * softmax_scale
            x = x if softcap is None else softcap * torch.tanh(x / softcap)
            hidden = torch.arange(n, device=ring.device) > own[:, None]
            shares = x.masked_fill(hidden, -torch.inf).softmax(-1).sum(2)  # [HK, G, n]
            reduced = shares.amax(1) if reduction == "max" else shares.sum(1)
            reduced = reduced / shares.shape[1] if reduction == "mean" else reduced
            scores[layer, m, :, : candidates[m]] = reduced[:, : candidates[m]]
    return scores


def cut_scores(
    cuts: PagedCuts, *, softmax_scale: float, softcap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """Scores fp32 [L, M, HK, width] by the queries in `cuts.others`; only candidates are written.

    reduction: over the G query heads of a KV head. Every query must be newer than the candidates.
    Raises ValueError for rings that do not fit the caches, or of more than 128 queries.
    """
    ring, cache = cuts.others[0], cuts.caches[0]
    check_shape("rings", ring, (None, None, None, cache.shape[3] // 2))
    check_dtype("rings", ring, cache.dtype)
    check_heads(ring.shape[2], cache.shape[1])
    if ring.shape[1] > MAX_ROWS:
        raise ValueError(f"expected at most {MAX_ROWS} voting queries, got {ring.shape[1]}")
    if not ring.is_contiguous():
        raise ValueError(f"expected contiguous rings, got strides {ring.stride()}")
    check_reduction(reduction)
    run = cut_scores_triton if cache.is_cuda else cut_scores_reference
    return run(cuts, softmax_scale=softmax_scale, softcap=softcap, reduction=reduction)


def sum_scores_triton(cuts: PagedCuts) -> Tensor:
    """`sum_scores` in one launch for all layers."""
    sums, cache, scores = cuts.others[0], cuts.caches[0], cuts.empty_scores()
    _sums_kernel[cuts.grid](
        sums, cuts.tables[0], cuts.offsets, cuts.requests, scores, cuts.tables[0].stride(0),
        cuts.pinned, cuts.width, P=cache.shape[2], BLOCK=_SUM_BLOCK, **launch_options(4, 1),
    )  # fmt: skip
    return scores


def sum_scores_reference(cuts: PagedCuts) -> Tensor:
    """`sum_scores` in plain torch, request by request."""
    scores, candidates = cuts.empty_scores(), cuts.candidates().tolist()
    for layer, sums in enumerate(cuts.others):
        for m, count in enumerate(candidates):
            blocks, offsets = cuts.held(layer, m)
            scores[layer, m, :, :count] = sums[blocks[:count], :, offsets[:count]].T
    return scores


def sum_scores(cuts: PagedCuts) -> Tensor:
    """Scores fp32 [L, M, HK, width]: the running sums in `cuts.others`; candidates are written.

    Raises ValueError for sums that do not fit the caches.
    """
    check_sums(cuts.others[0], cuts.caches[0])
    return (sum_scores_triton if cuts.caches[0].is_cuda else sum_scores_reference)(cuts)


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of every shipped configuration."""
    shared = {"offsets": "*i64", "requests": "*i64", "table": "*i32", "pinned": "i32"}
    shared |= {"scores": "*fp32", "width": "i32"}
    votes = shared | {"ring": "*bf16", "cache": "*bf16", "softmax_scale": "fp32", "softcap": "fp32"}
    sums = shared | {"sums": "*fp32"}
    block_r, tile = _vote_tile(32, 4)
    rows = []
    for (arch, dim), (block_n, num_warps, num_stages) in _CONFIG.items():
        if arch == "fp32":
            continue
        sizes = {"R": 32, "G": 4, "D": dim, "P": 32, "UNIT": 8, "REDUCTION": "max"}
        sizes |= {"BLOCK_R": block_r, "HEADS": tile, "TILES": 1, "HAS_SOFTCAP": False}
        sizes |= {"BLOCK_D": dim, "BLOCK_N": block_n}
        options = launch_options(num_warps, num_stages)
        rows.append(aot_row(_vote_kernel, arch, votes, sizes, options))
    for arch in ARCHS:
        constants = {"P": 32, "BLOCK": _SUM_BLOCK}
        rows.append(aot_row(_sums_kernel, arch, sums, constants, launch_options(4, 1)))
    return rows
