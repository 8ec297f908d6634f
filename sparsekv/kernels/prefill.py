"""Causal attention over packed sequences, with the log-sum-exp that score kernels need.

    x_ij  = softcap(softmax_scale * q_i . k_j)        softcap(x) = c tanh(x / c)
    lse_i = log(sum_j exp(x_ij) + exp(sink_h))        over the keys j that query i sees
    out_i = sum_j exp(x_ij - lse_i) v_j               no visible key: out = 0, lse = -inf

q [Tq, HQ, D], k and v [Tk, HK, D], query head h reads KV head h // G.

One program owns BLOCK_M rows of one query head and streams its keys through three zones: the ragged
left edge of a window (masked), the keys that all rows see (no mask, no bounds), the diagonal and
the tail (masked). With explicit positions nothing is known about the order: one masked zone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._common import (
    ARCHS,
    LOG2E,
    AotRow,
    aot_row,
    arch_of,
    base2_logits,
    check_dtype,
    check_last_contiguous,
    check_shape,
    launch_options,
    lookup,
    padded_head_dim,
    visible,
)
from ._masked import Align, Mask, check_packed, logit_chunks, spans
from ._prefill_parts import finish_rows, zones
from ._prefill_tma import describe, prefill_tma_kernel


class _Tiles(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (arch, padded head_dim) -> rows (from this max_seqlen_q on, tiles), ascending. Small tiles win
# while several of them share a multiprocessor and overlap softmax with matrix work; at long
# sequences the larger tile re-reads K and V less often (measured on an H200).
_UP_TO_128 = (16, 32, 64, 128)
_CONFIG: dict[tuple[str, int], tuple[tuple[int, _Tiles], ...]] = {
    **{
        (a, d): ((0, _Tiles(64, 64, 4, 2)),)
        for a in ("sm80", "sm89", "sm120")
        for d in (16, 32, 64)
    },
    **{(a, 128): ((0, _Tiles(64, 32, 4, 2)),) for a in ("sm80", "sm89", "sm120")},
    **{(a, 256): ((0, _Tiles(64, 32, 8, 2)),) for a in ("sm80", "sm89", "sm120")},
    **{("sm90", d): ((0, _Tiles(64, 64, 4, 3)),) for d in (16, 32)},
    ("sm90", 64): ((0, _Tiles(64, 64, 4, 3)), (16384, _Tiles(128, 128, 8, 2))),
    ("sm90", 128): ((0, _Tiles(64, 64, 4, 3)), (16384, _Tiles(128, 128, 8, 3))),
    ("sm90", 256): ((0, _Tiles(128, 32, 8, 3)),),
    **{("sm100", d): ((0, _Tiles(128, 64, 8, 2)),) for d in _UP_TO_128},
    ("sm100", 256): ((0, _Tiles(128, 32, 8, 2)),),
    **{("gfx942", d): ((0, _Tiles(128, 64, 4, 1)),) for d in _UP_TO_128},
    ("gfx942", 256): ((0, _Tiles(64, 32, 4, 1)),),
    **{("fp32", d): ((0, _Tiles(16, 32, 4, 1)),) for d in _UP_TO_128},
    ("fp32", 256): ((0, _Tiles(16, 16, 4, 1)),),
    **{("cpu", d): ((0, _Tiles(32, 16, 4, 1)),) for d in (*_UP_TO_128, 256)},
}
_L2_BYTES = 32 << 20  # K and V of a sequence that stay in an L2 of 40-60 MB beside Q and out
_NO_LIMIT = 1 << 30  # larger windows are clipped: position arithmetic stays in int32


@triton.jit
def _attend(
    acc, m, l, q, k, v, pos_q, pos_k, stride_kt, stride_vt, lo, hi, nk,
    softmax_scale, softcap, window, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys lo .. hi of one head: new (acc [BM, BD], m [BM], l [BM]).

    k, v: scalar pointers to key 0; pos_k: its position pointer, or None: key j is at position j.
    m is the running maximum in base 2. Without MASK every key is in range and seen by every row.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_tile = offs_n[None, :] * stride_kt + offs_d[:, None]  # [BLOCK_D, BLOCK_N]
    v_tile = offs_n[:, None] * stride_vt + offs_d[None, :]  # [BLOCK_N, BLOCK_D]
    if softcap is None:
        log2_scale = softmax_scale * LOG2E
    else:
        log2_scale = 1.0
    for start in tl.range(lo, hi, BLOCK_N):
        k_ptrs = k + tl.cast(start, tl.int64) * stride_kt + k_tile
        v_ptrs = v + tl.cast(start, tl.int64) * stride_vt + v_tile
        in_range = start + offs_n < nk
        if MASK:
            k_load = in_range[None, :] & (offs_d[:, None] < HEAD_DIM)
            v_load = in_range[:, None] & (offs_d[None, :] < HEAD_DIM)
            kt = tl.load(k_ptrs, mask=k_load, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            kt = tl.load(k_ptrs, mask=offs_d[:, None] < HEAD_DIM, other=0.0)
        else:
            kt = tl.load(k_ptrs)
        x = tl.dot(q, kt, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if softcap is not None:
            x = base2_logits(x, softmax_scale, softcap, True)
        if MASK:
            seen = in_range[None, :]
            if pos_k is not None:
                pos = tl.load(pos_k + start + offs_n, mask=in_range, other=0)
            else:
                pos = start + offs_n
            if CAUSAL or window is not None:
                seen &= visible(pos_q[:, None], pos[None, :], window, CAUSAL, window is not None)
            x = tl.where(seen, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1) * log2_scale)
        if MASK:  # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf) = NaN
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            base = m_new
        p = tl.exp2(x * log2_scale - base[:, None])
        alpha = tl.exp2(m - base)
        if MASK:
            vt = tl.load(v_ptrs, mask=v_load, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            vt = tl.load(v_ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
        else:
            vt = tl.load(v_ptrs)
        acc = tl.dot(p.to(vt.dtype), vt, acc * alpha[:, None], input_precision="ieee")
        l = l * alpha + tl.sum(p, 1)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["stride_lh", "window"])
def _prefill_kernel(
    q, k, v, sinks, out, lse,
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, positions_q, positions_k,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_lh,
    softmax_scale, softcap, window,
    CAUSAL: tl.constexpr, ALIGN_RIGHT: tl.constexpr, G: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEADS_X: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid (HEADS_X, row blocks, N * HQ / HEADS_X): neighbours share K and V, last rows go first.
    head = tl.program_id(2).to(tl.int64) % (NUM_HEADS // HEADS_X) * HEADS_X + tl.program_id(0)
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
    rows = start_q.to(tl.int64) + offs_m  # [BLOCK_M]
    row_ok = offs_m < nq
    tile_ok = row_ok[:, None] & (offs_d[None, :] < HEAD_DIM)  # [BLOCK_M, BLOCK_D]
    q_ptrs = q + head * stride_qh + rows[:, None] * stride_qt + offs_d[None, :]
    qt = tl.load(q_ptrs, mask=tile_ok, other=0.0)
    k += start_k.to(tl.int64) * stride_kt + (head // G) * stride_kh
    v += start_k.to(tl.int64) * stride_vt + (head // G) * stride_vh
    shift = nk - nq if ALIGN_RIGHT else 0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)

    if positions_k is not None:
        pos_q = tl.load(positions_q + rows, mask=row_ok, other=0)
        pos_k = positions_k + start_k
        acc, m, l = _attend(
            acc, m, l, qt, k, v, pos_q, pos_k, stride_kt, stride_vt, 0, nk, nk,
            softmax_scale, softcap, window, True, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    else:
        pos_q = offs_m + shift
        lo, full_lo, full_hi, hi = zones(m0, nq, nk, shift, window, CAUSAL, BLOCK_M, BLOCK_N)
        if window is not None:
            acc, m, l = _attend(
                acc, m, l, qt, k, v, pos_q, None, stride_kt, stride_vt, lo, full_lo, hi,
                softmax_scale, softcap, window, True, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        acc, m, l = _attend(
            acc, m, l, qt, k, v, pos_q, None, stride_kt, stride_vt, full_lo, full_hi, hi,
            softmax_scale, softcap, window, False, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        acc, m, l = _attend(
            acc, m, l, qt, k, v, pos_q, None, stride_kt, stride_vt, full_hi, hi, hi,
            softmax_scale, softcap, window, True, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip

    finish_rows(
        acc, m, l, sinks, out, lse, head, rows, row_ok, stride_lh, NUM_HEADS, HEAD_DIM, BLOCK_D
    )


def prefill_triton(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`prefill_attention` by the Triton kernel; CPU tensors need the interpreter."""
    (num_q, heads, head_dim), kv_heads, sequences = q.shape, k.shape[1], len(cu_seqlens_q) - 1
    # Tokens of no sequence are nobody's: filled here, the kernel writes the others.
    out = torch.zeros((num_q, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.full((heads, num_q), -torch.inf, dtype=torch.float32, device=q.device)
    plain = window is None and softcap is None and positions_k is None
    tiles, heads_x = _plan(q, k, max_seqlen_q if plain else 0, max_seqlen_k)
    blocks = triton.cdiv(max_seqlen_q, tiles.block_m)
    if out.numel() == 0 or blocks * sequences == 0:
        return out, lse
    grid = (heads_x, blocks, sequences * (heads // heads_x))
    cu = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    common: dict[str, Any] = {
        "CAUSAL": causal, "ALIGN_RIGHT": align == "right", "G": heads // kv_heads,
        "NUM_HEADS": heads, "HEADS_X": heads_x, "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
    } | launch_options(tiles.num_warps, tiles.num_stages)  # fmt: skip
    kd, vd = _descriptors(q, k, v, tiles.block_n) if plain else (None, None)
    if kd is not None and vd is not None:
        prefill_tma_kernel[grid](
            q, kd, vd, sinks, out, lse, *cu, q.stride(0), q.stride(1), k.stride(1), v.stride(1),
            num_q, float(softmax_scale), **common,
        )  # fmt: skip
        return out, lse
    _prefill_kernel[grid](
        q, k, v, sinks, out, lse, *cu, positions_q, positions_k,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), num_q,
        float(softmax_scale), None if softcap is None else float(softcap),
        None if window is None else min(window, _NO_LIMIT), HEAD_DIM=head_dim, **common,
    )  # fmt: skip
    return out, lse


def _plan(q: Tensor, k: Tensor, reach: int, max_seqlen_k: int) -> tuple[_Tiles, int]:
    """(tiles, heads that run side by side); reach: max_seqlen_q, 0 where there are options.

    Large tiles pay off in the unmasked zone only, and have no registers left for options.
    """
    tiles = [t for least, t in lookup(_CONFIG, q) if reach >= least][-1]
    # While all K and V stay in L2, run the longest blocks of all heads first; else head by head.
    kv_bytes = 2 * max_seqlen_k * k.shape[1] * k.shape[2] * k.element_size()
    return tiles, q.shape[1] if kv_bytes <= _L2_BYTES else q.shape[1] // k.shape[1]


def _descriptors(
    q: Tensor, k: Tensor, v: Tensor, block_n: int
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Descriptors of K and V tiles where the hardware and the layout have them."""
    if arch_of(q.device) not in ("sm90", "cpu") or q.shape[2] != padded_head_dim(q.shape[2]):
        return None, None
    kd, vd = describe(k, block_n), describe(v, block_n)
    return (None, None) if kd is None or vd is None else (kd, vd)


def prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`prefill_attention` in plain torch; float64 inputs give a float64 lse."""
    mask = Mask(causal, align, window, positions_q, positions_k)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=wide)
    for span_q, span_k in zip(
        spans(cu_seqlens_q, seqused_q), spans(cu_seqlens_k, seqused_k), strict=True
    ):
        for sq, sk, logits in logit_chunks(
            q, k, span_q, span_k, mask, softmax_scale=softmax_scale, softcap=softcap
        ):
            top = logits.amax(-1)  # [HK, G, r]
            empty = top == -torch.inf
            sink = None if sinks is None else sinks.to(wide).view(*top.shape[:2], 1)
            top = top if sink is None else torch.maximum(top, sink)
            top = torch.where(empty, 0.0, top)
            weights = logits.sub_(top[..., None]).exp_()
            total = weights.sum(-1) if sink is None else weights.sum(-1) + (sink - top).exp()
            rows = torch.einsum("hgrs,shd->hgrd", weights, v[sk].to(wide))
            rows = rows / torch.where(empty, 1.0, total)[..., None]
            out[sq] = rows.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
            lse[:, sq] = torch.where(empty, -torch.inf, top + total.log()).flatten(0, 1)
    return out, lse


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed sequences -> (out [Tq, HQ, D] in q.dtype, lse fp32 [HQ, Tq]).
    q [Tq, HQ, D], k and v [Tk, HK, D]: any strides with stride(-1) == 1.
    cu_seqlens_q, cu_seqlens_k: int32 [N + 1], where sequence n starts.
    seqused_q, seqused_k: int32 [N], tokens in use there; None: cu[n + 1] - cu[n]. A left-padded
        [B, T] batch is cu[b] = b T + pad_b, seqused[b] = T - pad_b.
    max_seqlen_q, max_seqlen_k: Python integers >= every length.
    causal, align: query i sees keys j <= i + (nk - nq) ("right") or j <= i ("left").
    window: also i - j < window in those aligned positions (the query and window - 1 older keys).
    softcap: logits become c tanh(x / c) before the mask. sinks: float [HQ] or None, a logit that
        only enters the denominator.
    positions_q, positions_k: int32 [Tq], [Tk]; visibility is then pk <= pq (and pq - pk < window)
        whatever the storage order.

    Tokens of no sequence and queries without a visible key get out 0, lse -inf.
    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    check_packed(
        q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, softcap
    )  # fmt: skip
    check_shape("v", v, k.shape)
    check_dtype("v", v, q.dtype)
    check_last_contiguous("v", v)
    if sinks is not None:
        check_shape("sinks", sinks, [q.shape[1]])
        check_last_contiguous("sinks", sinks)
    Mask(causal, align, window, positions_q, positions_k).check(q.shape[0], k.shape[0])
    run = prefill_triton if q.is_cuda else prefill_reference
    return run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=softmax_scale, seqused_q=seqused_q, seqused_k=seqused_k, causal=causal,
        align=align, window=window, softcap=softcap, sinks=sinks,
        positions_q=positions_q, positions_k=positions_k,
    )  # fmt: skip


def aot_signatures() -> list[AotRow]:
    """Every shipped tile choice, bf16 and causal; with every option where these tiles meet them;
    fp32.
    """
    rows = []
    for (arch, d), choices in _CONFIG.items():
        if arch not in ARCHS or d < 64:  # smaller head_dims share the tiles of 64
            continue
        for least, tiles in choices:
            rows.append(_aot_row(arch, d, tiles, "*bf16", options=False))
            if arch == "sm90":
                rows.append(_tma_row(arch, d, tiles))
            if d == 128 and least == 0:
                rows.append(_aot_row(arch, d, tiles, "*bf16", options=True))
        rows.append(_aot_row(arch, d, _CONFIG["fp32", d][0][1], "*fp32", options=False))
    return rows


def _aot_row(arch: str, block_d: int, tiles: _Tiles, dtype: str, options: bool) -> AotRow:
    """One row of aot_signatures; options: window, softcap, sinks, seqused and head_dim < block."""
    types = dict.fromkeys(("q", "k", "v", "out"), dtype)
    types |= {"lse": "*fp32", "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"}
    types |= {"softmax_scale": "fp32"}
    if options:
        types |= {"seqused_q": "*i32", "seqused_k": "*i32", "sinks": "*fp32"}
        types |= {"softcap": "fp32", "window": "i32"}
    constexprs = {"CAUSAL": True, "ALIGN_RIGHT": True, "G": 4, "NUM_HEADS": 32, "HEADS_X": 32}
    constexprs |= {"HEAD_DIM": block_d - 32 if options else block_d, "BLOCK_D": block_d}
    constexprs |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    launch = launch_options(tiles.num_warps, tiles.num_stages)
    return aot_row(_prefill_kernel, arch, types, constexprs, launch)


def _tma_row(arch: str, block_d: int, tiles: _Tiles) -> AotRow:
    """One row of aot_signatures for the kernel with descriptors."""
    box = f"tensordesc<bf16[{tiles.block_n}, {block_d}]>"
    types = {"q": "*bf16", "kd": box, "vd": box, "out": "*bf16", "lse": "*fp32"}
    types |= {"cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32", "softmax_scale": "fp32"}
    constexprs = {"CAUSAL": True, "ALIGN_RIGHT": True, "G": 4, "NUM_HEADS": 32, "HEADS_X": 32}
    constexprs |= {"BLOCK_D": block_d, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    launch = launch_options(tiles.num_warps, tiles.num_stages)
    return aot_row(prefill_tma_kernel, arch, types, constexprs, launch)
