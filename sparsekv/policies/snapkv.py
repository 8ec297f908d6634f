"""SnapKV: the last queries of the prompt vote for the keys to keep (arXiv 2404.14469).

    vote_j = mean_{h in group} sum_{i in last w rows} A_hij      for keys j < T - w; [B, HK, S]
    score  = pool(vote), 1-D over keys, stride 1, kernel k       the window is cut off before
    keep   the last w tokens and the C - w largest scores; decoding appends, nothing goes any more

"avg" divides by k at the edges too (zero padding counts), "max" pads with -inf. Max pooling makes
exact plateaus around each peak: ties go to the newer key. Default w=32, k=7, max: the LongBench
configuration behind the paper's tables. The group is reduced before pooling (kvpress reduces after:
the same for "avg", different for "max"). Sinks have no protection; they win by score.

Not reproduced from the official code: keys repeated to HQ heads before caching (G times the
memory), scores that see the left padding, a length counter that stays set between prompts so that
later prompts run dense, an assertion when C <= w (here the newest C tokens are kept, and a warning
says so).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

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

Self = TypeVar("Self", bound="SnapKV")


@dataclass(frozen=True)
class SnapKV(Policy):
    """`window` voting queries (always kept), pooling `kernel` and mode, `group` reduction."""

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "avg", "none"] = "max"
    group: Literal["mean", "max", "sum"] = "mean"

    name: ClassVar[str] = "snapkv"
    keeps: ClassVar[str] = "prompt keys that its last queries attend to, and those last tokens"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    facts: ClassVar[Facts] = Facts(
        protects="the last `window` tokens of the prompt",
        budget="C a KV head, the same everywhere",
        acts="once, after the prompt",
        flops="prompt: 2 window T D HQ; step: none",
        bytes="prompt: K once more, 4 T HK written; step: none",
    )

    @classmethod
    def paper_tables(cls: type[Self]) -> Self:
        """LongBench tables of the paper: window 32, kernel 7, max."""
        return cls(window=32, kernel=7, pool="max")

    @classmethod
    def needle(cls: type[Self]) -> Self:
        """Needle-in-a-haystack of the paper (LWM-1M): window 16, kernel 5, max."""
        return cls(window=16, kernel=5, pool="max")

    @classmethod
    def original(cls: type[Self]) -> Self:
        """`init_snapkv` of the official repository: window 32, kernel 5, avg."""
        return cls(window=32, kernel=5, pool="avg")

    @classmethod
    def longbench(cls: type[Self]) -> Self:
        """KVCache-Factory's benchmark harness: window 8, kernel 7, max."""
        return cls(window=8, kernel=7, pool="max")

    @classmethod
    def kvpress(cls: type[Self]) -> Self:
        """NVIDIA kvpress: window 64, kernel 5, avg (also the official class signature)."""
        return cls(window=64, kernel=5, pool="avg")

    def __post_init__(self) -> None:
        positive("window", self.window)
        pooling(self.kernel, self.pool)
        one_of("group", self.group, ("mean", "max", "sum"))

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        if budget <= self.window and budget < tokens:
            warnings.warn(
                f"{self.name} keeps the newest {budget} tokens and no other: its scores need a "
                f"budget above window={self.window}",
                stacklevel=2,
            )
        return (self._layer(budget),) * shape.num_layers

    def needs(self, layer: int, phase: Phase) -> Need | None:
        return Need("sum", rows=self.window, group=self.group) if phase == "prefill" else None

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.columns is not None, "snapkv ranks by the columns that needs() asked for"
        before_window = stats.lengths - stats.recent[:, None]  # [B, HK]
        return pool_columns(stats.columns, self.kernel, self.pool, before_window)

    def _layer(self, budget: int) -> LayerPlan:
        return LayerPlan(budget, recent=min(self.window, budget))
