"""Attention that every cached token has received so far, kept beside a paged cache.

For row b of a step with one query q, the newest of its n tokens, KV head h and its G query heads:

    p_gj  =  softmax_j(softmax_scale <q_hg, k_j>)                 j < n, with a softcap where given
    sums[table[b, j // P], h, j % P]  =  reduce_g p_gj  +  (what was there, or 0 for j = n - 1)

The newest token starts from 0, whatever another request has left in its place. Rows of no or of
several queries, and those of slot -1, padding, are left alone: prompts have `column_scores`.

One program owns a row and a KV head: it reads the keys twice, for the sum and then for what each
has of it, the second time from L2. The grid and the arguments are the same in every step, all that
differs is read from tensors (CUDA graphs). No atomics: a token's place has one owner.
"""

from __future__ import annotations

from typing import Any

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
    check_last_contiguous,
    check_reduction,
    check_shape,
    launch_options,
    lookup,
    padded_head_dim,
)

# (arch, padded head_dim) -> (keys a tile, num_warps, num_stages)
_CONFIG = {(arch, d): (128, 4, 3) for arch in ARCHS for d in (16, 32, 64, 128)}
_CONFIG |= {(arch, 256): (64, 4, 2) for arch in ARCHS}
_CONFIG |= {(arch, 128): (64, 4, 2) for arch in ("sm89", "sm120", "gfx942")}
_CONFIG |= {("fp32", d): (32, 4, 2) for d in (16, 32, 64, 128, 256)}


