"""Kernel variants under measurement: every switch of the prefill and column kernels in one place.

Scratch for `sweep_configs.py`: causal, bottom-right = top-left (nq == nk), bf16, D = padded D,
B sequences of T tokens. Product kernels take over what the measurement justifies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E_F = 1.4426950408889634


@triton.jit
def _softmax_step(
    x, m, l, acc, scale, diag,
    MASK: tl.constexpr, RESCALE: tl.constexpr, LANES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(p, m, l_scaled, acc_scaled, row_sum). diag [BM]: column j is seen while j <= diag."""
    if MASK:
        x = tl.where(tl.arange(0, BN)[None, :] <= diag[:, None], x, float("-inf"))
    top = tl.max(x, 1) * scale
    if RESCALE == 1:  # rescale only where some row's maximum grew by more than 2^8
        m_new = tl.maximum(m, top)
        if tl.max(m_new - m, 0) > 8.0:
            alpha = tl.exp2(m - m_new)
            acc = acc * alpha[:, None]
            l = l * (alpha[:, None] if LANES else alpha)
            m = m_new
        m_new = m
    else:
        m_new = tl.maximum(m, top)
        alpha = tl.exp2(m - m_new)
        acc = acc * alpha[:, None]
        l = l * (alpha[:, None] if LANES else alpha)
    p = tl.exp2(x * scale - m_new[:, None])
    return p, m_new, l, acc


