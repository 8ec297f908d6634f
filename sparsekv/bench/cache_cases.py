"""The kernels around the cache: append, compact, top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsekv.bench.attention_inputs import Paged, geometry, paged
from sparsekv.bench.case import Case, Context, target
from sparsekv.bench.peers import torch_append, torch_gather
from sparsekv.bench.timing import copies
from sparsekv.kernels.append import append_kv
from sparsekv.kernels.compact import compact_kv
from sparsekv.kernels.topk import select_topk


def cache_cases(tiny: bool) -> list[Case]:
    """One shape of compact, two each of append and top-k."""
    rows = (1, 2) if tiny else (1, 20)
    topk = ((2, 256), (4, 256)) if tiny else ((8, 32768), (64, 131072))
    return [
        *(_append(tiny, b, 64 if tiny else 4096) for b in rows),
        _compact(tiny, *((2, 128) if tiny else (8, 32768))),
        *(_topk(*shape) for shape in topk),
    ]


def _append(tiny: bool, b: int, s: int) -> Case:
    heads = geometry(tiny)
    return Case(
        "append one token",
        "cache",
        {"B": b, "S": s},
        lambda context: paged(context, b, s),
        _append_ours,
        {"torch_index_put": torch_append},
        measure="graph",
        bytes=4.0 * b * heads.kv_heads * heads.head_dim * heads.itemsize,
        target=target("≤ 4 µs in a graph", "value <= 0.004"),
    )


def _append_ours(x: Paged, context: Context) -> list[Callable[[], None]]:
    shape = (x.rows, x.heads.kv_heads, 1)
    k = torch.ones(*shape, x.heads.head_dim, dtype=x.heads.dtype, device=context.device)
    slots = (x.lens - 1)[..., None].contiguous()

    def bind(c: int) -> Callable[[], None]:
        pool = (x.k[c], x.v[c], x.positions[c], x.scores[c])
        return lambda: append_kv(k, k, *pool, x.table, slots, slots)

    return [bind(c) for c in x.caches]


def _compact(tiny: bool, b: int, s: int) -> Case:
    heads = geometry(tiny)
    record = 2 * heads.head_dim * heads.itemsize + 8  # K, V, position, score
    moves = b * heads.kv_heads * s / 4  # of the half that is kept, half lies beyond the new end
    return Case(
        "compact, half kept",
        "cache",
        {"B": b, "S": s},
        lambda context: (paged(context, b, s), _half(context, b, s)),
        _compact_ours,
        {"torch_gather": lambda inputs, context: torch_gather(inputs[1], inputs[0])},
        measure="graph",
        bytes=2.0 * moves * record + 2.0 * b * heads.kv_heads * s,  # the mask is read twice
        roof="copy",
        target=target("≥ 3.4 TB/s", "tbs >= 3.4"),
    )


def _half(context: Context, b: int, s: int) -> Tensor:
    """bool [B, HK, S], S / 2 of each half of the slots, at random."""
    heads = geometry(context.tiny)
    shape = (b, heads.kv_heads, 2, s // 2)
    generator = torch.Generator(context.device).manual_seed(1)
    order = torch.rand(shape, generator=generator, device=context.device).argsort(-1)
    return (order < s // 4).flatten(2)


def _compact_ours(inputs: tuple[Paged, Tensor], context: Context) -> Callable[[], Tensor]:
    x, keep = inputs
    pool = (x.k[0], x.v[0], x.positions[0], x.scores[0])
    # Lengths stay as they are, so each call moves the same number of records.
    return lambda: compact_kv(keep, *pool, x.table, x.lens)


def _topk(rows: int, slots: int) -> Case:
    k = slots // 10
    return Case(
        "top-k",
        "cache",
        {"rows": rows, "S": slots, "k": k},
        lambda context: _scores(context, rows, slots),
        lambda x, context: [_select(scores, k) for scores in x],
        {"torch_topk": lambda x, context: [_torch_topk(scores, k) for scores in x]},
        measure="graph",
        bytes=4.0 * rows * slots,
        roof="copy",
        # 8 rows: the heads of one sequence.
        target=target("≤ 60 µs for 64 × 128k", "value <= 0.060") if rows == 64 else None,
    )


def _scores(context: Context, rows: int, slots: int) -> list[Tensor]:
    generator = torch.Generator(context.device).manual_seed(0)
    shape = (rows, slots)
    count = copies(4 * rows * slots, context)
    return [torch.rand(shape, generator=generator, device=context.device) for _ in range(count)]


def _select(scores: Tensor, k: int) -> Callable[[], Any]:
    lens = torch.full(scores.shape[:1], scores.shape[1], dtype=torch.int32, device=scores.device)
    return lambda: select_topk(scores, lens, k)


def _torch_topk(scores: Tensor, k: int) -> Callable[[], Any]:
    return lambda: torch.topk(scores, k, dim=1, sorted=False)
