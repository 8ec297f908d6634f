"""Prefill attention with K and V tiles fetched by the tensor memory accelerator (sm90 and later).

The same zones and the same arithmetic as the pointer kernel of `prefill.py`, for the case that a
prompt usually is: 16-bit, an unpadded head_dim, no window, no softcap, no explicit positions. A
tile is one hardware copy, which frees the registers and the instructions of its addresses.

A descriptor covers the packed [Tk, HK * D] matrix, not one sequence: a tile at the end of a
sequence also brings rows of the next one (zeros beyond Tk). The masked zone hides their logits and
clears their values, which may be anything.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._common import LOG2E
from ._prefill_parts import finish_rows, zones


@triton.jit
def _attend(
    acc, m, l, q, kd, vd, row, column, pos_q, lo, hi, nk, log2_scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys lo .. hi of one head: new (acc [BM, BD], m [BM], l [BM]).

    kd, vd: descriptors; key 0 of the head is at [row, column]. m is the maximum in base 2.
    """
    offs_n = tl.arange(0, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N):
        kt = kd.load([row + start, column])  # [BLOCK_N, BLOCK_D]
        x = tl.dot(q, kt.T)  # [BLOCK_M, BLOCK_N]
        if MASK:
            seen = (start + offs_n < nk)[None, :]
            if CAUSAL:
                seen &= pos_q[:, None] >= (start + offs_n)[None, :]
            x = tl.where(seen, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1) * log2_scale)
        if MASK:  # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf) = NaN
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            base = m_new
        p = tl.exp2(x * log2_scale - base[:, None])
        alpha = tl.exp2(m - base)
        vt = vd.load([row + start, column])
        if MASK:
            vt = tl.where((start + offs_n < nk)[:, None], vt, 0.0)
        acc = tl.dot(p.to(vt.dtype), vt, acc * alpha[:, None])
        l = l * alpha + tl.sum(p, 1)  # while the matrix units are busy
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["stride_lh"])
def prefill_tma_kernel(
    q, kd, vd, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    stride_qt, stride_qh, stride_kh, stride_vh, stride_lh, softmax_scale,
    CAUSAL: tl.constexpr, ALIGN_RIGHT: tl.constexpr, G: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEADS_X: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid (HEADS_X, row blocks, N * HQ / HEADS_X): neighbours share K and V, last rows go first.
    head = tl.program_id(2) % (NUM_HEADS // HEADS_X) * HEADS_X + tl.program_id(0)
    n = tl.program_id(2) // (NUM_HEADS // HEADS_X)
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    start_q = tl.load(cu_seqlens_q + n)
    start_k = tl.load(cu_seqlens_k + n)
    nq = tl.load(cu_seqlens_q + n + 1) - start_q
    nk = tl.load(cu_seqlens_k + n + 1) - start_k
    if seqused_q is not None:
        nq = tl.load(seqused_q + n)
    if seqused_k is not None:
        nk = tl.load(seqused_k + n)
    if m0 >= nq:
        return

    offs_m = m0 + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    rows = start_q.to(tl.int64) + offs_m
    row_ok = offs_m < nq
    q_ptrs = q + head.to(tl.int64) * stride_qh + rows[:, None] * stride_qt + offs_d[None, :]
    qt = tl.load(q_ptrs, mask=row_ok[:, None], other=0.0)
    shift = nk - nq if ALIGN_RIGHT else 0
    pos_q = offs_m + shift
    _, full_lo, full_hi, hi = zones(m0, nq, nk, shift, None, CAUSAL, BLOCK_M, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc, m, l = _attend(
        acc, m, l, qt, kd, vd, start_k, head // G * stride_kh, pos_q, full_lo, full_hi, nk,
        softmax_scale * LOG2E, False, CAUSAL, BLOCK_N,
    )  # fmt: skip
    acc, m, l = _attend(
        acc, m, l, qt, kd, vd, start_k, head // G * stride_kh, pos_q, full_hi, hi, nk,
        softmax_scale * LOG2E, True, CAUSAL, BLOCK_N,
    )  # fmt: skip
    finish_rows(
        acc, m, l, sinks, out, lse, head.to(tl.int64), rows, row_ok, stride_lh,
        NUM_HEADS, BLOCK_D, BLOCK_D,
    )  # fmt: skip


def describe(x: Tensor, tokens: int) -> TensorDescriptor | None:
    """Descriptor of boxes [tokens, D] over x [T, H, D] seen as [T, columns]; None: not possible.

    Possible for 16-bit elements, heads side by side inside a token, a base and strides that are
    multiples of 16 bytes.
    """
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0
    columns = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    if not aligned or x.element_size() != 2 or x.shape[0] == 0 or columns > x.stride(0):
        return None
    return TensorDescriptor(x, [x.shape[0], columns], [x.stride(0), 1], [tokens, x.shape[2]])
