"""Column statistics of the softmax matrix: how much attention every key received.

    p_ij = exp(x_ij - lse_i)                          x and lse as in prefill_attention
    sum    c_j = sum_i w_i p_ij                       w = row_weights or 1
    max    c_j = max_i p_ij
    count  c_j = #{i sees j : x_ij - lse_i < log_threshold_i}

over the query rows i of a sequence (all, or the last `rows`), per query head; then the G heads of a
KV head are reduced. Given the lse, no max and no rescale are needed: one pass over QK^T.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ._common import check_dtype, check_heads, check_last_contiguous, check_shape, padded_head_dim
from ._masked import Align, Mask, logit_chunks, spans

Statistic = Literal["sum", "max", "count"]
Group = Literal["mean", "max", "sum", "layer_mean"]


def column_scores_reference(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    rows: int | None = None,
    statistic: Statistic = "sum",
    group: Group = "mean",
    row_weights: Tensor | None = None,
    log_threshold: Tensor | None = None,
    causal: bool = True,
    align: Align = "right",
    window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
) -> Tensor:
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
            hidden = logits == -torch.inf if statistic == "count" else None
            log_p = logits.sub_(lse[:, :, sq, None])  # [HK, G, r, s]
            keys = slice(sk.start - span_k[0], sk.stop - span_k[0])
            column = scores[n, :, :, keys]
            if statistic == "sum":
                p = log_p.exp_()
                column += p.sum(2) if row_weights is None else _weighted(p, row_weights[sq])
            elif statistic == "max":
                torch.maximum(column, log_p.exp_().amax(2), out=column)
            elif hidden is not None and log_threshold is not None:
                low = (
                    (log_p < log_threshold[sq, None]) & ~hidden & (lse[:, :, sq, None] < torch.inf)
                )
                column += low.sum(2)
    return _reduce_group(scores, group)


def _weighted(p: Tensor, weights: Tensor) -> Tensor:
    """sum_r w_r p[.., r, s]."""
    return torch.einsum("hgrs,r->hgs", p, weights.to(p.dtype))


def _reduce_group(scores: Tensor, group: Group) -> Tensor:
    """[N, HK, G, S] -> [N, HK, S], or [N, 1, S] for "layer_mean"."""
    if group == "layer_mean":
        return scores.flatten(1, 2).mean(1, keepdim=True)
    if group == "max":
        return scores.amax(2)
    return scores.mean(2) if group == "mean" else scores.sum(2)


def column_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    rows: int | None = None,
    statistic: Statistic = "sum",
    group: Group = "mean",
    row_weights: Tensor | None = None,
    log_threshold: Tensor | None = None,
    causal: bool = True,
    align: Align = "right",
    window: int | None = None,
    softcap: float | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
) -> Tensor:
    """Column statistics -> fp32 [N, HK, max_seqlen_k]; group="layer_mean": [N, 1, max_seqlen_k].

    lse: [HQ, Tq] of `prefill_attention` called with the same arguments (sinks are inside it).
    rows: only the last `rows` query rows of each sequence; None: all of them.
    statistic, group: see the module docstring; "layer_mean" is the mean over all HQ query heads.
    row_weights: fp32 [Tq], multiplies p ("sum" only). log_threshold: fp32 [Tq] ("count" only).
    The other arguments are those of `prefill_attention`.

    Columns at or beyond a sequence's length are 0; rows with lse = -inf contribute 0.
    With "sum" over heads g and all keys, the total is the number of non-empty rows (less the sink).
    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    _check(q, k, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softcap)
    _check_statistic(q.shape[0], rows, statistic, group, row_weights, log_threshold)
    Mask(causal, align, window, positions_q, positions_k).check(q.shape[0], k.shape[0])
    return column_scores_reference(
        q,
        k,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        rows=rows,
        statistic=statistic,
        group=group,
        row_weights=row_weights,
        log_threshold=log_threshold,
        causal=causal,
        align=align,
        window=window,
        softcap=softcap,
        positions_q=positions_q,
        positions_k=positions_k,
    )


def _check(q, k, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softcap) -> None:
    """Raise ValueError unless the tensors fit together."""
    check_shape("q", q, [None, None, None])
    check_shape("k", k, [None, None, q.shape[2]])
    check_shape("lse", lse, [q.shape[1], q.shape[0]])
    check_heads(q.shape[1], k.shape[1])
    padded_head_dim(q.shape[2])
    for name, x in (("q", q), ("k", k)):
        check_dtype(name, x, q.dtype)
        check_last_contiguous(name, x)
    sequences = cu_seqlens_q.shape[0] - 1
    check_shape("cu_seqlens_k", cu_seqlens_k, [sequences + 1])
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            check_shape(name, used, [sequences])
    if softcap is not None and softcap <= 0:
        raise ValueError(f"expected softcap > 0 or None, got {softcap}")


def _check_statistic(
    num_q: int,
    rows: int | None,
    statistic: str,
    group: str,
    row_weights: Tensor | None,
    log_threshold: Tensor | None,
) -> None:
    """Raise ValueError unless the options name a statistic that is fully specified."""
    if rows is not None and rows < 1:
        raise ValueError(f"expected rows >= 1 or None, got {rows}")
    if statistic not in ("sum", "max", "count"):
        raise ValueError(f"expected statistic 'sum', 'max' or 'count', got {statistic!r}")
    if group not in ("mean", "max", "sum", "layer_mean"):
        raise ValueError(f"expected group 'mean', 'max', 'sum' or 'layer_mean', got {group!r}")
    for name, value, used_by in (
        ("row_weights", row_weights, "sum"),
        ("log_threshold", log_threshold, "count"),
    ):
        if value is not None and statistic != used_by:
            raise ValueError(f"expected {name} only with {used_by!r}, got statistic {statistic!r}")
        if value is not None:
            check_shape(name, value, [num_q])
    if statistic == "count" and log_threshold is None:
        raise ValueError("expected log_threshold with statistic 'count', got None")
