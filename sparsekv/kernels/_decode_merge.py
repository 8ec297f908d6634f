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
BLOCK_S = 512  # slots a program of the probabilities


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
    head, row = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
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


@triton.jit
def probs_kernel(
    weights,  # fp16 [B, HQ, S]
    tile_max,  # fp32 [B, HQ, tiles]
    seqlens,  # int32 [B, HK]
    lse,  # fp32 [B, HQ]
    probs,  # fp32 [B, HQ, S] for REDUCE = "none", else [B, HK, S]
    capacity,  # S
    G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    kv_head, row = tl.program_id(1), tl.program_id(2)
    group = (row * tl.num_programs(1) + kv_head).to(tl.int64)
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    valid = slot < tl.load(seqlens + group)
    tiles = tl.cdiv(capacity, BLOCK_N)

    total = tl.zeros([BLOCK_S], tl.float32)
    for g in range(G):
        head = group * G + g
        w = tl.load(weights + head * capacity + slot, mask=valid, other=0.0).to(tl.float32)
        m = tl.load(tile_max + head * tiles + slot // BLOCK_N, mask=valid, other=float("-inf"))
        lse_row = tl.load(lse + head)
        lse_row = tl.where(lse_row == float("-inf"), 0.0, lse_row)  # then every m is -inf too
        p = w * tl.exp2(m - lse_row * LOG2E)  # [BLOCK_S]
        if REDUCE == "none":
            tl.store(probs + head * capacity + slot, p, mask=slot < capacity)
        elif REDUCE == "max":
            total = tl.maximum(total, p)
        else:
            total += p
    if REDUCE == "mean":
        total = total / G
    if REDUCE != "none":
        tl.store(probs + group * capacity + slot, total, mask=slot < capacity)


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


def _chunks_a_step(chunks: int, head_dim: int) -> int:
    return max(2, min(64, MERGE_TILE // padded_head_dim(head_dim), triton.next_power_of_2(chunks)))


def probabilities(
    weights: Tensor, tile_max: Tensor, seqlens: Tensor, lse: Tensor, block_n: int, reduce: str
) -> Tensor:
    """fp32 [B,HQ,S] for reduce "none", else [B,HK,S], from weights [B,HQ,S]; 0 beyond a length."""
    B, HQ, capacity = weights.shape
    HK = seqlens.shape[1]
    heads = HQ if reduce == "none" else HK
    probs = torch.empty((B, heads, capacity), dtype=torch.float32, device=weights.device)
    probs_kernel[(triton.cdiv(capacity, BLOCK_S), HK, B)](
        weights,
        tile_max,
        seqlens,
        lse,
        probs,
        capacity,
        G=HQ // HK,
        BLOCK_N=block_n,
        BLOCK_S=BLOCK_S,
        REDUCE=reduce,
        **dependent_launch(weights.device, 4),
    )
    return probs


def merge_signatures() -> list[AotRow]:
    """Rows of `aot_signatures` for both kernels, with G = 4."""
    rows: list[AotRow] = []
    types = "*fp32 *fp32 *i32 *bf16 *bf16 *fp32 i32" + " constexpr" * 6
    signature = dict(zip(combine_kernel.arg_names, types.split(), strict=True))
    constexprs: dict[str, Any] = {"G": 4, "CHUNK": 256}
    types = "*fp16 *fp32 *i32 *fp32 *fp32 i32" + " constexpr" * 5
    probs_signature = dict(zip(probs_kernel.arg_names, types.split(), strict=True))
    probs_constexprs: dict[str, Any] = {"G": 4, "BLOCK_N": 64, "BLOCK_S": BLOCK_S}
    options = launch_options(4, 1)
    for arch in ARCHS:
        constexprs = constexprs | {"PDL": arch in PDL_ARCHS}
        probs_constexprs = probs_constexprs | {"PDL": arch in PDL_ARCHS}
        for d in (64, 128, 256) if arch == "sm90" else (128,):
            dims = {"D": d, "BLOCK_D": d, "BLOCK_C": _chunks_a_step(64, d)}
            rows.append((combine_kernel, signature, constexprs | dims, options, arch))
        for reduce in ("none", "mean", "max") if arch == "sm90" else ("mean",):
            mode = {"REDUCE": reduce}
            rows.append((probs_kernel, probs_signature, probs_constexprs | mode, options, arch))
    return rows
