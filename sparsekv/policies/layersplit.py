"""LayerSplit: the first layers stay full, the others are a window that replaces its weakest key.

The scheme of Novita's "Sparse 0.5.1" (a vLLM 0.5.1 fork described in a write-up, no arXiv number):

    prefill   S_j = mean_{h in group} sum_{i in last alpha rows} A_hij     [B, HK, S], all columns
    decode    the new token overwrites the lowest S that is not recent, then attends, then
              S <- (1 - 1/alpha) S + a_t        accum="ema": the mass of an alpha-row window sum
              S <- S + a_t                      accum="sum": as H2O

The first F layers keep everything; the others hold N slots per KV head and never more, so a decode
step has fixed shapes. The last min(alpha, N // 4) tokens are protected unless `recent` says so.
F=3 and alpha=256 are stated by the source; the recent window, the group mean, the absence of
pooling and the moving average (a true window sum would need alpha rows of scores) are choices made
here. N is not rounded to the page size: pages belong to one KV head, so a last page may be partial.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import (
    LayerPlan,
    ModelShape,
    Need,
    Phase,
    Policy,
    Stats,
    one_of,
    pool_columns,
    pooling,
    positive,
)


@dataclass(frozen=True)
class LayerSplit(Policy):
    """`full_layers` dense layers, then windows scored by the last `window_rows` (alpha) queries.

    budget_is="window": the budget is N. "average": it is the mean over layers, full ones included,
    so N = (L * budget - F * tokens) // (L - F); plan() raises ValueError when that is below 1.
    """

    full_layers: int = 3
    window_rows: int = 256
    recent: int | None = None
    accum: Literal["ema", "sum"] = "ema"
    pool: Literal["max", "avg", "none"] = "none"
    kernel: int = 7
    group: Literal["mean", "max", "sum"] = "mean"
    budget_is: Literal["window", "average"] = "window"

    name: ClassVar[str] = "layersplit"
    keeps: ClassVar[str] = "everything in the first layers, the most attended keys in the others"
    paper: ClassVar[str] = "Novita Sparse 0.5.1 (write-up, no paper)"
    facts: ClassVar[Facts] = Facts(
        protects="`recent` newest tokens, by default min(window_rows, N // 4)",
        budget="N a KV head in all layers but the first `full_layers`, which keep all",
        acts="after the prompt; then each new token overwrites the lowest score before it attends",
        flops="prompt: 2 window_rows T D HQ; step: none",
        bytes="prompt: K once more, 4 T HK written; step: 4 n HQ + 24 n HK for probabilities, "
        "scores and positions",
    )
    stateful: ClassVar[bool] = True

    @classmethod
    def alpha32(cls) -> LayerSplit:
        """SnapKV's 32 voting rows, for comparison with it."""
        return cls(window_rows=32)

    @classmethod
    def alpha8(cls) -> LayerSplit:
        """PyramidKV's 8 voting rows, for comparison with it."""
        return cls(window_rows=8)

    def __post_init__(self) -> None:
        positive("full_layers", self.full_layers, at_least=0)
        positive("window_rows", self.window_rows)
        if self.recent is not None:
            positive("recent", self.recent, at_least=0)
        one_of("accum", self.accum, ("ema", "sum"))
        pooling(self.kernel, self.pool)
        one_of("group", self.group, ("mean", "max", "sum"))
        one_of("budget_is", self.budget_is, ("window", "average"))

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        full = min(self.full_layers, shape.num_layers)
        sparse = shape.num_layers - full
        slots = budget
        if not sparse and tokens > budget:
            warnings.warn(
                f"layersplit keeps everything: full_layers={self.full_layers} in a model of {full}",
                stacklevel=2,
            )
        if self.budget_is == "average" and sparse:
            slots = (shape.num_layers * budget - full * tokens) // sparse
            if slots < 1:
                raise ValueError(
                    f"expected an average budget that pays for {full} full layers of {tokens} "
                    f"tokens and at least 1 slot in {sparse} others, got {budget} x "
                    f"{shape.num_layers} = {budget * shape.num_layers} slots"
                )
        recent = min(self.window_rows, slots // 4) if self.recent is None else self.recent
        window = LayerPlan(slots, recent=min(recent, slots), decode="replace")
        return (LayerPlan(None),) * full + (window,) * sparse

    def needs(self, layer: int, phase: Phase) -> Need | None:
        if layer < self.full_layers:
            return None
        return Need("sum", rows=self.window_rows, group=self.group)

    def observe(
        self, layer: int, phase: Phase, state: Tensor, columns: Tensor, positions: Tensor
    ) -> Tensor:
        if phase == "prefill":
            return columns
        return super().observe(layer, phase, state, columns, positions)

    def decay(self, layer: int) -> float:
        return 1.0 - 1.0 / self.window_rows if self.accum == "ema" else 1.0

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.state is not None, "layersplit ranks by the state that observe() keeps"
        unprotected = stats.lengths - stats.recent[:, None]  # [B, HK]
        return pool_columns(stats.state, self.kernel, self.pool, unprotected)
