"""Prefill attention in Gluon for sm90: one producer warp, two consumer warpgroups (scratch).

Causal, nq == nk == T a multiple of 128, bf16, D = 128. The consumers own 64 rows each, share K and
V tiles, and keep the matrix units busy: the scores of the next tile are issued, then P V of the
last one, and the softmax runs under them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Renamed between triton 3.6 and 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
LOG2E_F = 1.4426950408889634


@gluon.jit
def _tile_of(r, tiles, T, HEADS_X: gl.constexpr, HQ: gl.constexpr, BM: gl.constexpr):
    """(head, first row, sequence) of turn r: longest first, in a snake over the programs."""
    n = gl.num_programs(0)
    p = gl.program_id(0)
    step = p
    if (r % 2 == 1) & (r < tiles // n):  # the last, partial round goes straight
        step = n - 1 - p
    tile = r * n + step
    blocks = T // BM
    hx = tile % HEADS_X
    rest = tile // HEADS_X
    block = rest % blocks
    rest = rest // blocks
    head = rest % (HQ // HEADS_X) * HEADS_X + hx
    return tile, head, (blocks - 1 - block) * BM, rest // (HQ // HEADS_X)


@gluon.jit
def _softmax(S, m, l, scale, diag, MASK: gl.constexpr, mma_s: gl.constexpr, BN: gl.constexpr):
    if MASK:
        cols = gl.arange(0, BN, gl.SliceLayout(0, mma_s))
        S = gl.where(cols[None, :] <= diag[:, None], S, float("-inf"))
    m_new = gl.maximum(m, gl.max(S, 1) * scale)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(S * scale - m_new[:, None])
    l = l * alpha + gl.sum(p, 1)
    return p, m_new, l, alpha


@gluon.jit
def _steps(
    acc, p, m, l, q, k_s, v_s, k_full, k_free, v_full, v_free, l_s, it, lo, hi, scale, rows,
    MASK: gl.constexpr, mma_s: gl.constexpr, mma_o: gl.constexpr, p_layout: gl.constexpr,
    ST: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Tiles lo .. hi; p holds the probabilities of tile lo - 1, whose P V is still owed."""
    for j in range(lo, hi):
        ki = it + j
        vi = ki - 1
        mbarrier.wait(k_full.index(ki % ST), ki // ST & 1)
        zero = gl.zeros([64, BN], gl.float32, mma_s)
        S = warpgroup_mma(q, k_s.index(ki % ST).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(vi % ST), vi // ST & 1)
        acc = warpgroup_mma(p, v_s.index(vi % ST), acc, is_async=True)
        S = warpgroup_mma_wait(1, deps=(S,))
        mbarrier.arrive(k_free.index(ki % ST), count=1)
        p32, m, l, alpha = _softmax(S, m, l, scale, rows - j * BN, MASK, mma_s, BN)
        # The row sums are written out (and never read): the assembler keeps memory operations in
        # front of the wait, and with them the exp2 that it would sink below it.
        l_s.store(l)
        acc, p32 = warpgroup_mma_wait(0, deps=(acc, p32))
        mbarrier.arrive(v_free.index(vi % ST), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, mma_o))[:, None]
        p = gl.convert_layout(p32.to(gl.bfloat16), p_layout)
    return acc, p, m, l


@gluon.jit
def _consumer(
    W: gl.constexpr, od, lse, T, B, tiles, scale, q_s, k_s, v_s, q_full, q_free, k_full, k_free,
    v_full, v_free, l_all, HQ: gl.constexpr, HEADS_X: gl.constexpr, ST: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    r_layout: gl.constexpr = gl.SliceLayout(1, mma_s)
    it = 0
    q = q_s.index(W)
    l_s = l_all.index(W)
    for r in range(gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))):
        _tile, head, m0, n = _tile_of(r, tiles, T, HEADS_X, HQ, 128)
        rows = m0 + W * 64 + gl.arange(0, 64, r_layout)
        full = m0 // BN
        hi = gl.cdiv(m0 + 128, BN)
        m = gl.full([64], float("-inf"), gl.float32, r_layout)
        l = gl.zeros([64], gl.float32, r_layout)
        acc = gl.zeros([64, D], gl.float32, mma_o)
        mbarrier.wait(q_full.index(W), r & 1)
        mbarrier.wait(k_full.index(it % ST), it // ST & 1)
        zero = gl.zeros([64, BN], gl.float32, mma_s)
        S = warpgroup_mma(q, k_s.index(it % ST).permute((1, 0)), zero, use_acc=False, is_async=True)
        S = warpgroup_mma_wait(0, deps=(S,))
        mbarrier.arrive(k_free.index(it % ST), count=1)
        p32, m, l, _alpha = _softmax(S, m, l, scale, rows, True, mma_s, BN)
        p = gl.convert_layout(p32.to(gl.bfloat16), p_layout)
        full = gl.maximum(full, 1)
        acc, p, m, l = _steps(
            acc, p, m, l, q, k_s, v_s, k_full, k_free, v_full, v_free, l_s, it, 1, full, scale,
            rows,
            False, mma_s, mma_o, p_layout, ST, BN,
        )  # fmt: skip
        acc, p, m, l = _steps(
            acc, p, m, l, q, k_s, v_s, k_full, k_free, v_full, v_free, l_s, it, full, hi, scale,
            rows,
            True, mma_s, mma_o, p_layout, ST, BN,
        )  # fmt: skip
        vi = it + hi - 1
        mbarrier.wait(v_full.index(vi % ST), vi // ST & 1)
        acc = warpgroup_mma(p, v_s.index(vi % ST), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(vi % ST), count=1)
        it += hi
        row0 = n * T + m0 + W * 64
        offs = row0 + gl.arange(0, 64, r_layout)
        gl.store(lse + head.to(gl.int64) * (B * T) + offs, (m + gl.log2(l)) * 0.6931471805599453)
        inv = gl.convert_layout(1.0 / l, gl.SliceLayout(1, mma_o))
        q.store((acc * inv[:, None]).to(gl.bfloat16))  # Q is no longer needed
        fence_async_shared()
        tma_store(od, [row0, head * D], q)
        tma.store_wait(0)
        mbarrier.arrive(q_free.index(W), count=1)


@gluon.jit
def _producer(
    qd, kd, vd, T, tiles, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    HQ: gl.constexpr, G: gl.constexpr, HEADS_X: gl.constexpr, ST: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    it = 0
    for r in range(gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))):
        _tile, head, m0, n = _tile_of(r, tiles, T, HEADS_X, HQ, 128)
        for w in gl.static_range(2):
            mbarrier.wait(q_free.index(w), (r & 1) ^ 1)
            mbarrier.expect(q_full.index(w), 64 * D * 2)
            tma_load(qd, [n * T + m0 + w * 64, head * D], q_full.index(w), q_s.index(w))
        hi = gl.cdiv(m0 + 128, BN)
        for j in range(hi):
            i = it + j
            row = n * T + j * BN
            slot = i % ST
            phase = (i // ST & 1) ^ 1
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), BN * D * 2)
            tma_load(kd, [row, head // G * D], k_full.index(slot), k_s.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), BN * D * 2)
            tma_load(vd, [row, head // G * D], v_full.index(slot), v_s.index(slot))
        it += hi


@gluon.jit(do_not_specialize=["T", "B", "tiles"])
def prefill_gluon_kernel(
    qd, kd, vd, od, lse, T, B, tiles, scale,
    HQ: gl.constexpr, G: gl.constexpr, HEADS_X: gl.constexpr, ST: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, CREGS: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], qd.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, D], kd.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [ST, BN, D], vd.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    l_all = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_free.index(w), count=1)
    for s in gl.static_range(ST):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)
        mbarrier.init(v_free.index(s), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, od, lse, T, B, tiles, scale, q_s, k_s, v_s, q_full, q_free, k_full, k_free,
                    v_full, v_free, l_all, HQ, HEADS_X, ST, BN, D,
                ),
            ),
            (
                _consumer,
                (
                    1, od, lse, T, B, tiles, scale, q_s, k_s, v_s, q_full, q_free, k_full, k_free,
                    v_full, v_free, l_all, HQ, HEADS_X, ST, BN, D,
                ),
            ),
            (
                _producer,
                (
                    qd, kd, vd, T, tiles, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full,
                    v_free, HQ, G, HEADS_X, ST, BN, D,
                ),
            ),
        ],
        [4, 1],
        [CREGS, 24],
    )  # fmt: skip


