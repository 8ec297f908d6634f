"""What both column-score kernels share: which query rows see a block of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_zones(
    n0, n_last, first, nq, shift, window, CAUSAL: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr
):
    """(lo, full_lo, full_hi, hi): rows lo .. hi see some key of n0 .. n_last, full_lo .. full_hi
    see all of n0 .. n0 + BN. Zones before full_hi are whole tiles (lo may lie before `first`).
    """
    lo, full_lo, full_hi, hi = first, first, nq, nq
    if CAUSAL:
        lo = tl.maximum(first, n0 - shift)
        full_lo = tl.maximum(first, n0 + BN - 1 - shift)
    if window is not None:
        hi = tl.minimum(nq, n_last + window - shift)
        full_hi = tl.minimum(nq, n0 + window - shift)
    full_hi = tl.maximum(full_hi, lo)
    full_lo = full_hi - tl.maximum(0, full_hi - full_lo) // BM * BM
    return full_lo - tl.cdiv(full_lo - lo, BM) * BM, full_lo, full_hi, hi
