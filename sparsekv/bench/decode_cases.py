"""Paged decode attention, in a CUDA graph over caches used in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsekv.bench.attention_inputs import Paged, geometry, paged
from sparsekv.bench.case import Case, Context, Factory, Missing, Shape, target
from sparsekv.bench.peers import flashinfer_decode
from sparsekv.kernels._quant import KV_FORMATS, quantise
from sparsekv.kernels.decode import paged_decode_attention

_SHAPES = (
    (1, 4096), (20, 4096), (64, 4096), (16, 32768), (1, 32768), (64, 512), (8, 4096), (1, 512),
)  # fmt: skip
_TINY = ((1, 64), (2, 96))
# Kept fraction of a long cache; "ragged": heads hold half to one and a half of it.
_LONG, _TINY_LONG = (8, 32768), (2, 128)
_QUANTISED = ((20, 4096), (16, 32768))
_KEPT = ((0.5, False), (0.25, False), (0.25, True), (0.1, False))


def decode_cases(tiny: bool) -> list[Case]:
    """Plain, then with probabilities, then with a part of the cache kept."""
    shapes = _TINY if tiny else _SHAPES
    long = _TINY_LONG if tiny else _LONG
    return [
        *(_plain(tiny, b, s) for b, s in shapes),
        *(_with_scores(tiny, b, s) for b, s in shapes),
        *(_kept(tiny, *long, keep, ragged) for keep, ragged in _KEPT),
        *(_quantised(tiny, b, s) for b, s in (_TINY if tiny else _QUANTISED)),
    ]


def _decode(probs: str | None) -> Factory:
    def factory(x: Paged, context: Context) -> list[Callable[[], Any]]:
        return [_call(x, c, probs) for c in x.caches]

    return factory


def _call(x: Paged, c: int, probs: str | None) -> Callable[[], Any]:
    return lambda: paged_decode_attention(
        x.q, x.k[c], x.v[c], x.table, x.lens, softmax_scale=x.heads.scale, probs=probs
    )


def _kv_bytes(tiny: bool, b: int, s: int, keep: float = 1.0) -> float:
    heads = geometry(tiny)
    return 2.0 * b * heads.kv_heads * round(s * keep) * heads.head_dim * heads.itemsize


def _plain(tiny: bool, b: int, s: int) -> Case:
    conditions = ["ratio.flashinfer_tc >= 1.0", "ratio.flashinfer_cc >= 1.0"]
    words = "≥ 1.0× FlashInfer"
    if (b, s) == (16, 32768):
        conditions.append("roof >= 0.95")
        words += ", ≥ 95 % of the copy bandwidth"
    return Case(
        "paged decode",
        "decode",
        {"B": b, "S": s},
        lambda context: paged(context, b, s),
        _decode(None),
        {"flashinfer_tc": flashinfer_decode(True), "flashinfer_cc": flashinfer_decode(False)},
        measure="graph",
        bytes=_kv_bytes(tiny, b, s),
        roof="copy",
        target=target(words, *conditions),
    )


def _with_scores(tiny: bool, b: int, s: int) -> Case:
    heads = geometry(tiny)
    return Case(
        "paged decode with scores",
        "decode",
        {"B": b, "S": s},
        lambda context: paged(context, b, s),
        _decode("mean"),
        {"ours_without": _decode(None)},
        measure="graph",
        bytes=_kv_bytes(tiny, b, s) + 4.0 * b * heads.kv_heads * s,
        roof="copy",
        target=target("≤ 1.08× decode without", f"ratio.ours_without >= {1 / 1.08}"),
    )


def _kept(tiny: bool, b: int, s: int, keep: float, ragged: bool) -> Case:
    shape: Shape = {"B": b, "S": s, "keep": keep}
    if ragged:
        shape["ragged"] = 1
    return Case(
        "paged decode of a part",
        "decode",
        shape,
        lambda context: paged(context, b, s, keep, ragged),
        _decode(None),
        {"flashinfer_tc, all kept": flashinfer_decode(True)},
        measure="graph",
        bytes=_kv_bytes(tiny, b, s, keep),
        roof="copy",
    )


def _quantised(tiny: bool, b: int, s: int) -> Case:
    """int8 first, then the other forms, then the pages as they are."""
    others = {f"ours_{name}": _decode_quantised(name) for name in KV_FORMATS if name != "int8"}
    return Case(
        "paged decode, int8 pages",
        "decode",
        {"B": b, "S": s},
        lambda context: paged(context, b, s),
        _decode_quantised("int8"),
        others | {"ours_not_quantised": _decode(None)},
        measure="graph",
        bytes=_kv_bytes(tiny, b, s) / geometry(tiny).itemsize,
        roof="copy",
    )


def _decode_quantised(name: str) -> Factory:
    def factory(x: Paged, context: Context) -> list[Callable[[], Any]]:
        if name == "fp8_e4m3" and not context.on_gpu:
            raise Missing("needs a CUDA device")
        return [_quantised_call(x, c, name) for c in x.caches]

    return factory


def _quantised_call(x: Paged, c: int, name: str) -> Callable[[], Any]:
    (k, k_scales), (v, v_scales) = (quantise(pages[c], KV_FORMATS[name]) for pages in (x.k, x.v))
    return lambda: paged_decode_attention(
        x.q, k, v, x.table, x.lens, softmax_scale=x.heads.scale,
        k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip
