"""Column sums of a perturbed softmax: how much attention a key gets when the logits are noisy.

    y_ij   = (x_ij + zeta_ij) / tau            x as in prefill_attention, over the keys that i sees
    lse'_i = log sum_j exp(y_ij)
    c_j    = sum_i exp(y_ij - lse'_i)          over all query rows i, or the last `rows`

per query head; then the G heads of a KV head are reduced. zeta_ij is Gumbel noise that is a
function of (seed, layer, query head, position of i, position of j), see `_noise.py`, so that both
kernels draw the same numbers and keep none. Keyformer (arXiv 2403.09054). Attention sinks of the
model take no part. `_perturb_row.py` has the one query of a decode step.

Two kernels, each a pass over QK^T: rows outer for lse', which is theirs and not the attention's;
keys outer for the sums, every column stored once. No atomics, no T x T.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._column_parts import row_zones
from ._common import (
    ARCHS,
    AotRow,
    aot_row,
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
from ._noise import fold, fold_reference, gumbel2, gumbel_reference, stream
from ._perturb_row import (
    Noise,
    check_noise,
    perturbed_row,
    perturbed_row_reference,
    perturbed_row_triton,
    reduce_group,
    row_signatures,
)
from ._prefill_parts import zones

__all__ = [
    "perturbed_columns",
    "perturbed_columns_reference",
    "perturbed_columns_triton",
    "perturbed_row",
    "perturbed_row_reference",
    "perturbed_row_triton",
]
Group = Literal["mean", "max", "sum", "layer_mean"]


class _Tiles(NamedTuple):
    block_n: int
    block_m: int
    num_warps: int
    num_stages: int


# (arch, padded head_dim) -> tiles: keys and query rows, of both kernels. Noise is a hundred
# instructions an entry: what matters is that a tile of it fits the registers.
_UP_TO_128 = (16, 32, 64, 128)
_16_BIT = ("sm80", "sm89", "sm90", "sm100", "sm120")
_CONFIG: dict[tuple[str, int], _Tiles] = {
    **{(a, d): _Tiles(64, 32, 4, 2) for a in _16_BIT for d in (*_UP_TO_128, 256)},
    **{("gfx942", d): _Tiles(64, 32, 4, 1) for d in (*_UP_TO_128, 256)},
    **{("fp32", d): _Tiles(16, 16, 4, 1) for d in (*_UP_TO_128, 256)},
    **{("cpu", d): _Tiles(16, 32, 4, 1) for d in (*_UP_TO_128, 256)},
}
_NO_LIMIT = 1 << 30  # larger windows and row counts are clipped: sums stay in int32


@triton.jit
def _sequence(cu_seqlens, seqused, n):
    """(first token int64, tokens int32) of sequence n."""
    start = tl.load(cu_seqlens + n)
    length = tl.load(cu_seqlens + n + 1) - start
    if seqused is not None:
        length = tl.load(seqused + n)
    return start.to(tl.int64), length


@triton.jit
def _head_stream(key, first_heads, n, head):
    """The hash of (seed, layer, query head); key int32 is that of the first two."""
    if first_heads is not None:
        head += tl.load(first_heads + n)
    return fold(tl.cast(key, tl.uint32), head)


@triton.jit
def _perturbed(
    x, seen, row_noise, pos_k, softmax_scale, softcap, inverse_tau, GUMBEL: tl.constexpr
):
    """log2(e) y of raw dots x, -inf where not seen. row_noise uint32, pos_k: broadcast to x."""
    if softcap is not None:
        y = base2_logits(x, softmax_scale, softcap, True)
    else:
        y = base2_logits(x, softmax_scale, 1.0, False)
    if GUMBEL:
        y += gumbel2(fold(row_noise, pos_k))
    return tl.where(seen, y * inverse_tau, float("-inf"))


@triton.jit(do_not_specialize=["stride_lh", "window", "last_rows", "key"])
def _perturbed_lse_kernel(
    q, k, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, positions_q, positions_k,
    first_heads, stride_qt, stride_qh, stride_kt, stride_kh, stride_lh,
    softmax_scale, softcap, window, last_rows, key, inverse_tau,
    GUMBEL: tl.constexpr, CAUSAL: tl.constexpr, ALIGN_RIGHT: tl.constexpr, G: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Grid (HQ, row blocks, N); late rows see the most keys: they go first. lse is in base 2.
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    start_q, nq = _sequence(cu_seqlens_q, seqused_q, n)
    start_k, nk = _sequence(cu_seqlens_k, seqused_k, n)
    if (m0 >= nq) | (m0 + BLOCK_M <= nq - last_rows):
        return
    offs_m, offs_n = m0 + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    dim_ok, row_ok = offs_d < HEAD_DIM, offs_m < nq
    rows = start_q + offs_m
    q_ptrs = q + head * stride_qh + rows[:, None] * stride_qt + offs_d[None, :]
    qt = tl.load(q_ptrs, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)  # [BM, BD]
    k += start_k * stride_kt + (head // G) * stride_kh
    shift = nk - nq if ALIGN_RIGHT else 0
    if positions_k is not None:
        pos_q = tl.load(positions_q + rows, mask=row_ok, other=0)
        lo, hi = 0, nk
    else:
        pos_q = offs_m + shift
        lo, _, _, hi = zones(m0, nq, nk, shift, window, CAUSAL, BLOCK_M, BLOCK_N)
    noise = fold(_head_stream(key, first_heads, n, head), pos_q)[:, None]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(lo, hi, BLOCK_N):
        in_range = start + offs_n < nk
        k_ptrs = k + tl.cast(start, tl.int64) * stride_kt + offs_n[None, :] * stride_kt
        k_load = in_range[None, :] & dim_ok[:, None]
        kt = tl.load(k_ptrs + offs_d[:, None], mask=k_load, other=0.0)  # [BD, BN]
        pos_k = start + offs_n
        if positions_k is not None:
            pos_k = tl.load(positions_k + start_k + pos_k, mask=in_range, other=0)
        seen = in_range[None, :]
        if CAUSAL or window is not None:
            seen &= visible(pos_q[:, None], pos_k[None, :], window, CAUSAL, window is not None)
        x = tl.dot(qt, kt, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        y = _perturbed(
            x, seen, noise, pos_k[None, :], softmax_scale, softcap, inverse_tau, GUMBEL
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(y, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
        l = l * tl.exp2(m - base) + tl.sum(tl.exp2(y - base[:, None]), 1)
        m = m_new
    # A row that sees no key: +inf makes its probabilities 0.
    row_lse = tl.where(l > 0.0, m + tl.log2(tl.where(l > 0.0, l, 1.0)), float("inf"))
    tl.store(lse + head * stride_lh + rows, row_lse, mask=row_ok)


@triton.jit(do_not_specialize=["stride_lh", "stride_s", "window", "last_rows", "key"])
def _perturbed_columns_kernel(
    q, k, lse, scores, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, positions_q, positions_k,
    first_heads, stride_qt, stride_qh, stride_kt, stride_kh, stride_lh, stride_s,
    softmax_scale, softcap, window, last_rows, key, inverse_tau,
    GROUP: tl.constexpr, GUMBEL: tl.constexpr, CAUSAL: tl.constexpr, ALIGN_RIGHT: tl.constexpr,
    G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Grid (HK, key blocks, N): early key blocks have the most rows and come first.
    head, n = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    n0 = tl.program_id(1) * BLOCK_N
    start_q, nq = _sequence(cu_seqlens_q, seqused_q, n)
    start_k, nk = _sequence(cu_seqlens_k, seqused_k, n)
    offs_n, offs_m = n0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    dim_ok, in_range = offs_d < HEAD_DIM, offs_n < nk
    k_ptrs = k + head * stride_kh + (start_k + offs_n)[:, None] * stride_kt + offs_d[None, :]
    kt = tl.load(k_ptrs, mask=in_range[:, None] & dim_ok[None, :], other=0.0)  # [BN, BD]
    first, shift = tl.maximum(0, nq - last_rows), nk - nq if ALIGN_RIGHT else 0
    rows_end = tl.where(n0 < nk, nq, 0)
    if positions_k is not None:
        pos_k = tl.load(positions_k + start_k + offs_n, mask=in_range, other=0)
        lo, hi = first, rows_end
    else:
        pos_k = offs_n
        lo, _, _, hi = row_zones(
            n0, tl.minimum(n0 + BLOCK_N, nk) - 1, first, rows_end, shift, window,
            CAUSAL, BLOCK_N, BLOCK_M,
        )  # fmt: skip
    total = tl.zeros([BLOCK_N], tl.float32)
    for g in range(G):
        q_head = q + start_q * stride_qt + (head * G + g) * stride_qh
        lse_head = lse + (head * G + g) * stride_lh + start_q
        head_noise = _head_stream(key, first_heads, n, head * G + g)
        column = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(lo, hi, BLOCK_M):
            rows = start + offs_m
            row_ok = (rows >= first) & (rows < nq)
            q_ptrs = q_head + tl.cast(start, tl.int64) * stride_qt + offs_m[None, :] * stride_qt
            q_load = row_ok[None, :] & dim_ok[:, None]
            qt = tl.load(q_ptrs + offs_d[:, None], mask=q_load, other=0.0)  # [BD, BM]
            row_lse = tl.load(lse_head + rows, mask=row_ok, other=float("inf"))
            pos_q = rows + shift
            if positions_k is not None:
                pos_q = tl.load(positions_q + start_q + rows, mask=row_ok, other=0)
            seen = row_ok[None, :]
            if CAUSAL or window is not None:
                seen &= visible(pos_q[None, :], pos_k[:, None], window, CAUSAL, window is not None)
            x = tl.dot(kt, qt, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            y = _perturbed(
                x, seen, fold(head_noise, pos_q)[None, :], pos_k[:, None],
                softmax_scale, softcap, inverse_tau, GUMBEL,
            )  # fmt: skip
            column += tl.sum(tl.exp2(y - row_lse[None, :]), 1)
        total = tl.maximum(total, column) if GROUP == "max" else total + column
    if GROUP == "mean":
        total = total / G
    s_ptrs = scores + (n * tl.num_programs(0) + head) * stride_s + offs_n
    tl.store(s_ptrs, tl.where(in_range, total, 0.0), mask=offs_n < stride_s)


def perturbed_columns_triton(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seed: int, layer: int, tau: float, noise: Noise = "gumbel", first_heads: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    rows: int | None = None, group: Group = "mean",
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`perturbed_columns` by two Triton launches; CPU tensors need the interpreter."""
    (num_q, heads, dim), kv_heads, sequences = q.shape, k.shape[1], len(cu_seqlens_q) - 1
    scores = torch.empty((sequences, kv_heads, max_seqlen_k), dtype=torch.float32, device=q.device)
    if not scores.numel():
        return scores if group != "layer_mean" else scores[:, :1]
    lse = torch.empty((heads, num_q), dtype=torch.float32, device=q.device)
    tiles = lookup(_CONFIG, q)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, positions_q, positions_k)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), num_q)
    scalars = (
        float(softmax_scale), None if softcap is None else float(softcap),
        None if window is None else min(window, _NO_LIMIT), min(rows or _NO_LIMIT, _NO_LIMIT),
        stream(seed, layer), 1.0 / tau,
    )  # fmt: skip
    rest: dict[str, Any] = {"CAUSAL": causal, "ALIGN_RIGHT": align == "right"}
    rest |= {"GUMBEL": noise == "gumbel", "G": heads // kv_heads, "HEAD_DIM": dim}
    rest |= {"BLOCK_D": padded_head_dim(dim), "BLOCK_N": tiles.block_n, "BLOCK_M": tiles.block_m}
    rest |= launch_options(tiles.num_warps, tiles.num_stages)
    if lse.numel() and max_seqlen_q:
        _perturbed_lse_kernel[heads, triton.cdiv(max_seqlen_q, tiles.block_m), sequences](
            q, k, lse, *lengths, first_heads, *strides, *scalars, **rest
        )
    _perturbed_columns_kernel[kv_heads, triton.cdiv(max_seqlen_k, tiles.block_n), sequences](
        q, k, lse, scores, *lengths, first_heads, *strides, max_seqlen_k, *scalars,
        GROUP="mean" if group == "layer_mean" else group, **rest,
    )  # fmt: skip
    return scores if group != "layer_mean" else scores.mean(1, keepdim=True)


def perturbed_columns_reference(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seed: int, layer: int, tau: float, noise: Noise = "gumbel", first_heads: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    rows: int | None = None, group: Group = "mean",
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`perturbed_columns` in plain torch; float64 inputs are computed and returned in float64."""
    mask = Mask(causal, align, window, positions_q, positions_k)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences, kv_heads = len(cu_seqlens_q) - 1, k.shape[1]
    scores = q.new_zeros((sequences, kv_heads, q.shape[1] // kv_heads, max_seqlen_k), dtype=wide)
    heads = torch.arange(q.shape[1], dtype=torch.int32, device=q.device).view(kv_heads, -1)
    span_pairs = zip(spans(cu_seqlens_q, seqused_q), spans(cu_seqlens_k, seqused_k), strict=True)
    for n, (span_q, span_k) in enumerate(span_pairs):
        head = heads if first_heads is None else heads + first_heads[n]
        head_noise = fold_reference(stream(seed, layer), head)[..., None]  # [HK, G, 1]
        for sq, sk, logits in logit_chunks(
            q, k, span_q, span_k, mask, softmax_scale=softmax_scale, softcap=softcap, rows=rows
        ):
            if noise == "gumbel":
                pos_q, pos_k = _positions(mask, span_q, span_k, sq, sk, q.device)
                row_noise = fold_reference(head_noise, pos_q)[..., None]  # [HK, G, r, 1]
                logits += gumbel_reference(fold_reference(row_noise, pos_k))
            p = torch.softmax(logits.div_(tau), -1).nan_to_num_(0.0)  # NaN: sees no key
            scores[n, :, :, sk.start - span_k[0] : sk.stop - span_k[0]] += p.sum(2)
    if group == "layer_mean":
        return scores.flatten(1, 2).mean(1, keepdim=True)
    return reduce_group(scores, group)


def _positions(mask: Mask, span_q, span_k, sq: slice, sk: slice, device) -> tuple[Tensor, Tensor]:
    """int32 positions of packed rows sq and keys sk of a sequence."""
    if mask.positions_q is not None and mask.positions_k is not None:
        return mask.positions_q[sq], mask.positions_k[sk]
    shift = span_k[1] - span_q[1] if mask.align == "right" else 0
    rows = torch.arange(sq.start, sq.stop, dtype=torch.int32, device=device)
    keys = torch.arange(sk.start, sk.stop, dtype=torch.int32, device=device)
    return rows + (shift - span_q[0]), keys - span_k[0]


def perturbed_columns(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seed: int, layer: int, tau: float, noise: Noise = "gumbel", first_heads: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    rows: int | None = None, group: Group = "mean",
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Perturbed column sums -> fp32 [N, HK, max_seqlen_k]; "layer_mean": [N, 1, max_seqlen_k].

    seed, layer: of the noise; noise="none" leaves zeta out. tau > 0: temperature.
    first_heads: int32 [N], what to count a sequence's query heads from in the noise (None: 0).
    Positions of the noise are those of the mask: `positions_q`, `positions_k`, else the index of a
    key and what it is aligned with. All other arguments are those of `column_scores`.

    Columns at or beyond a sequence's length are 0; rows that see no key contribute 0.
    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    check_packed(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, softcap)
    Mask(causal, align, window, positions_q, positions_k).check(q.shape[0], k.shape[0])
    check_noise(seed, layer, noise)
    if not tau > 0:
        raise ValueError(f"expected tau > 0, got {tau}")
    if rows is not None and rows < 1:
        raise ValueError(f"expected rows >= 1 or None, got {rows}")
    if group not in get_args(Group):
        raise ValueError(f"expected group in {get_args(Group)}, got {group!r}")
    if first_heads is not None:
        check_shape("first_heads", first_heads, [len(cu_seqlens_q) - 1])
        check_dtype("first_heads", first_heads, torch.int32)
        check_last_contiguous("first_heads", first_heads)
    run = perturbed_columns_triton if q.is_cuda else perturbed_columns_reference
    return run(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=softmax_scale, seed=seed, layer=layer, tau=tau, noise=noise,
        first_heads=first_heads, seqused_q=seqused_q, seqused_k=seqused_k, rows=rows, group=group,
        causal=causal, align=align, window=window, softcap=softcap,
        positions_q=positions_q, positions_k=positions_k,
    )  # fmt: skip


def aot_signatures() -> list[AotRow]:
    """Every shipped tile choice: bf16 plain and with all options, fp32; the kernels of a row."""
    rows = row_signatures()
    for (arch, d), tiles in _CONFIG.items():
        if arch not in ARCHS or d < 64:  # smaller head_dims share the tiles of 64
            continue
        rows += _aot_rows(arch, d, tiles, "*bf16", options=False)
        rows += _aot_rows(arch, d, tiles, "*bf16", options=True) if d == 128 else []
        rows += _aot_rows(arch, d, _CONFIG["fp32", d], "*fp32", options=False)
    return rows


def _aot_rows(arch: str, block_d: int, tiles: _Tiles, dtype: str, options: bool) -> list[AotRow]:
    """Both kernels; options: window, softcap, seqused, positions, head_dim < block."""
    types = {"q": dtype, "k": dtype, "lse": "*fp32", "scores": "*fp32", "softmax_scale": "fp32"}
    types |= {"cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32", "last_rows": "i32", "key": "i32"}
    types["inverse_tau"] = "fp32"
    if options:
        types |= {"softcap": "fp32", "window": "i32", "first_heads": "*i32"}
        types |= {f"{name}_{side}": "*i32" for name in ("seqused", "positions") for side in "qk"}
    constants = {"GUMBEL": True, "CAUSAL": True, "ALIGN_RIGHT": True, "G": 4, "BLOCK_D": block_d}
    constants |= {"HEAD_DIM": block_d - 32 if options else block_d}
    constants |= {"BLOCK_N": tiles.block_n, "BLOCK_M": tiles.block_m}
    launch = launch_options(tiles.num_warps, tiles.num_stages)
    columns = constants | {"GROUP": "mean"}
    return [
        aot_row(_perturbed_lse_kernel, arch, types, constants, launch),
        aot_row(_perturbed_columns_kernel, arch, types, columns, launch),
    ]
