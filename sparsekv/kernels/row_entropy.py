"""Entropy of every row of the softmax matrix: how widely each query spreads its attention.

    h_i = - sum_j p_ij log p_ij        p_ij = exp(x_ij - lse_i)

in nats, over the keys j that query i sees; x and lse as in `prefill_attention`, q [Tq, HQ, D],
k [Tk, HK, D], query head h reads KV head h // G. Where a sink logit is in the lse, the p of a row
sum to less than 1, and the sink's own term is not in h. (Without softcap h_i = lse_i - scale q_i .
sum_j p_ij k_j, attention over the keys themselves; that costs two products and T x HQ x D numbers.)

Given the lse, no max and no rescale are needed. One program owns BLOCK_M rows of one query head and
streams its keys through the zones of the prefill kernel: masked, unmasked, masked. No T x T, one
number a row. Not supported: explicit positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    LN2,
    LOG2E,
    AotRow,
    aot_row,
    base2_logits,
    check_last_contiguous,
    check_shape,
    launch_options,
    lookup,
    padded_head_dim,
    visible,
)
from ._masked import Align, Mask, check_packed, logit_chunks, spans
from ._prefill_parts import zones


class _Tiles(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (arch, padded head_dim) -> tiles; those of the column scores, with rows and keys exchanged.
_UP_TO_128 = (16, 32, 64, 128)
_CONFIG: dict[tuple[str, int], _Tiles] = {
    **{(a, d): _Tiles(64, 64, 4, 2) for a in ("sm80", "sm89", "sm120") for d in _UP_TO_128},
    **{(a, 256): _Tiles(64, 32, 4, 2) for a in ("sm80", "sm89", "sm120")},
    **{(a, d): _Tiles(128, 64, 4, 3) for a in ("sm90", "sm100") for d in _UP_TO_128},
    **{(a, 256): _Tiles(64, 32, 4, 3) for a in ("sm90", "sm100")},
    **{("gfx942", d): _Tiles(128, 64, 4, 1) for d in _UP_TO_128},
    ("gfx942", 256): _Tiles(64, 32, 4, 1),
    **{("fp32", d): _Tiles(16, 16, 4, 1) for d in (*_UP_TO_128, 256)},
    **{("cpu", d): _Tiles(32, 16, 4, 1) for d in (*_UP_TO_128, 256)},
}
_NO_LIMIT = 1 << 30  # larger windows are clipped: position arithmetic stays in int32


@triton.jit
def _accumulate(
    total, q, k, lse, pos_q, stride_kt, lo, hi, nk, softmax_scale, softcap, window,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total [BM] + sum p log2 p over the keys lo .. hi of one head. q [BM, BD]; lse [BM] in base 2.

    k: scalar pointer to key 0. Without MASK every key is in range and seen by every row.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_tile = offs_n[None, :] * stride_kt + offs_d[:, None]  # [BLOCK_D, BLOCK_N]
    if softcap is None:
        log2_scale = softmax_scale * LOG2E
    else:
        log2_scale = 1.0
    for start in tl.range(lo, hi, BLOCK_N):
        k_ptrs = k + tl.cast(start, tl.int64) * stride_kt + k_tile
        in_range = start + offs_n < nk
        if MASK:
            kt = tl.load(k_ptrs, mask=in_range[None, :] & (offs_d[:, None] < HEAD_DIM), other=0.0)
        elif HEAD_DIM != BLOCK_D:
            kt = tl.load(k_ptrs, mask=offs_d[:, None] < HEAD_DIM, other=0.0)
        else:
            kt = tl.load(k_ptrs)
        x = tl.dot(q, kt, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if softcap is not None:
            x = base2_logits(x, softmax_scale, softcap, True)
        log_p = x * log2_scale - lse[:, None]
        if MASK:
            seen = in_range[None, :]
            if CAUSAL or window is not None:
                pos_k = (start + offs_n)[None, :]
                seen &= visible(pos_q[:, None], pos_k, window, CAUSAL, window is not None)
            log_p = tl.where(seen, log_p, float("-inf"))
        p = tl.exp2(log_p)
        if MASK:  # 0 log 0 = 0, and rows that see nothing
            total += tl.sum(p * tl.where(p > 0.0, log_p, 0.0), 1)
        else:
            total += tl.sum(p * log_p, 1)
    return total


@triton.jit(do_not_specialize=["stride_lh", "window"])
def _row_entropy_kernel(
    q, k, lse, entropy, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_lh, stride_eh,
    softmax_scale, softcap, window,
    CAUSAL: tl.constexpr, ALIGN_RIGHT: tl.constexpr, G: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid (HQ, row blocks, N): neighbours share keys, the last rows go first.
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(2)
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
    rows = start_q.to(tl.int64) + offs_m  # [BLOCK_M]
    row_ok = offs_m < nq
    q_ptrs = q + head * stride_qh + rows[:, None] * stride_qt + offs_d[None, :]
    q_load = row_ok[:, None] & (offs_d[None, :] < HEAD_DIM)
    qt = tl.load(q_ptrs, mask=q_load, other=0.0)  # [BLOCK_M, BLOCK_D]
    row_lse = tl.load(lse + head * stride_lh + rows, mask=row_ok, other=0.0)
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
    k += start_k.to(tl.int64) * stride_kt + (head // G) * stride_kh
    shift = nk - nq if ALIGN_RIGHT else 0
    pos_q = offs_m + shift
    lo, full_lo, full_hi, hi = zones(m0, nq, nk, shift, window, CAUSAL, BLOCK_M, BLOCK_N)
    total = tl.zeros([BLOCK_M], tl.float32)
    if window is not None:
        total = _accumulate(
            total, qt, k, row_lse, pos_q, stride_kt, lo, full_lo, nk, softmax_scale, softcap,
            window, True, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    total = _accumulate(
        total, qt, k, row_lse, pos_q, stride_kt, full_lo, full_hi, nk, softmax_scale, softcap,
        window, False, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    total = _accumulate(
        total, qt, k, row_lse, pos_q, stride_kt, full_hi, hi, nk, softmax_scale, softcap,
        window, True, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    # A row of one key: its p may round to above 1.
    tl.store(entropy + head * stride_eh + rows, tl.maximum(-total * LN2, 0.0), mask=row_ok)


def row_entropy_triton(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`row_entropy` by the Triton kernel; CPU tensors need the interpreter."""
    (num_q, heads, head_dim), sequences = q.shape, len(cu_seqlens_q) - 1
    entropy = torch.zeros((heads, num_q), dtype=torch.float32, device=q.device)
    if not entropy.numel() or max_seqlen_q * sequences == 0:
        return entropy
    tiles = lookup(_CONFIG, q)
    grid = (heads, triton.cdiv(max_seqlen_q, tiles.block_m), sequences)
    _row_entropy_kernel[grid](
        q, k, lse, entropy, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), lse.stride(0), num_q,
        float(softmax_scale), None if softcap is None else float(softcap),
        None if window is None else min(window, _NO_LIMIT),
        CAUSAL=causal, ALIGN_RIGHT=align == "right", G=heads // k.shape[1], HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        **launch_options(tiles.num_warps, tiles.num_stages),
    )  # fmt: skip
    return entropy


