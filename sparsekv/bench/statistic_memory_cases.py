"""What a statistic takes beside the queries, keys and values that it is made of, at its peak.

The layer of an 8B model with 131072 tokens, through what the runtime itself calls. The result
counts: a statistic of a prompt is 4 MiB. The log-sum-exp of the attention, 16 MiB that exist in any
case, does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.bench.attention_inputs import Packed, packed
from sparsekv.bench.case import Case, Context, Factory, target
from sparsekv.features import Source, compute
from sparsekv.headwise import Keys, Queries, Scores
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.moments import PromptMoments
from sparsekv.policies import Gumbel, Need
from sparsekv.policies.features import (
    ExpectedProbability,
    Feature,
    GroupMaxWindow,
    KeyAnchor,
    KeyNorm,
    KeySimilarity,
    ProjectedValueNorm,
    ValueNorm,
)
from sparsekv.rope import Rotary
from sparsekv.statistics import statistic

PEAK = "peak memory of a statistic"
_MIB = 1 << 20
_TOKENS, _TINY_TOKENS = 131_072, 96
_HELD, _TINY_HELD = 2048, 48  # keys between two compressions
_NEEDS = {
    "sums of all rows": Need("sum"),
    "sums of a window": Need("sum", rows=64),
    "largest of a window": Need("max", rows=64),
    "counts of a window": Need("count", rows=400),
    "noisy sums of all rows": Need("sum", noise=Gumbel()),
}
_FEATURES: dict[str, Feature] = {
    "projected values": ProjectedValueNorm(),
    "expected probabilities": ExpectedProbability(),
    "group maximum of a window": GroupMaxWindow(8),
    "key anchor": KeyAnchor(),
    "key norms": KeyNorm(),
    "value norms": ValueNorm(),
    "near-duplicates": KeySimilarity(),
}


def statistic_memory_cases(tiny: bool) -> list[Case]:
    """Everything a policy may ask for; near-duplicates also of what a cache holds."""
    tokens, held = (_TINY_TOKENS, _TINY_HELD) if tiny else (_TOKENS, _HELD)
    return [
        *(_case(name, tokens, _need(need)) for name, need in _NEEDS.items()),
        *(_case(name, tokens, _feature(feature)) for name, feature in _FEATURES.items()),
        _case("near-duplicates", held, _feature(KeySimilarity())),
    ]


def _case(name: str, tokens: int, factory: Factory) -> Case:
    return Case(
        PEAK,
        "statistics",
        {"statistic": name, "B": 1, "T": tokens},
        lambda context: packed(context, 1, tokens),
        factory,
        measure="samples",
        unit="MiB",
        target=target("≤ 64 MiB", "value <= 64"),
        rounds=1,
    )


def _peak(call: Callable[[], Tensor], context: Context) -> Callable[[], float]:
    """MiB that exist at most while `call` runs, once it is compiled, beyond those before."""

    def run() -> float:
        call()
        context.need_gpu("the record of the allocator")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / _MIB

    return run


def _need(need: Need) -> Factory:
    def factory(x: Packed, context: Context) -> Callable[[], float]:
        lengths = (x.cu, x.cu, x.tokens, x.tokens)
        how: dict[str, Any] = {"softmax_scale": x.heads.scale}
        lse = prefill_attention(x.q, x.k, x.v, *lengths, **how)[1]

        def seen() -> Tensor:
            return torch.arange(1, x.tokens + 1, device=context.device)

        return _peak(lambda: statistic(need, x.q, x.k, lse, lengths, seen, 0, how), context)

    return factory


@dataclass(frozen=True)
class _Prompt:
    """One row of a prompt as features see it."""

    queries: Queries
    keys: Keys
    scores: Scores
    w_o: Tensor

    def source(self) -> Source:
        """Anew for each call: it remembers moments."""
        queries = self.queries
        rotary = Rotary(10_000.0 ** -torch.linspace(0, 1, queries.q.shape[3] // 2))
        moments = PromptMoments(queries, queries.lengths, {}, rotary)

        def last(rows: int) -> Queries:
            count = queries.lengths.clamp_max(rows)
            return Queries(queries.q[:, :, -rows:], queries.positions[:, -rows:], count)

        pads = np.zeros(1, dtype=np.int64)
        return Source(self.keys, pads, self.scores, last, moments.ahead, lambda: self.w_o)


def _prompt(x: Packed) -> _Prompt:
    q, k, v = x.by_head()
    positions = torch.arange(x.tokens, dtype=torch.int32, device=q.device)[None]
    held = torch.full((1, k.shape[1]), x.tokens, dtype=torch.int32, device=q.device)
    width = q.shape[1] * q.shape[3]
    keys = Keys(k, v, positions[:, None].expand(-1, k.shape[1], -1), held)
    w_o = torch.ones(width, width, dtype=q.dtype, device=q.device)
    return _Prompt(Queries(q, positions, held[:, 0]), keys, Scores(x.heads.scale), w_o)


def _feature(feature: Feature) -> Factory:
    def factory(x: Packed, context: Context) -> Callable[[], float]:
        made = _prompt(x)
        return _peak(lambda: compute(feature, made.source()), context)

    return factory
