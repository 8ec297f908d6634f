"""What both prefill kernels share: the key zones of a block of rows, and the end of a row."""

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
    acc, m, l, sinks, out, lse, head, rows, row_ok, stride_lh,
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
    tl.store(lse + head * stride_lh + rows, row_lse, mask=row_ok)
    offs_d = tl.arange(0, BLOCK_D)
    out_ptrs = out + (rows[:, None] * NUM_HEADS + head) * HEAD_DIM + offs_d[None, :]
    tile_ok = row_ok[:, None] & (offs_d[None, :] < HEAD_DIM)
    tl.store(out_ptrs, (acc / l[:, None]).to(out.dtype.element_ty), mask=tile_ok)