GLUON_DEFAULTS: dict[str, Any] = {"BN": 128, "ST": 2, "HEADS_X": 32, "PERSISTENT": 0}


def prefill_gluon(q: Tensor, k: Tensor, v: Tensor, B: int, options: dict[str, Any]):
    """A launcher () -> (out, lse)."""
    o = GLUON_DEFAULTS | options
    (tokens, heads, d), kv_heads = q.shape, k.shape[1]
    T = tokens // B
    out = torch.empty_like(q)
    lse = torch.empty(heads, tokens, device=q.device)

    def describe(x: Tensor, rows: int) -> TensorDescriptor:
        width = x.shape[1] * d
        layout = gl.NVMMASharedLayout.get_default_for([rows, d], gl.bfloat16)
        return TensorDescriptor(x, [tokens, width], [width, 1], [rows, d], layout)

    descriptors = (describe(q, 64), describe(k, o["BN"]), describe(v, o["BN"]), describe(out, 64))
    tiles = T // 128 * heads * B
    grid = (min(tiles, 132) if o["PERSISTENT"] else tiles,)

    def launch() -> tuple[Tensor, Tensor]:
        prefill_gluon_kernel[grid](
            *descriptors, lse, T, B, tiles, d**-0.5 * LOG2E_F, HQ=heads, G=heads // kv_heads,
            HEADS_X=o["HEADS_X"], ST=o["ST"], BN=o["BN"], D=d, CREGS=240, num_warps=4, maxnreg=168,
        )  # fmt: skip
        return out, lse

    return launch
