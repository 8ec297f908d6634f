"""Column statistics of the softmax matrix: how much attention every key received.

    p_ij = exp(x_ij - lse_i)                          x and lse as in prefill_attention
    sum    c_j = sum_i w_i p_ij                       w = row_weights or 1
    max    c_j = max_i p_ij
    count  c_j = #{i sees j : x_ij - lse_i < log_threshold_i}

over the query rows i of a sequence (all, or the last `rows`), per query head; then the G heads of a
KV head are reduced. Given the lse, no max and no rescale are needed: one pass over QK^T.

One program owns BLOCK_N keys of one KV head, holds them, and streams the query rows of the G heads
that see them, in three zones: the first rows and the diagonal (masked), rows that see every key (no
mask), the ragged end of a window (masked). Every column is stored once: no atomics, no T x T.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _column_scores_tma
from ._column_parts import row_zones
from ._common import (
    ARCHS,
    LOG2E,
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

Statistic = Literal["sum", "max", "count"]
Group = Literal["mean", "max", "sum", "layer_mean"]


class _Tiles(NamedTuple):
    block_n: int
    block_m: int
    num_warps: int
    num_stages: int


# (arch, padded head_dim) -> tiles. Two programs a multiprocessor overlap exp2 with matrix work.
_UP_TO_128 = (16, 32, 64, 128)
_CONFIG: dict[tuple[str, int], _Tiles] = {
    **{(a, d): _Tiles(64, 64, 4, 2) for a in ("sm80", "sm89", "sm120") for d in _UP_TO_128},
    **{(a, 256): _Tiles(64, 32, 4, 2) for a in ("sm80", "sm89", "sm120")},
    **{(a, d): _Tiles(128, 64, 4, 3) for a in ("sm90", "sm100") for d in _UP_TO_128},
    **{(a, 256): _Tiles(64, 32, 4, 3) for a in ("sm90", "sm100")},
    **{("gfx942", d): _Tiles(128, 64, 4, 1) for d in _UP_TO_128},
    ("gfx942", 256): _Tiles(64, 32, 4, 1),
    **{("fp32", d): _Tiles(16, 16, 4, 1) for d in (*_UP_TO_128, 256)},
    **{("cpu", d): _Tiles(16, 32, 4, 1) for d in (*_UP_TO_128, 256)},
}
_L2_BYTES = 32 << 20  # queries of a sequence that stay in an L2 of 40-60 MB
_NO_LIMIT = 1 << 30  # larger windows and row counts are clipped: sums stay in int32


@triton.jit
def _accumulate(
    column, kt, q, lse, row_values, positions_q, pos_k, stride_qt, lo, hi, first, nq, shift,
    softmax_scale, softcap, window, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    STATISTIC: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Fold the query rows lo .. hi of one head into `column` [BN]. kt [BN, BD], pos_k [BN].

    q, lse, row_values, positions_q: scalar pointers to row 0; the last two may be None (row i is
    at position i + shift). Rows outside first .. nq count for nothing.
    Without MASK every row of the tiles is inside and sees every key.
    """
    offs_d = tl.arange(0, BLOCK_D)
    if softcap is None:
        log2_scale = softmax_scale * LOG2E
    else:
        log2_scale = 1.0
    for start in tl.range(lo, hi, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        in_range = (offs_m >= first) & (offs_m < nq)
        q_ptrs = q + tl.cast(start, tl.int64) * stride_qt
        q_ptrs += tl.arange(0, BLOCK_M)[None, :] * stride_qt + offs_d[:, None]
        if MASK:
            q_load = in_range[None, :] & (offs_d[:, None] < HEAD_DIM)
            qt = tl.load(q_ptrs, mask=q_load, other=0.0)  # [BLOCK_D, BLOCK_M]
            row_lse = tl.load(lse + offs_m, mask=in_range, other=float("-inf"))
        else:
            if HEAD_DIM != BLOCK_D:
                qt = tl.load(q_ptrs, mask=offs_d[:, None] < HEAD_DIM, other=0.0)
            else:
                qt = tl.load(q_ptrs)
            row_lse = tl.load(lse + offs_m)
        # Rows out of range and rows that saw nothing: +inf makes their probabilities 0.
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2E)
        x = tl.dot(kt, qt, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
        if softcap is not None:
            x = base2_logits(x, softmax_scale, softcap, True)
        log_p = x * log2_scale - row_lse[None, :]
        if MASK and (CAUSAL or window is not None):
            if positions_q is not None:
                pos_q = tl.load(positions_q + offs_m, mask=in_range, other=0)
            else:
                pos_q = offs_m + shift
            seen = visible(pos_q[None, :], pos_k[:, None], window, CAUSAL, window is not None)
            log_p = tl.where(seen, log_p, float("-inf"))
        if row_values is not None:
            if MASK:
                row_value = tl.load(row_values + offs_m, mask=in_range, other=0.0)
            else:
                row_value = tl.load(row_values + offs_m)
        if STATISTIC == "count":  # log_p = -inf marks what is masked or out of range
            low = (log_p < row_value[None, :] * LOG2E) & (log_p > float("-inf"))
            column += tl.sum(low.to(tl.float32), 1)
        elif STATISTIC == "max":
            column = tl.maximum(column, tl.max(tl.exp2(log_p), 1))
        elif row_values is not None:
            column += tl.sum(tl.exp2(log_p) * row_value[None, :], 1)
        else:
            column += tl.sum(tl.exp2(log_p), 1)
    return column


@triton.jit(do_not_specialize=["stride_lh", "stride_s", "window", "last_rows"])
def _column_scores_kernel(
    q, k, lse, row_values, scores,
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, positions_q, positions_k,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_lh, stride_s,
    softmax_scale, softcap, window, last_rows,
    STATISTIC: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    ALIGN_RIGHT: tl.constexpr, G: tl.constexpr, HEADS_FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Early key blocks have the most rows: they come first, of all heads or of one head in a row.
    if HEADS_FIRST:
        head, block, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    else:
        head, block, kv_heads = tl.program_id(1), tl.program_id(0), tl.num_programs(1)
    n = tl.program_id(2).to(tl.int64)
    head = head.to(tl.int64)
    start_q = tl.load(cu_seqlens_q + n).to(tl.int64)
    start_k = tl.load(cu_seqlens_k + n).to(tl.int64)
    nq = (tl.load(cu_seqlens_q + n + 1) - start_q).to(tl.int32)
    nk = (tl.load(cu_seqlens_k + n + 1) - start_k).to(tl.int32)
    if seqused_q is not None:
        nq = tl.load(seqused_q + n)
    if seqused_k is not None:
        nk = tl.load(seqused_k + n)

    n0 = block * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_range = offs_n < nk
    k_ptrs = k + head * stride_kh + (start_k + offs_n)[:, None] * stride_kt + offs_d[None, :]
    k_load = in_range[:, None] & (offs_d[None, :] < HEAD_DIM)
    kt = tl.load(k_ptrs, mask=k_load, other=0.0)  # [BLOCK_N, BLOCK_D]
    first = tl.maximum(0, nq - last_rows)
    rows_end = tl.where(n0 < nk, nq, 0)
    shift = nk - nq if ALIGN_RIGHT else 0
    if positions_k is not None:
        pos_k = tl.load(positions_k + start_k + offs_n, mask=in_range, other=0)
        pos_q = positions_q + start_q
        lo, full_lo, full_hi, hi = first, first, first, rows_end
    else:
        pos_k, pos_q = offs_n, None
        lo, full_lo, full_hi, hi = row_zones(
            n0, tl.minimum(n0 + BLOCK_N, nk) - 1, first, rows_end, shift, window,
            CAUSAL, BLOCK_N, BLOCK_M,
        )  # fmt: skip
    if row_values is not None:
        row_values += start_q

    total = tl.zeros([BLOCK_N], tl.float32)
    for g in range(G):
        q_head = q + start_q * stride_qt + (head * G + g) * stride_qh
        lse_head = lse + (head * G + g) * stride_lh + start_q
        column = tl.zeros([BLOCK_N], tl.float32)
        if positions_k is None:
            column = _accumulate(
                column, kt, q_head, lse_head, row_values, pos_q, pos_k, stride_qt, lo, full_lo,
                first, nq, shift, softmax_scale, softcap, window, True, CAUSAL, STATISTIC,
                HEAD_DIM, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            column = _accumulate(
                column, kt, q_head, lse_head, row_values, pos_q, pos_k, stride_qt, full_lo, full_hi,
                first, nq, shift, softmax_scale, softcap, window, False, CAUSAL, STATISTIC,
                HEAD_DIM, BLOCK_D, BLOCK_M,
            )  # fmt: skip
        if positions_k is not None or window is not None:
            column = _accumulate(
                column, kt, q_head, lse_head, row_values, pos_q, pos_k, stride_qt, full_hi, hi,
                first, nq, shift, softmax_scale, softcap, window, True, CAUSAL, STATISTIC,
                HEAD_DIM, BLOCK_D, BLOCK_M,
            )  # fmt: skip
        total = tl.maximum(total, column) if GROUP == "max" else total + column
    if GROUP == "mean":
        total = total / G
    s_ptrs = scores + (n * kv_heads + head) * stride_s + offs_n
    tl.store(s_ptrs, tl.where(in_range, total, 0.0), mask=offs_n < stride_s)


def column_scores_triton(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    rows: int | None = None, statistic: Statistic = "sum", group: Group = "mean",
    row_weights: Tensor | None = None, log_threshold: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`column_scores` by the Triton kernel; CPU tensors need the interpreter."""
    kv_heads, sequences = k.shape[1], len(cu_seqlens_q) - 1
    scores = torch.empty((sequences, kv_heads, max_seqlen_k), dtype=torch.float32, device=q.device)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    plain = statistic == "sum" and window is None and softcap is None
    # Fewer rows a tile where there are few, and where options would spill registers.
    few = not plain or (rows is not None and rows <= 32)
    plain &= group != "max" and row_weights is None and positions_k is None
    views = _column_scores_tma.matrices(q, k) if plain else None
    rest: dict[str, Any] = {"CAUSAL": causal, "ALIGN_RIGHT": align == "right"}
    if scores.numel() and views is not None:
        with_rows = (max_seqlen_q, rows, softmax_scale, group != "sum")
        _column_scores_tma.launch(q, k, views, lse, scores, lengths, *with_rows, **rest)
    elif scores.numel():
        rest |= {"STATISTIC": statistic, "GROUP": "mean" if group == "layer_mean" else group}
        _launch(
            (q, k, lse, log_threshold if statistic == "count" else row_weights, scores),
            (*lengths, positions_q, positions_k), max_seqlen_q, few,
            (float(softmax_scale), None if softcap is None else float(softcap),
             None if window is None else min(window, _NO_LIMIT), min(rows or _NO_LIMIT, _NO_LIMIT)),
            rest,
        )  # fmt: skip
    # KV heads have G query heads each: the mean of their means is the mean over all heads.
    return scores if group != "layer_mean" else scores.mean(1, keepdim=True)


def _launch(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor], lengths: tuple,
    max_seqlen_q: int, few: bool, scalars: tuple, constexprs: dict[str, Any],
) -> None:  # fmt: skip
    """The pointer kernel; arguments in its order. few: small tiles of query rows."""
    q, k, lse, _, scores = tensors
    (_, heads, head_dim), (sequences, kv_heads, slots) = q.shape, scores.shape
    tiles = lookup(_CONFIG, q)
    blocks = triton.cdiv(slots, tiles.block_n)
    # While all queries stay in L2, run the longest blocks of all heads first; else head by head.
    heads_first = max_seqlen_q * heads * head_dim * q.element_size() <= _L2_BYTES
    grid = (kv_heads, blocks, sequences) if heads_first else (blocks, kv_heads, sequences)
    _column_scores_kernel[grid](
        *tensors, *lengths,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), lse.stride(0), slots, *scalars,
        G=heads // kv_heads, HEADS_FIRST=heads_first, HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim), BLOCK_N=tiles.block_n,
        BLOCK_M=min(tiles.block_m, 32) if few else tiles.block_m, **constexprs,
        **launch_options(tiles.num_warps, tiles.num_stages),
    )  # fmt: skip


def column_scores_reference(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    rows: int | None = None, statistic: Statistic = "sum", group: Group = "mean",
    row_weights: Tensor | None = None, log_threshold: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`column_scores` in plain torch; float64 inputs are computed and returned in float64."""
    mask = Mask(causal, align, window, positions_q, positions_k)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sequences, kv_heads = len(cu_seqlens_q) - 1, k.shape[1]
    scores = q.new_zeros((sequences, kv_heads, q.shape[1] // kv_heads, max_seqlen_k), dtype=wide)
    # A row without a visible key has lse = -inf; +inf makes all its probabilities 0.
    lse = torch.where(lse == -torch.inf, torch.inf, lse.to(wide)).unflatten(0, (kv_heads, -1))
    span_pairs = zip(spans(cu_seqlens_q, seqused_q), spans(cu_seqlens_k, seqused_k), strict=True)
    for n, (span_q, span_k) in enumerate(span_pairs):
        for sq, sk, logits in logit_chunks(
            q, k, span_q, span_k, mask, softmax_scale=softmax_scale, softcap=softcap, rows=rows
        ):
            log_p = logits.sub_(lse[:, :, sq, None])  # [HK, G, r, s]; -inf: not seen
            column = scores[n, :, :, sk.start - span_k[0] : sk.stop - span_k[0]]
            if statistic == "max":
                torch.maximum(column, log_p.exp_().amax(2), out=column)
            elif log_threshold is not None:
                column += ((log_p < log_threshold[sq, None]) & (log_p > -torch.inf)).sum(2)
            elif row_weights is not None:
                weights = row_weights[sq].to(wide)
                column += torch.einsum("hgrs,r->hgs", log_p.exp_(), weights)
            else:
                column += log_p.exp_().sum(2)
    return _reduce_group(scores, group)


def _reduce_group(scores: Tensor, group: Group) -> Tensor:
    """[N, HK, G, S] -> [N, HK, S], or [N, 1, S] for "layer_mean"."""
    if group == "layer_mean":
        return scores.flatten(1, 2).mean(1, keepdim=True)
    if group == "max":
        return scores.amax(2)
    return scores.mean(2) if group == "mean" else scores.sum(2)


def column_scores(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    rows: int | None = None, statistic: Statistic = "sum", group: Group = "mean",
    row_weights: Tensor | None = None, log_threshold: Tensor | None = None,
    causal: bool = True, align: Align = "right", window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None, positions_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Column statistics -> fp32 [N, HK, max_seqlen_k]; group="layer_mean": [N, 1, max_seqlen_k].

    lse: [HQ, Tq] of `prefill_attention` called with the same arguments (sinks are inside it).
    rows: only the last `rows` query rows of each sequence; None: all of them.
    statistic, group: see the module docstring; "layer_mean" is the mean over all HQ query heads.
    row_weights: fp32 [Tq], multiplies p ("sum" only). log_threshold: fp32 [Tq] ("count" only).
    The other arguments are those of `prefill_attention`.

    Columns at or beyond a sequence's length are 0; rows with lse = -inf contribute 0.
    "sum" over all keys gives every query head one unit per non-empty row (less the sink).
    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    check_packed(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, softcap)
    check_shape("lse", lse, [q.shape[1], q.shape[0]])
    check_last_contiguous("lse", lse)
    _check_statistic(q.shape[0], rows, statistic, group, row_weights, log_threshold)
    Mask(causal, align, window, positions_q, positions_k).check(q.shape[0], k.shape[0])
    run = column_scores_triton if q.is_cuda else column_scores_reference
    return run(
        q, k, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=softmax_scale, seqused_q=seqused_q, seqused_k=seqused_k,
        rows=rows, statistic=statistic, group=group,
        row_weights=row_weights, log_threshold=log_threshold,
        causal=causal, align=align, window=window, softcap=softcap,
        positions_q=positions_q, positions_k=positions_k,
    )  # fmt: skip


def _check_statistic(num_q, rows, statistic, group, row_weights, log_threshold) -> None:
    """Raise ValueError unless the options name a statistic that is fully specified."""
    if rows is not None and rows < 1:
        raise ValueError(f"expected rows >= 1 or None, got {rows}")
    if statistic not in get_args(Statistic):
        raise ValueError(f"expected statistic in {get_args(Statistic)}, got {statistic!r}")
    if group not in get_args(Group):
        raise ValueError(f"expected group in {get_args(Group)}, got {group!r}")
    if (log_threshold is None) == (statistic == "count"):
        raise ValueError(f"expected log_threshold with 'count' and only then, got {statistic!r}")
    if row_weights is not None and statistic != "sum":
        raise ValueError(f"expected row_weights only with 'sum', got {statistic!r}")
    for name, value in (("row_weights", row_weights), ("log_threshold", log_threshold)):
        if value is not None:
            check_shape(name, value, [num_q])
            check_dtype(name, value, torch.float32, torch.float64)
            check_last_contiguous(name, value)


def aot_signatures() -> list[AotRow]:
    """Every shipped tile choice, bf16, causal, "sum"; the other statistics with options; fp32."""
    rows = []
    for (arch, d), tiles in _CONFIG.items():
        if arch not in ARCHS or d < 64:  # smaller head_dims share the tiles of 64
            continue
        rows.append(_aot_row(arch, d, tiles, "*bf16", "sum", options=False))
        if d == 128:
            small = tiles._replace(block_m=32)
            rows += [_aot_row(arch, d, small, "*bf16", s, options=True) for s in ("max", "count")]
        rows.append(_aot_row(arch, d, _CONFIG["fp32", d], "*fp32", "sum", options=False))
    return rows + _column_scores_tma.aot_rows()


def _aot_row(
    arch: str, block_d: int, tiles: _Tiles, dtype: str, statistic: str, options: bool
) -> AotRow:
    """One row of aot_signatures; options: window, softcap, seqused and head_dim < block."""
    types = {"q": dtype, "k": dtype, "lse": "*fp32", "scores": "*fp32", "softmax_scale": "fp32"}
    types |= {"cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32", "last_rows": "i32"}
    if options:
        types |= {"seqused_q": "*i32", "seqused_k": "*i32", "softcap": "fp32", "window": "i32"}
    if statistic == "count":
        types |= {"row_values": "*fp32"}
    constexprs = {"STATISTIC": statistic, "GROUP": "mean", "CAUSAL": True, "ALIGN_RIGHT": True}
    constexprs |= {"G": 4, "HEADS_FIRST": True, "BLOCK_D": block_d}
    constexprs |= {"HEAD_DIM": block_d - 32 if options else block_d}
    constexprs |= {"BLOCK_N": tiles.block_n, "BLOCK_M": tiles.block_m}
    launch = launch_options(tiles.num_warps, tiles.num_stages)
    return aot_row(_column_scores_kernel, arch, types, constexprs, launch)
