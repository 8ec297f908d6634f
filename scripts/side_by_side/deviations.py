"""Our policies with kvpress's deviations put in, one class each.

They exist to show that a deviation is all that differs: with it, the kept sets must be kvpress's.
None is in the library, where docs/kvpress.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.policies import (
    H2O,
    TOVA,
    Chunked,
    CriticalKV,
    KVzip,
    LayerPlan,
    ModelShape,
    SnapKV,
    Stats,
)
from sparsekv.policies.adakv import AdaKV
from sparsekv.policies.features import ProjectedValueNorm
from sparsekv.policies.kvzip import Repeat
from sparsekv.policies.wrapper import marked, unprotected


@dataclass(frozen=True)
class SteppedSnapKV(SnapKV):
    """SnapKV with a budget for each layer: PyramidKVPress, whose budgets include the window."""

    budgets: tuple[int, ...] = ()

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return tuple(self._layer(own) for own in self.budgets)


def pyramid_budgets(layers: int, tokens: int, ratio: float, window: int, beta: int) -> list[int]:
    """`PyramidKVPress.get_layer_budget`: the ramp is not raised by the window, and may be level."""
    mean = tokens * (1 - ratio)
    low, high = mean / beta, 2 * mean - mean / beta
    if high >= tokens - window:
        high = tokens - window
        low = 2 * mean - high
    if not tokens >= high >= low >= window:
        return [max(1, round(mean))] * layers
    return [round(high - layer * (high - low) / (layers - 1)) for layer in range(layers)]


@dataclass(frozen=True)
class LastTokenTOVA(TOVA):
    """TOVA that never drops the newest token."""

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(budget, recent=1, decode="evict"),) * shape.num_layers


@dataclass(frozen=True)
class ObservedAttention(H2O):
    """Column sums by the number of rows that see the key; no recent window."""

    heavy_fraction: float = 1.0

    def score(self, layer: int, stats: Stats) -> Tensor:
        return super().score(layer, stats) / (stats.lengths[..., None] - stats.positions)


class NoSpaceKVzip(KVzip):
    """KVzip whose requests for later chunks do not end in a space."""

    def _encode(self, text: str) -> list[int]:
        return super()._encode(text.removesuffix(" "))


@dataclass(frozen=True)
class UnscoredHeadKVzip(KVzip):
    """KVzip that never scores the first `head` tokens, so that they go, but for the sinks."""

    head: int = 0

    def repeats(self, context: Sequence[int]) -> tuple[Repeat, ...]:
        return KVzip(self.tokenizer, self.chunk, sinks=self.head).repeats(context)


@dataclass(frozen=True)
class WindowInStageOne(CriticalKV):
    """CriticalKV whose first stage is a share of all that a head keeps, protected tokens too.

    safe_share: so much of the budget is certain, whatever the values (AdaKVPress's safeguard).
    """

    safe_share: float = 0.0

    def select(
        self, scores: Tensor, keep: Tensor, protected: Tensor, topk: Any, *,
        layer: int, stats: Stats,
    ) -> Any:  # fmt: skip
        floor = (keep * self.safe_share).int()
        if isinstance(self.scorer, AdaKV):
            keep = self.scorer.allocate(scores, keep, protected, topk, layer, stats)
        safe = stats.lengths - unprotected(protected, stats.lengths).sum(-1)
        first = torch.maximum((keep * self.first_share).int(), floor)
        first = torch.maximum(first, safe).int()
        certain = protected | marked(topk(scores, first, protected), scores)
        weighed = (scores + self._epsilon(layer)) * stats.features[ProjectedValueNorm()]
        return topk(weighed, keep, certain)


@dataclass(frozen=True)
class WindowInChunks(Chunked):
    """Chunked whose windows have the score max + 1 and stay if the mean of their chunk does.

    rows: query rows that a score is the sum of; kvpress takes the mean, and then adds 1.
    """

    rows: int = 1

    def select(
        self, scores: Tensor, keep: Tensor, protected: Tensor, topk: Any, *,
        layer: int, stats: Stats,
    ) -> Any:  # fmt: skip
        everything = torch.ones_like(protected)
        means = scores / self.rows
        top = means.masked_fill(protected, -torch.inf).amax((1, 2), keepdim=True)
        means = torch.where(protected, top + 1, means).mean(1, keepdim=True).expand_as(scores)
        chunks = self._chunk_means(means, everything, stats.positions)
        return topk(chunks, keep, ~everything)
