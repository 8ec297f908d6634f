"""Second half of paged decode: merge the chunks of a head, and turn raw weights into probabilities.

A chunk c of a head leaves m_c (base-2 running maximum), l_c = sum 2^(x_j - m_c) and
acc_c = sum 2^(x_j - m_c) v_j. With M = max_c m_c the merge is exact and in chunk order:

    l = sum_c l_c 2^(m_c - M),  out = sum_c acc_c 2^(m_c - M) / (l + 2^(sink - M)),
    lse = ln 2 * (M + log2(l + 2^(sink - M))).

A tile t leaves w_j = 2^(x_j - m_t) in fp16 and m_t in fp32, so p_j = w_j 2^(m_t - lse / ln 2): the
exponent is fp32, only the mantissa of a probability is rounded (storing x_j itself in 16 bits would
cost 2 % at |x| = 64).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ._common import (
    ARCHS,
    LN2,
    LOG2E,
    PDL_ARCHS,
    AotRow,
    dependent_launch,
    launch_options,
    padded_head_dim,
)

MERGE_TILE = 8192  # accumulators a step of the merge: 64 chunks of 128, 64 registers a thread
# Beside probabilities: programs with few registers, since many of them hide each other's latency.
SMALL_MERGE_TILE = 1024
BLOCK_S = 2048  # probabilities a program: slots times query heads of a KV head


@triton.jit
def softmax_finish(m, l, acc, sink):
    """(out [R, D], natural lse [R]) from m, l [R], acc [R, D]; sink: base-2 logits, -inf for none.

    Rows without a visible key (l = 0) give out = 0, lse = -inf, with a sink too.
    """
    m_all = tl.maximum(m, sink)
    m_safe = tl.where(m_all == float("-inf"), 0.0, m_all)  # -inf - -inf is NaN
    scale = tl.exp2(m - m_safe)
    total = l * scale + tl.exp2(sink - m_safe)
    empty = l == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (m_safe + tl.log2(total)) * LN2)
    return acc * (scale / total)[:, None], lse


@triton.jit
def _merge_head(
    part_acc, part_ml, seqlens, sinks, out, lse, head, row, num_heads, chunks,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one query head: its rows of out and lse."""
    index = (row * num_heads + head).to(tl.int64)
    n = tl.load(seqlens + row * (num_heads // G) + head // G)
    used = tl.cdiv(n, CHUNK)  # chunks that were written
    offs_c = tl.arange(0, BLOCK_C)
    offs_d = tl.arange(0, BLOCK_D)
    part_ml += index * chunks * 2
    part_acc += index * chunks * D

    # One pass with a running maximum: no load waits for another one.
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, used, BLOCK_C):
        c = start + offs_c
        m_c = tl.load(part_ml + c * 2, mask=c < used, other=float("-inf"))  # [BLOCK_C]
        l_c = tl.load(part_ml + c * 2 + 1, mask=c < used, other=0.0)
        tile = (c < used)[:, None] & (offs_d < D)[None, :]
        acc_c = tl.load(part_acc + c[:, None] * D + offs_d[None, :], mask=tile, other=0.0)
        m_new = tl.maximum(m, tl.max(m_c, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        w = tl.exp2(m_c - m_safe)
        old = tl.exp2(m - m_safe)
        l = l * old + tl.sum(l_c * w, 0)
        acc = acc * old[:, None] + tl.sum(acc_c * w[:, None], 0)[None, :]
        m = m_new

    one = tl.arange(0, 1)
    sink = tl.full([1], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head + one).to(tl.float32) * LOG2E
    o, lse_row = softmax_finish(m, l, acc, sink)
    tl.store(lse + index + one, lse_row)
    o_ptrs = out + index * D + one[:, None] + offs_d[None, :]  # [1, BLOCK_D]
    tl.store(o_ptrs, o.to(out.dtype.element_ty), mask=(offs_d < D)[None, :])


@triton.jit(do_not_specialize=["chunks"])
def combine_kernel(
    part_acc,  # fp32 [B, HQ, C, D]
    part_ml,  # fp32 [B, HQ, C, 2]
    seqlens,  # int32 [B, HK]
    sinks,  # float [HQ] or None
    out,  # [B, HQ, D]
    lse,  # fp32 [B, HQ]
    chunks,  # C
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    _merge_head(
        part_acc, part_ml, seqlens, sinks, out, lse, tl.program_id(0), tl.program_id(1),
        tl.num_programs(0), chunks, D, BLOCK_D, G, CHUNK, BLOCK_C,
    )  # fmt: skip


@triton.jit
def _group_lse(
    part_ml, sinks, group, first_head, used, chunks, G: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Base-2 lse [BLOCK_G] of a KV head's query heads from the (m, l) of their chunks; no key: 0,
    since every tile maximum is -inf then, too.
    """
    offs_g, offs_c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_C)
    rows = part_ml + (group * G + offs_g) * chunks * 2
    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    for start in range(0, used, BLOCK_C):
        c = start + offs_c
        there = (offs_g < G)[:, None] & (c < used)[None, :]
        m_c = tl.load(rows[:, None] + c[None, :] * 2, mask=there, other=float("-inf"))
        l_c = tl.load(rows[:, None] + c[None, :] * 2 + 1, mask=there, other=0.0)
        m_new = tl.maximum(m, tl.max(m_c, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp2(m - m_safe) + tl.sum(l_c * tl.exp2(m_c - m_safe[:, None]), 1)
        m = m_new
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    if sinks is not None:
        sink = tl.load(sinks + first_head + offs_g, mask=offs_g < G, other=float("-inf"))
        sink = sink.to(tl.float32) * LOG2E
        highest = tl.maximum(m_safe, sink)
        l = tl.where(l == 0.0, 0.0, l * tl.exp2(m_safe - highest) + tl.exp2(sink - highest))
        m_safe = highest
    return tl.where(l == 0.0, 0.0, m_safe + tl.log2(tl.where(l == 0.0, 1.0, l)))


@triton.jit(do_not_specialize=["chunks"])
def finish_kernel(
    part_acc,  # fp32 [B, HQ, C, D], or None where there is one chunk
    part_ml,  # fp32 [B, HQ, C, 2], or None
    weights,  # fp16 [B, HQ, S]
    tile_max,  # fp32 [B, HQ, tiles]
    seqlens,  # int32 [B, HK]
    sinks,  # float [HQ] or None
    out,  # [B, HQ, D]
    lse,  # fp32 [B, HQ]
    probs,  # fp32 [B, HQ, S] for REDUCE = "none", else [B, HK, S]
    chunks,  # C
    capacity,  # S
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The probabilities of BLOCK_S slots a program; the last G programs of a KV head merge chunks.

    Every program finds the lse of its heads by itself, so nothing waits for a merge.
    """
    if PDL:
        gdc_wait()
    kv_head, row = tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    group = (row * num_kv_heads + kv_head).to(tl.int64)
    blocks = tl.cdiv(capacity, BLOCK_S)
    if part_ml is not None:  # noqa: SIM102, only the outer condition is known to the compiler
        if tl.program_id(0) >= blocks:
            head = kv_head * G + tl.program_id(0) - blocks
            _merge_head(
                part_acc, part_ml, seqlens, sinks, out, lse, head, row, num_kv_heads * G, chunks,
                D, BLOCK_D, G, CHUNK, BLOCK_C,
            )  # fmt: skip
            return
    offs_g = tl.arange(0, BLOCK_G)
    in_g = offs_g < G
    n = tl.load(seqlens + group)
    # Loads first: they do not depend on the lse, which takes a chain of its own.
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    valid = in_g[:, None] & (slot < n)[None, :]
    head = group * G + offs_g
    tiles = tl.cdiv(capacity, BLOCK_N)
    w = tl.load(weights + (head * capacity)[:, None] + slot[None, :], mask=valid, other=0.0)
    at = (head * tiles)[:, None] + (slot // BLOCK_N)[None, :]
    m = tl.load(tile_max + at, mask=valid, other=float("-inf"))
    if part_ml is None:
        lse2 = tl.load(lse + group * G + offs_g, mask=in_g, other=0.0) * LOG2E
        lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)  # then every m is -inf too
    else:
        used = tl.cdiv(n, CHUNK)
        lse2 = _group_lse(part_ml, sinks, group, kv_head * G, used, chunks, G, BLOCK_G, BLOCK_C)
    p = w.to(tl.float32) * tl.exp2(m - lse2[:, None])  # [BLOCK_G, BLOCK_S]
    inside = slot < capacity
    if REDUCE == "none":
        place = probs + (head * capacity)[:, None] + slot[None, :]
        tl.store(place, p, mask=in_g[:, None] & inside[None, :])
    else:
        if REDUCE == "max":
            total = tl.max(p, 0)
        else:
            total = tl.sum(p, 0)
        if REDUCE == "mean":
            total = total / G
        tl.store(probs + group * capacity + slot, total, mask=inside)


def combine(
    part_acc: Tensor,
    part_ml: Tensor,
    seqlens: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    chunk: int,
) -> None:
    """Merge part_acc [B,HQ,C,D] and part_ml [B,HQ,C,2] into out [B,HQ,D] and lse [B,HQ]."""
    B, HQ, chunks, D = part_acc.shape
    combine_kernel[(HQ, B)](
        part_acc,
        part_ml,
        seqlens,
        sinks,
        out,
        lse,
        chunks,
        D=D,
        BLOCK_D=padded_head_dim(D),
        G=HQ // seqlens.shape[1],
        CHUNK=chunk,
        BLOCK_C=_chunks_a_step(chunks, D),
        **dependent_launch(part_acc.device, 4),
    )


def _chunks_a_step(chunks: int, head_dim: int, tile: int = MERGE_TILE) -> int:
    return max(2, min(64, tile // padded_head_dim(head_dim), triton.next_power_of_2(chunks)))


def probabilities(
    raw: tuple[Tensor, Tensor],
    parts: tuple[Tensor, Tensor] | None,
    seqlens: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    chunk: int,
    block_n: int,
    reduce: str,
) -> Tensor:
    """fp32 [B,HQ,S] for reduce "none", else [B,HK,S], 0 beyond a length; merges as `combine`.

    raw: weights fp16 [B,HQ,S] and tile maxima. parts: as `combine` takes them, or None where one
    chunk has written out and lse.
    """
    weights, tile_max = raw
    B, HQ, capacity = weights.shape
    HK, D = seqlens.shape[1], out.shape[2]
    G, chunks = HQ // HK, 1 if parts is None else parts[0].shape[2]
    heads = HQ if reduce == "none" else HK
    probs = torch.empty((B, heads, capacity), dtype=torch.float32, device=weights.device)
    block_g = triton.next_power_of_2(G)
    block_s = max(64, BLOCK_S // block_g)
    merges = 0 if parts is None else G
    finish_kernel[(triton.cdiv(capacity, block_s) + merges, HK, B)](
        *(parts or (None, None)), weights, tile_max, seqlens, sinks if parts else None, out, lse,
        probs, chunks, capacity,
        D=D, BLOCK_D=padded_head_dim(D), G=G, BLOCK_G=block_g, CHUNK=chunk,
        BLOCK_C=_chunks_a_step(chunks, D, SMALL_MERGE_TILE), BLOCK_N=block_n, BLOCK_S=block_s,
        REDUCE=reduce,
        **dependent_launch(weights.device, 4),
    )  # fmt: skip
    return probs


def merge_signatures() -> list[AotRow]:
    """Rows of `aot_signatures` for both kernels, with G = 4."""
    rows: list[AotRow] = []
    fixed: dict[str, Any] = {"G": 4, "CHUNK": 256}
    options = launch_options(4, 1)
    for arch in ARCHS:
        fixed = fixed | {"PDL": arch in PDL_ARCHS}
        for d in (64, 128, 256) if arch == "sm90" else (128,):
            dims = {"D": d, "BLOCK_D": d, "BLOCK_C": _chunks_a_step(64, d)}
            types = "*fp32 *fp32 *i32 *bf16 *bf16 *fp32 i32" + " constexpr" * 6
            signature = dict(zip(combine_kernel.arg_names, types.split(), strict=True))
            rows.append((combine_kernel, signature, fixed | dims, options, arch))
        dims = {"D": 128, "BLOCK_D": 128, "BLOCK_C": _chunks_a_step(64, 128, SMALL_MERGE_TILE)}
        tiles = {"BLOCK_G": 4, "BLOCK_N": 64, "BLOCK_S": BLOCK_S // 4}
        for reduce in ("none", "mean", "max") if arch == "sm90" else ("mean",):
            for merges in (True, False):
                parts = "*fp32 *fp32 " if merges else "constexpr constexpr "
                types = parts + "*fp16 *fp32 *i32 *bf16 *bf16 *fp32 *fp32 i32 i32"
                types += " constexpr" * 10
                signature = dict(zip(finish_kernel.arg_names, types.split(), strict=True))
                none = {} if merges else {"part_acc": None, "part_ml": None}
                constants = fixed | dims | tiles | none | {"REDUCE": reduce}
                rows.append((finish_kernel, signature, constants, options, arch))
    return rows
