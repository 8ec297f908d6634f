"""Parts of the prefill kernel: the key zones of a block of rows, the end of a row, idle rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import LN2, LOG2E


@triton.jit
def zones(m0, nq, nk, shift, window, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(lo, full_lo, full_hi, hi): keys lo .. hi are seen by some row of m0 .. m0 + BM, all of
    full_lo .. full_hi by every row. All but hi are multiples of BN, and full_lo <= full_hi.
    """
    hi = nk
    full_hi = nk // BN * BN
    if CAUSAL:
        hi = tl.maximum(0, tl.minimum(nk, tl.minimum(m0 + BM, nq) + shift))
        full_hi = tl.maximum(0, tl.minimum(nk, m0 + shift + 1)) // BN * BN
    lo = 0
    full_lo = 0
    if window is not None:
        lo = tl.maximum(0, m0 + shift - window + 1) // BN * BN
        full_lo = tl.cdiv(tl.maximum(0, m0 + BM + shift - window), BN) * BN
        full_lo = tl.minimum(full_lo, tl.cdiv(hi, BN) * BN)
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi


@triton.jit
def finish_rows(
    acc, m, l, sinks, out, lse, head, rows, row_ok, num_q,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Let the sink in, store lse and acc / l. acc [BM, BD]; m (base 2), l, rows int64 [BM]."""
    empty = m == float("-inf")
    m = tl.where(empty, 0.0, m)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        m_sink = tl.maximum(m, sink)
        acc *= tl.exp2(m - m_sink)[:, None]
        l = l * tl.exp2(m - m_sink) + tl.exp2(sink - m_sink)
        m = m_sink
    l = tl.where(empty, 1.0, l)
    row_lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
    tl.store(lse + head * num_q + rows, row_lse, mask=row_ok)
    offs_d = tl.arange(0, BLOCK_D)
    out_ptrs = out + (rows[:, None] * NUM_HEADS + head) * HEAD_DIM + offs_d[None, :]
    tile_ok = row_ok[:, None] & (offs_d[None, :] < HEAD_DIM)
    tl.store(out_ptrs, (acc / l[:, None]).to(out.dtype.element_ty), mask=tile_ok)


@triton.jit
def clear_between(
    out, lse, cu_seqlens_q, n, start, stop, head, num_q,
    NUM_HEADS: tl.constexpr, HEADS_X: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """out = 0, lse = -inf in this program's share of the rows of no sequence around sequence n.

    Those from its last row `stop` to the next sequence, and those in front of the first sequence.
    """
    sequences = tl.num_programs(2) // (NUM_HEADS // HEADS_X)
    end = num_q
    if n + 1 < sequences:
        end = tl.load(cu_seqlens_q + n + 1)
    share, step = tl.program_id(1) * BM, tl.num_programs(1) * BM
    for row in tl.range(stop + share, end, step):
        _clear(out, lse, row, end, head, num_q, NUM_HEADS, HEAD_DIM, BLOCK_D, BM)
    if n == 0:
        for row in tl.range(share, start, step):
            _clear(out, lse, row, start, head, num_q, NUM_HEADS, HEAD_DIM, BLOCK_D, BM)


@triton.jit
def _clear(
    out, lse, row, end, head, num_q,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    rows = tl.cast(row, tl.int64) + tl.arange(0, BM)
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(lse + head * num_q + rows, tl.full([BM], float("-inf"), tl.float32), mask=rows < end)
    out_ptrs = out + (rows[:, None] * NUM_HEADS + head) * HEAD_DIM + offs_d[None, :]
    tile_ok = (rows < end)[:, None] & (offs_d[None, :] < HEAD_DIM)
    tl.store(out_ptrs, tl.zeros([BM, BLOCK_D], out.dtype.element_ty), mask=tile_ok)
