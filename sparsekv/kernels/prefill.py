"""Causal attention over packed sequences, with the log-sum-exp that score kernels need.

    x_ij  = softcap(softmax_scale * q_i . k_j)        softcap(x) = c tanh(x / c)
    lse_i = log(sum_j exp(x_ij) + exp(sink_h))        over the keys j that query i sees
    out_i = sum_j exp(x_ij - lse_i) v_j               no visible key: out = 0, lse = -inf

q [Tq, HQ, D], k and v [Tk, HK, D], query head h reads KV head h // G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._common import (
    check_dtype,
    check_heads,
    check_last_contiguous,
    check_shape,
    padded_head_dim,
)
from ._masked import Align, Mask, logit_chunks, spans


def prefill_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    align: Align = "right",
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    align: Align = "right",
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
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
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softcap, sinks)
    Mask(causal, align, window, positions_q, positions_k).check(q.shape[0], k.shape[0])
    return prefill_reference(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        causal=causal,
        align=align,
        window=window,
        softcap=softcap,
        sinks=sinks,
        positions_q=positions_q,
        positions_k=positions_k,
    )


def _check(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softcap, sinks) -> None:
    """Raise ValueError unless the tensors fit together."""
    check_shape("q", q, [None, None, None])
    check_shape("k", k, [None, None, q.shape[2]])
    check_shape("v", v, k.shape)
    check_heads(q.shape[1], k.shape[1])
    padded_head_dim(q.shape[2])
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, x, q.dtype)
        check_last_contiguous(name, x)
    sequences = cu_seqlens_q.shape[0] - 1
    check_shape("cu_seqlens_k", cu_seqlens_k, [sequences + 1])
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            check_shape(name, used, [sequences])
    if softcap is not None and softcap <= 0:
        raise ValueError(f"expected softcap > 0 or None, got {softcap}")
    if sinks is not None:
        check_shape("sinks", sinks, [q.shape[1]])