@triton.jit
def _logits(
    q_tile, keys, table, slot, n, P: tl.constexpr, stride_cn, stride_cp, offs_d, in_d,
    softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [BLOCK_G, BLOCK_N] of the keys in these slots, -inf beyond n; their blocks."""
    seen = slot < n
    block = tl.load(table + slot // P, mask=seen, other=0).to(tl.int64)
    x = block_logits(
        q_tile, keys, block, slot % P, seen, stride_cn, stride_cp, offs_d, in_d, softmax_scale,
        softcap, HAS_SOFTCAP,
    )  # fmt: skip
    return tl.where(seen[None, :], x, float("-inf")), block


@triton.jit
def _add_kernel(
    query,  # [T, HQ, D]
    keys,  # [N, HK, P, D]
    sums,  # fp32 [N, HK, P]
    query_start,  # int32 [B + 1]
    lengths,  # int32 [B]
    slots,  # int32 [B]
    table,  # int32 [B, M]
    stride_qt,
    stride_qh,
    stride_cn,
    stride_ch,
    stride_cp,
    stride_tb,
    softmax_scale,
    softcap,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    REDUCTION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(query_start + row).to(tl.int64)
    count = tl.load(query_start + row + 1) - token
    n = tl.load(lengths + row)
    if (count != 1) | (tl.load(slots + row) < 0):
        return
    offs_n, offs_d, offs_g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    in_d, in_g = (offs_d < D)[None, :], (offs_g < G)[:, None]
    q_rows = token * stride_qt + (head * G + offs_g) * stride_qh
    q_tile = tl.load(query + q_rows[:, None] + offs_d[None, :], mask=in_g & in_d, other=0.0)
    keys += head.to(tl.int64) * stride_ch
    table += row * stride_tb

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    for start in range(0, n, BLOCK_N):
        x, _ = _logits(
            q_tile, keys, table, start + offs_n, n, P, stride_cn, stride_cp, offs_d, in_d,
            softmax_scale, softcap, HAS_SOFTCAP,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(x, 1))
        l = l * tl.exp2(m - m_new) + tl.sum(tl.exp2(x - m_new[:, None]), 1)
        m = m_new

    for start in range(0, n, BLOCK_N):
        slot = start + offs_n
        x, block = _logits(
            q_tile, keys, table, slot, n, P, stride_cn, stride_cp, offs_d, in_d,
            softmax_scale, softcap, HAS_SOFTCAP,
        )  # fmt: skip
        p = tl.where(in_g, tl.exp2(x - m[:, None]) / l[:, None], 0.0)
        share = tl.max(p, 0) if REDUCTION == "max" else tl.sum(p, 0)
        if REDUCTION == "mean":
            share /= G
        places = sums + (block * tl.num_programs(0) + head) * P + slot % P
        old = tl.load(places, mask=slot < n - 1, other=0.0)
        tl.store(places, old + share, mask=slot < n)


def add_attention_triton(
    query: Tensor, keys: Tensor, sums: Tensor, query_start: Tensor, lengths: Tensor, slots: Tensor,
    table: Tensor, *, softmax_scale: float, softcap: float | None = None,
    reduction: Reduction = "mean",
) -> None:  # fmt: skip
    """`add_attention` in one launch on a constant grid; no host sync."""
    kv_heads, size, dim = keys.shape[1:]
    block_n, num_warps, num_stages = lookup(_CONFIG, query)
    group = query.shape[1] // kv_heads
    _add_kernel[(kv_heads, len(lengths))](
        query, keys, sums, query_start, lengths, slots, table,
        *query.stride()[:2], *keys.stride()[:3], table.stride(0),
        softmax_scale, 1.0 if softcap is None else softcap,
        G=group, D=dim, P=size, REDUCTION=reduction,
        BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_D=padded_head_dim(dim),
        BLOCK_N=block_n, HAS_SOFTCAP=softcap is not None,
        **launch_options(num_warps, num_stages),
    )  # fmt: skip


def add_attention_reference(
    query: Tensor, keys: Tensor, sums: Tensor, query_start: Tensor, lengths: Tensor, slots: Tensor,
    table: Tensor, *, softmax_scale: float, softcap: float | None = None,
    reduction: Reduction = "mean",
) -> None:  # fmt: skip
    """`add_attention` in plain torch, row by row."""
    kv_heads, size = keys.shape[1:3]
    starts = query_start.tolist()
    for row, (slot, n) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if slot < 0 or starts[row + 1] - starts[row] != 1:
            continue
        blocks = table[row, : -(-n // size)].long()
        held = keys[blocks].transpose(1, 2).flatten(0, 1)[:n].float()  # [n, HK, D]
        q = query[starts[row]].float().unflatten(0, (kv_heads, -1))
        x = torch.einsum("hgd,nhd->hgn", q, held) * softmax_scale
        p = (x if softcap is None else softcap * torch.tanh(x / softcap)).softmax(-1)
        share = p.amax(1) if reduction == "max" else p.sum(1)  # [HK, n]
        if reduction == "mean":
            share /= p.shape[1]
        before = sums[blocks].transpose(0, 1).flatten(1)  # [HK, blocks * size]
        before[:, n - 1] = 0
        before[:, :n] += share
        sums[blocks] = before.unflatten(1, (-1, size)).transpose(0, 1)


def add_attention(
    query: Tensor, keys: Tensor, sums: Tensor, query_start: Tensor, lengths: Tensor, slots: Tensor,
    table: Tensor, *, softmax_scale: float, softcap: float | None = None,
    reduction: Reduction = "mean",
) -> None:  # fmt: skip
    """Add what single queries attend to the running sums, in place; see the module's formulas.

    query [>= tokens, HQ, D]; keys [N, HK, P, D] of its dtype, the query's own included; sums fp32
    [N, HK, P], contiguous; query_start int32 [B + 1]; lengths, slots int32 [B]; table int32
    [B, M], the blocks of each row, none in two rows. Lengths of rows that are looked at are >= 1.
    reduction: over the G query heads of a KV head. ValueError on what does not fit together.
    """
    batch, (blocks, kv_heads, size, dim) = len(lengths), keys.shape
    check_heads(query.shape[1], kv_heads)
    check_shape("query", query, (None, None, dim))
    check_shape("sums", sums, (blocks, kv_heads, size))
    check_shape("query_start", query_start, (batch + 1,))
    check_shape("slots", slots, (batch,))
    check_shape("table", table, (batch, None))
    check_dtype("keys", keys, query.dtype)
    check_dtype("sums", sums, torch.float32)
    for name, x in (
        ("query_start", query_start), ("lengths", lengths), ("slots", slots), ("table", table),
    ):  # fmt: skip
        check_dtype(name, x, torch.int32)
        check_last_contiguous(name, x)
    for name, x in (("query", query), ("keys", keys)):
        check_last_contiguous(name, x)
    if not sums.is_contiguous():
        raise ValueError(f"expected contiguous sums, got strides {sums.stride()}")
    check_reduction(reduction)
    run = add_attention_triton if query.is_cuda else add_attention_reference
    run(
        query, keys, sums, query_start, lengths, slots, table, softmax_scale=softmax_scale,
        softcap=softcap, reduction=reduction,
    )  # fmt: skip


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of every configuration, G = 4."""
    types = dict.fromkeys(("query_start", "lengths", "slots", "table"), "*i32")
    types |= {"query": "*bf16", "keys": "*bf16", "sums": "*fp32"}
    types |= dict.fromkeys(("softmax_scale", "softcap"), "fp32")
    rows = []
    for (arch, d), (block_n, num_warps, num_stages) in _CONFIG.items():
        if arch in ARCHS and d >= 64:  # smaller head_dims share the tiles of 64
            shape: dict[str, Any] = {"G": 4, "D": d, "P": 32, "REDUCTION": "mean", "BLOCK_G": 16}
            shape |= {"BLOCK_D": d, "BLOCK_N": block_n, "HAS_SOFTCAP": True}
            options = launch_options(num_warps, num_stages)
            rows.append(aot_row(_add_kernel, arch, types, shape, options))
    return rows