@triton.jit
def _row_sum(p, LANES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    if LANES:  # the four lanes that share a row in the wgmma layout keep their own sums
        return tl.sum(tl.sum(tl.reshape(p, (BM, BN // 8, 4, 2)), 3), 1)
    else:
        return tl.sum(p, 1)


@triton.jit
def _load_k(kd, k, stride_kt, row, col, USE_TMA: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    if USE_TMA:
        return kd.load([row, col])
    offs = (row + tl.arange(0, BN)).to(tl.int64)[:, None] * stride_kt
    return tl.load(k + offs + col + tl.arange(0, D)[None, :])


@triton.jit
def _attend(
    acc, m, l, q, kd, vd, k, v, stride_kt, row0, col, offs_m, lo, hi, scale,
    MASK: tl.constexpr, LATE: tl.constexpr, RESCALE: tl.constexpr, LANES: tl.constexpr,
    USE_TMA: tl.constexpr, FLAT: tl.constexpr, WS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    for start in tl.range(lo, hi, BN, warp_specialize=WS):
        kt = _load_k(kd, k, stride_kt, row0 + start, col, USE_TMA, BN, D)
        x = tl.dot(q, kt.T)
        p, m, l, acc = _softmax_step(
            x, m, l, acc, scale, offs_m - start, MASK, RESCALE, LANES, BM, BN
        )
        if not LATE:
            l += _row_sum(p, LANES, BM, BN)
        vt = _load_k(vd, v, stride_kt, row0 + start, col, USE_TMA, BN, D)
        acc = tl.dot(p.to(vt.dtype), vt, acc)
        if LATE:
            l += _row_sum(p, LANES, BM, BN)
    return acc, m, l


@triton.jit
def _attend_ahead(
    acc, m, l, x, q, kd, vd, k, v, stride_kt, row0, col, offs_m, lo, hi, scale,
    MASK: tl.constexpr, RESCALE: tl.constexpr, LANES: tl.constexpr, USE_TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """x: the raw dots of tile lo; each turn starts those of the next tile before its softmax."""
    for start in tl.range(lo, hi, BN):
        kt = _load_k(kd, k, stride_kt, row0 + start + BN, col, USE_TMA, BN, D)
        x_next = tl.dot(q, kt.T)
        p, m, l, acc = _softmax_step(
            x, m, l, acc, scale, offs_m - start, MASK, RESCALE, LANES, BM, BN
        )
        vt = _load_k(vd, v, stride_kt, row0 + start, col, USE_TMA, BN, D)
        acc = tl.dot(p.to(vt.dtype), vt, acc)
        l += _row_sum(p, LANES, BM, BN)
        x = x_next
    return acc, m, l, x


@triton.jit
def _prefill_tile(
    tile, q, k, v, kd, vd, out, lse, T, B, stride_kt, scale,
    HQ: tl.constexpr, G: tl.constexpr, HEADS_X: tl.constexpr, SEQ_INNER: tl.constexpr,
    LATE: tl.constexpr, RESCALE: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr,
    USE_TMA: tl.constexpr, FLAT: tl.constexpr, WS: tl.constexpr,
    PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """PACK: the BM rows are BM // G tokens x the G heads of a KV head (HEADS_X: KV heads)."""
    HEADS: tl.constexpr = HQ // G if PACK else HQ
    TOKENS: tl.constexpr = BM // G if PACK else BM
    blocks = tl.cdiv(T, TOKENS)
    # tile -> (head inside HEADS_X fastest, then the sequence or the block, then the rest)
    hx = tile % HEADS_X
    rest = tile // HEADS_X
    if SEQ_INNER:
        n = rest % B
        rest = rest // B
        block = rest % blocks
        hy = rest // blocks
    else:
        block = rest % blocks
        rest = rest // blocks
        hy = rest % (HEADS // HEADS_X)
        n = rest // (HEADS // HEADS_X)
    head = hy * HEADS_X + hx
    m0 = (blocks - 1 - block) * TOKENS
    offs_d = tl.arange(0, D)
    if PACK:
        offs_m = m0 + tl.arange(0, BM) // G
        heads = head * G + tl.arange(0, BM) % G
        col = head * D
    else:
        offs_m = m0 + tl.arange(0, BM)
        heads = tl.full([BM], 0, tl.int32) + head
        col = head // G * D
    row0 = n * T
    rows = (row0 + offs_m).to(tl.int64)
    ok = offs_m < T
    ptrs = (rows * HQ + heads)[:, None] * D + offs_d[None, :]
    qt = tl.load(q + ptrs, mask=ok[:, None], other=0.0)
    acc = tl.zeros([BM, D], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    if LANES:
        l = tl.zeros([BM, 4], tl.float32)
    else:
        l = tl.zeros([BM], tl.float32)
    full_hi = (m0 + 1) // BN * BN
    hi = tl.minimum(m0 + TOKENS, T)
    if RESCALE == 1:
        m = tl.full([BM], -1e30, tl.float32)
    if AHEAD:
        x = tl.dot(qt, _load_k(kd, k, stride_kt, row0, col, USE_TMA, BN, D).T)
        acc, m, l, x = _attend_ahead(
            acc, m, l, x, qt, kd, vd, k, v, stride_kt, row0, col, offs_m, 0, full_hi, scale,
            False, RESCALE, LANES, USE_TMA, BM, BN, D,
        )  # fmt: skip
        acc, m, l, x = _attend_ahead(
            acc, m, l, x, qt, kd, vd, k, v, stride_kt, row0, col, offs_m, full_hi, hi, scale,
            True, RESCALE, LANES, USE_TMA, BM, BN, D,
        )  # fmt: skip
    else:
        acc, m, l = _attend(
            acc, m, l, qt, kd, vd, k, v, stride_kt, row0, col, offs_m, 0, full_hi, scale,
            False, LATE, RESCALE, LANES, USE_TMA, FLAT, WS, BM, BN, D,
        )  # fmt: skip
        acc, m, l = _attend(
            acc, m, l, qt, kd, vd, k, v, stride_kt, row0, col, offs_m, full_hi, hi, scale,
            True, LATE, RESCALE, LANES, USE_TMA, FLAT, False, BM, BN, D,
        )  # fmt: skip
    if LANES:
        l = tl.sum(l, 1)
    tl.store(lse + heads.to(tl.int64) * (B * T) + rows, (m + tl.log2(l)) * LN2, mask=ok)
    tl.store(out + ptrs, (acc / l[:, None]).to(out.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["T", "B", "tiles"])
def prefill_variant_kernel(
    q, k, v, kd, vd, out, lse, T, B, tiles, stride_kt, scale,
    HQ: tl.constexpr, G: tl.constexpr, HEADS_X: tl.constexpr, SEQ_INNER: tl.constexpr,
    LATE: tl.constexpr, RESCALE: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr,
    USE_TMA: tl.constexpr, PERSISTENT: tl.constexpr, FLAT: tl.constexpr, WS: tl.constexpr,
    PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:  # longest first, in a snake: program p takes p, 2n - 1 - p, 2n + p, ...
        n = tl.num_programs(0)
        p = tl.program_id(0)
        for r in tl.range(0, tl.cdiv(tiles, n), flatten=FLAT):
            tile = r * n + tl.where(r % 2 == 0, p, n - 1 - p)
            if tile < tiles:
                _prefill_tile(
                    tile, q, k, v, kd, vd, out, lse, T, B, stride_kt, scale,
                    HQ, G, HEADS_X, SEQ_INNER, LATE, RESCALE, LANES, AHEAD, USE_TMA, FLAT, WS,
                    PACK, BM, BN, D,
                )  # fmt: skip
    else:
        _prefill_tile(
            tl.program_id(0), q, k, v, kd, vd, out, lse, T, B, stride_kt, scale,
            HQ, G, HEADS_X, SEQ_INNER, LATE, RESCALE, LANES, AHEAD, USE_TMA, FLAT, WS,
            PACK, BM, BN, D,
        )  # fmt: skip


PREFILL_DEFAULTS: dict[str, Any] = {
    "BM": 64, "BN": 64, "warps": 4, "stages": 3, "HEADS_X": 32, "SEQ_INNER": False, "LATE": True,
    "RESCALE": 0, "LANES": False, "AHEAD": False, "USE_TMA": True, "PERSISTENT": 0, "FLAT": False,
    "WS": False, "PACK": False,
}  # fmt: skip


def prefill_variant(q: Tensor, k: Tensor, v: Tensor, B: int, options: dict[str, Any]):
    """A launcher () -> (out, lse) for q [B T, HQ, D], k and v [B T, HK, D] contiguous."""
    o = PREFILL_DEFAULTS | options
    (tokens, heads, d), kv_heads = q.shape, k.shape[1]
    T, G = tokens // B, heads // kv_heads
    out = torch.empty_like(q)
    lse = torch.empty(heads, tokens, device=q.device)
    kd = vd = None
    if o["USE_TMA"]:
        box = [o["BN"], d]
        kd, vd = (
            TensorDescriptor(x, [tokens, kv_heads * d], [kv_heads * d, 1], box) for x in (k, v)
        )
    if o["PACK"]:
        o["HEADS_X"] = max(1, o["HEADS_X"] // G)
    rows, hs = (o["BM"] // G, kv_heads) if o["PACK"] else (o["BM"], heads)
    tiles = triton.cdiv(T, rows) * hs * B
    grid = (min(tiles, 132 * o["PERSISTENT"]) if o["PERSISTENT"] else tiles,)
    names = ("HEADS_X", "SEQ_INNER", "LATE", "RESCALE", "LANES", "AHEAD", "USE_TMA", "FLAT", "WS")
    constexprs = {name: o[name] for name in (*names, "PACK", "BM", "BN")}

    def launch() -> tuple[Tensor, Tensor]:
        prefill_variant_kernel[grid](
            q, k, v, kd, vd, out, lse, T, B, tiles, k.stride(0), d**-0.5 * LOG2E_F,
            HQ=heads, G=G, D=d, PERSISTENT=o["PERSISTENT"] > 0, **constexprs,
            num_warps=o["warps"], num_stages=o["stages"], enable_fp_fusion=True,
            **({"maxnreg": o["maxnreg"]} if "maxnreg" in o else {}),
        )  # fmt: skip
        return out, lse

    return launch


@triton.jit
def _poly_exp2(x):
    """exp2 of x <= ~0 on the FMA units: Cody-Waite and degree 5, relative error about 3e-7."""
    x = tl.maximum(x, -126.0)
    shifted = x + 12582912.0  # 1.5 * 2^23: the rounded integer is in the low mantissa bits
    whole = shifted - 12582912.0
    f = x - whole  # [-0.5, 0.5]
    y = 1.3390213e-3
    y = y * f + 9.6707e-3
    y = y * f + 5.55033e-2
    y = y * f + 2.402235e-1
    y = y * f + 6.931471e-1
    y = y * f + 1.0
    bits = y.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mixed_sum(x, POLY: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Sum over the last axis of exp2(x) [BN, BM]; a half or a quarter of it without the MUFU."""
    if POLY == 0:
        return tl.sum(tl.exp2(x), 1)
    # Split on a register bit of the accumulator layout (columns 8 apart): no data moves.
    parts = tl.permute(tl.reshape(x, (BN, BM // 16, 2, 8)), (0, 1, 3, 2))
    a, b = tl.split(parts)
    if POLY == 2:
        both = tl.sum(tl.exp2(a), 2) + tl.sum(_poly_exp2(b), 2)
        return tl.sum(both, 1)
    halves = tl.permute(tl.reshape(b, (BN, BM // 32, 2, 8)), (0, 1, 3, 2))
    c, e = tl.split(halves)
    first = tl.sum(tl.sum(tl.exp2(a), 2), 1)
    return first + tl.sum(tl.sum(tl.exp2(c), 2) + tl.sum(_poly_exp2(e), 2), 1)


@triton.jit
def _columns_zone(
    column, kt, qd, q, lse, row0, col, lse0, lo, hi, first, T, offs_n, scale, stride_qt,
    MASK: tl.constexpr, USE_TMA: tl.constexpr, LANES: tl.constexpr, POLY: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    for start in tl.range(lo, hi, BM):
        offs_m = start + tl.arange(0, BM)
        if USE_TMA:
            qt = qd.load([row0 + start, col])
        elif MASK:
            ptrs = q + (row0 + offs_m).to(tl.int64)[:, None] * stride_qt + col
            qt = tl.load(ptrs + tl.arange(0, D)[None, :], mask=(offs_m < T)[:, None], other=0.0)
        else:
            ptrs = q + (row0 + offs_m).to(tl.int64)[:, None] * stride_qt + col
            qt = tl.load(ptrs + tl.arange(0, D)[None, :])
        if MASK:
            ok = (offs_m >= first) & (offs_m < T)
            row_lse = tl.load(lse + lse0 + offs_m, mask=ok, other=float("inf"))
        else:
            row_lse = tl.load(lse + lse0 + offs_m)
        x = tl.dot(kt, qt.T) * scale - (row_lse * LOG2E)[None, :]
        if MASK:
            x = tl.where(offs_m[None, :] >= offs_n[:, None], x, float("-inf"))
        if LANES:
            p = tl.exp2(x)
            column += tl.sum(tl.sum(tl.reshape(p, (BN, BM // 8, 4, 2)), 3), 1)
        elif MASK:
            column += tl.sum(tl.exp2(x), 1)
        else:
            column += _mixed_sum(x, POLY, BN, BM)
    return column


@triton.jit(do_not_specialize=["T", "last_rows", "splits"])
def columns_variant_kernel(
    q, k, qd, kd, lse, partial, T, last_rows, splits, stride_qt, stride_kt, stride_lh, scale,
    HQ: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, ORDER: tl.constexpr,
    USE_TMA: tl.constexpr, LANES: tl.constexpr, POLY: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """partial [splits * G / HEADS, B, HK, T]: HEADS query heads a program; splits: row ranges.

    Grid: ORDER 0: (HK * G / HEADS * splits, key blocks, B), 1: blocks and heads swapped.
    """
    if ORDER == 0:
        pid, block = tl.program_id(0), tl.program_id(1)
    else:
        pid, block = tl.program_id(1), tl.program_id(0)
    n = tl.program_id(2)
    HK: tl.constexpr = HQ // G
    PARTS: tl.constexpr = G // HEADS
    head = pid % HK
    part = pid // HK % PARTS
    split = pid // (HK * PARTS)
    n0 = block * BN
    offs_n = n0 + tl.arange(0, BN)
    row0 = n * T
    if USE_TMA:
        kt = kd.load([row0 + n0, head * D])
    else:
        ptrs = k + (row0 + offs_n).to(tl.int64)[:, None] * stride_kt + head * D
        kt = tl.load(ptrs + tl.arange(0, D)[None, :], mask=(offs_n < T)[:, None], other=0.0)
    first = tl.maximum(0, T - last_rows)
    per_split = tl.cdiv(tl.cdiv(T - first, splits), BM) * BM
    first += split * per_split
    last = tl.minimum(T, first + per_split)
    lo = tl.maximum(first, n0)
    full_lo = tl.maximum(first, n0 + BN - 1)
    full_hi = tl.maximum(last, lo)
    full_lo = full_hi - tl.maximum(0, full_hi - full_lo) // BM * BM
    lo = full_lo - tl.cdiv(full_lo - lo, BM) * BM
    if LANES:
        column = tl.zeros([BN, 4], tl.float32)
    else:
        column = tl.zeros([BN], tl.float32)
    for g in range(HEADS):
        q_head = head * G + part * HEADS + g
        lse0 = q_head.to(tl.int64) * stride_lh + row0
        column = _columns_zone(
            column, kt, qd, q, lse, row0, q_head * D, lse0, lo, full_lo, first, last, offs_n, scale,
            stride_qt, True, USE_TMA, LANES, POLY, BN, BM, D,
        )  # fmt: skip
        column = _columns_zone(
            column, kt, qd, q, lse, row0, q_head * D, lse0, full_lo, full_hi, first, last, offs_n,
            scale, stride_qt, False, USE_TMA, LANES, POLY, BN, BM, D,
        )  # fmt: skip
    if LANES:
        column = tl.sum(column, 1)
    p_ptrs = partial + ((split * PARTS + part) * tl.num_programs(2) + n) * HK * T + head * T
    tl.store(p_ptrs + offs_n, column * (1.0 / G), mask=offs_n < T)


@triton.jit
def columns_reduce_kernel(partial, scores, size, parts, BLOCK: tl.constexpr):
    """scores [size] = sum over the first axis of partial [parts, size], in order."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(parts):
        total += tl.load(partial + part * size + offs, mask=offs < size, other=0.0)
    tl.store(scores + offs, total, mask=offs < size)


COLUMN_DEFAULTS: dict[str, Any] = {
    "BN": 128, "BM": 64, "warps": 4, "stages": 3, "HEADS": 4, "splits": 1, "ORDER": 0,
    "USE_TMA": True, "LANES": False, "POLY": 0,
}  # fmt: skip


def columns_variant(
    q: Tensor, k: Tensor, lse: Tensor, B: int, rows: int | None, options: dict[str, Any]
):
    """A launcher () -> scores [B, HK, T]."""
    o = COLUMN_DEFAULTS | options
    (tokens, heads, d), kv_heads = q.shape, k.shape[1]
    T, G = tokens // B, heads // kv_heads
    o["HEADS"] = min(o["HEADS"], G)
    parts = G // o["HEADS"] * o["splits"]
    partial = torch.empty(parts, B, kv_heads, T, device=q.device)
    scores = partial[0] if parts == 1 else torch.empty(B, kv_heads, T, device=q.device)
    qd = kd = None
    if o["USE_TMA"]:
        qd = TensorDescriptor(q, [tokens, heads * d], [heads * d, 1], [o["BM"], d])
        kd = TensorDescriptor(k, [tokens, kv_heads * d], [kv_heads * d, 1], [o["BN"], d])
    blocks, first = triton.cdiv(T, o["BN"]), kv_heads * parts
    grid = (first, blocks, B) if o["ORDER"] == 0 else (blocks, first, B)
    constexprs = {n: o[n] for n in ("HEADS", "ORDER", "USE_TMA", "LANES", "POLY", "BN", "BM")}

    def launch() -> Tensor:
        columns_variant_kernel[grid](
            q, k, qd, kd, lse, partial, T, T if rows is None else rows, o["splits"],
            q.stride(0), k.stride(0), lse.stride(0), d**-0.5 * LOG2E_F,
            HQ=heads, G=G, D=d, **constexprs,
            num_warps=o["warps"], num_stages=o["stages"], enable_fp_fusion=True,
        )  # fmt: skip
        if parts > 1:
            size = scores.numel()
            columns_reduce_kernel[(triton.cdiv(size, 1024),)](
                partial, scores, size, parts, BLOCK=1024, num_warps=4
            )
        return scores

    return launch
