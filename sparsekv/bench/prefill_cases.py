"""Prefill attention with its log-sum-exp, and the column scores made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsekv.bench.attention_inputs import Packed, geometry, packed
from sparsekv.bench.case import Case, Context, Factory, Shape, name_of, target
from sparsekv.bench.peers import (
    eager_window,
    flashinfer_prefill,
    flex,
    sdpa_cudnn,
    sdpa_flash,
)
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.prefill import prefill_attention

PREFILL = "prefill attention"
_SHAPES = ((1, 16384), (1, 4096), (1, 32768), (4, 4096), (4, 16384), (4, 32768))
_TINY = ((1, 96), (2, 64))


def prefill_cases(tiny: bool) -> list[Case]:
    """Attention first, since the scores are judged by their share of it."""
    shapes = _TINY if tiny else _SHAPES
    rows = (8,) if tiny else (64, 256)
    return [
        *(_attention(tiny, b, t) for b, t in shapes),
        *(_window(tiny, b, t, w) for b, t in shapes for w in rows if b * t <= 32768),
        *(_all_rows(tiny, b, t) for b, t in shapes if b == 1),
    ]


def _attention(tiny: bool, b: int, t: int) -> Case:
    heads = geometry(tiny)
    peers: dict[str, Factory] = {
        "sdpa_flash": sdpa_flash,
        "sdpa_cudnn": sdpa_cudnn,
        "flashinfer_fa3": flashinfer_prefill("fa3"),
        "flashinfer_fa2": flashinfer_prefill("fa2"),
    }
    if b == 1:  # each shape is a compilation
        peers["flex"] = flex
    return Case(
        PREFILL,
        "prefill",
        {"B": b, "T": t},
        lambda context: packed(context, b, t),
        lambda x, context: lambda: _prefill(x),
        peers,
        flops=2.0 * b * heads.heads * t * t * heads.head_dim,
        roof="matmul",
        target=target(
            "≥ 0.95× cuDNN, ≥ 1.6× SDPA-FA2; stretch ≥ 0.95× FlashInfer-FA3",
            "ratio.sdpa_cudnn >= 0.95",
            "ratio.sdpa_flash >= 1.6",
            stretch="ratio.flashinfer_fa3 >= 0.95",
        ),
    )


def _prefill(x: Packed) -> tuple[Tensor, Tensor]:
    return prefill_attention(
        x.q, x.k, x.v, x.cu, x.cu, x.tokens, x.tokens, softmax_scale=x.heads.scale
    )


@dataclass(frozen=True)
class _Scored(Packed):
    """Packed inputs with the lse fp32 [HQ, B T] of their attention."""

    lse: Tensor


def _scored(b: int, t: int) -> Callable[[Context], _Scored]:
    def inputs(context: Context) -> _Scored:
        x = packed(context, b, t)
        return _Scored(**vars(x), lse=_prefill(x)[1])

    return inputs


def _scores(rows: int | None) -> Factory:
    def factory(x: _Scored, context: Context) -> Callable[[], Any]:
        return lambda: column_scores(
            x.q, x.k, x.lse, x.cu, x.cu, x.tokens, x.tokens, softmax_scale=x.heads.scale, rows=rows
        )

    return factory


def _window(tiny: bool, b: int, t: int, rows: int) -> Case:
    heads, share = geometry(tiny), 0.03 if t >= 16384 else 0.08
    shape: Shape = {"B": b, "T": t, "rows": rows}
    return Case(
        "window scores",
        "prefill",
        shape,
        _scored(b, t),
        _scores(rows),
        {"eager_softmax": eager_window(rows)},
        measure="graph",  # 20 us of work, queued behind the attention: the host has time to launch
        flops=2.0 * b * heads.heads * rows * t * heads.head_dim,
        roof="matmul",
        target=target(
            f"≤ {share:.0%} of the prefill attention, ≥ 15× the eager window softmax",
            f"share <= {share}",
            "ratio.eager_softmax >= 15",
        ),
        versus=name_of(PREFILL, {"B": b, "T": t}),
    )


def _all_rows(tiny: bool, b: int, t: int) -> Case:
    heads = geometry(tiny)
    long = t >= 16384
    return Case(
        "scores of all rows",
        "prefill",
        {"B": b, "T": t},
        _scored(b, t),
        _scores(None),
        flops=1.0 * b * heads.heads * t * t * heads.head_dim,
        roof="matmul",
        target=target("≤ 0.65× the prefill attention", "share <= 0.65") if long else None,
        versus=name_of(PREFILL, {"B": b, "T": t}),
    )