def row_entropy_reference(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`row_entropy` in plain torch; float64 inputs are computed and returned in float64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    entropy = q.new_zeros((q.shape[1], q.shape[0]), dtype=wide)
    # A row without a visible key has lse = -inf; +inf makes all its probabilities 0.
    lse = torch.where(lse == -torch.inf, torch.inf, lse.to(wide)).unflatten(0, (k.shape[1], -1))
    span_pairs = zip(spans(cu_seqlens_q, seqused_q), spans(cu_seqlens_k, seqused_k), strict=True)
    for span_q, span_k in span_pairs:
        for sq, _, logits in logit_chunks(
            q, k, span_q, span_k, Mask(causal, align, window),
            softmax_scale=softmax_scale, softcap=softcap,
        ):  # fmt: skip
            log_p = logits.sub_(lse[:, :, sq, None])  # [HK, G, r, s]; -inf: not seen
            entropy[:, sq] = torch.special.entr(log_p.exp_()).sum(-1).flatten(0, 1)
    return entropy.clamp_min_(0.0)


def row_entropy(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Entropy of each query's attention in nats -> fp32 [HQ, Tq], see the module docstring.

    lse: [HQ, Tq] of `prefill_attention` called with the same arguments (sinks are inside it). The
    other arguments are those of `prefill_attention`.

    Tokens of no sequence and queries without a visible key get 0.
    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    check_packed(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, softcap)
    check_shape("lse", lse, [q.shape[1], q.shape[0]])
    check_last_contiguous("lse", lse)
    Mask(causal, align, window).check(q.shape[0], k.shape[0])
    run = row_entropy_triton if q.is_cuda else row_entropy_reference
    return run(
        q, k, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=softmax_scale, seqused_q=seqused_q, seqused_k=seqused_k,
        causal=causal, align=align, window=window, softcap=softcap,
    )  # fmt: skip


def aot_signatures() -> list[AotRow]:
    """Every shipped tile choice, bf16, causal; with a window and softcap; fp32."""
    rows = []
    for (arch, d), tiles in _CONFIG.items():
        if arch not in ARCHS or d < 64:  # smaller head_dims share the tiles of 64
            continue
        rows.append(_aot_row(arch, d, tiles, "*bf16", options=False))
        rows.append(_aot_row(arch, d, tiles, "*bf16", options=True))
        rows.append(_aot_row(arch, d, _CONFIG["fp32", d], "*fp32", options=False))
    return rows


def _aot_row(arch: str, block_d: int, tiles: _Tiles, dtype: str, options: bool) -> AotRow:
    """One row of aot_signatures; options: window, softcap, seqused and head_dim < block."""
    types = {"q": dtype, "k": dtype, "lse": "*fp32", "entropy": "*fp32", "softmax_scale": "fp32"}
    types |= {"cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"}
    if options:
        types |= {"seqused_q": "*i32", "seqused_k": "*i32", "softcap": "fp32", "window": "i32"}
    constexprs = {"CAUSAL": True, "ALIGN_RIGHT": True, "G": 4, "BLOCK_D": block_d}
    constexprs |= {"HEAD_DIM": block_d - 32 if options else block_d}
    constexprs |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    launch = launch_options(tiles.num_warps, tiles.num_stages)
    return aot_row(_row_entropy_kernel, arch, types, constexprs, launch)
