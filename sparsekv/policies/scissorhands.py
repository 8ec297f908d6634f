"""Scissorhands: drop the keys that were most often below the mean (arXiv 2305.17118).

    low_j = sum_{h in group} sum_i [ A_hij < 1 / t_i ]    over the last w query rows i; [B, HK, S]
    score = -low; the last r tokens are protected

t_i is the number of keys that row i sees, so 1 / t_i is the mean of its probabilities. Rows that do
not see a key say nothing about it.

    prefill   drop m until C tokens are held, so that T > C leave T - m ceil((T - C) / m)
    decode    appends; when C + 1 tokens are held, drop m

with m = max(1, floor(drop * C)). Counts are small integers, so ties are the norm: the newest stays.
The group is summed, so that every query head's row counts. w = 400, r = 10 and m = C / 2 are the
paper's; its pseudo-code prints ">", with a comment that says "low": "<" is what it means. In a
compression the rows of the last w queries are made anew over the keys that are still held.

Not reproduced: the released OPT evaluation, which masks the prompt by the 90th percentile of every
row and has no budget. The paper's text gives later layers more; no numbers, so all are equal here.
"""

from __future__ import annotations

import math
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
    number,
    one_of,
    positive,
)
from sparsekv.policies.budgets import exact


@dataclass(frozen=True)
class Scissorhands(Policy):
    """History `window` w, `recent` r protected tokens, and the share `drop` that goes at once."""

    window: int = 400
    recent: int = 10
    drop: float = 0.5
    group: Literal["mean", "max", "sum"] = "sum"

    name: ClassVar[str] = "scissorhands"
    keeps: ClassVar[str] = "keys that were seldom below the mean attention, and the newest tokens"
    paper: ClassVar[str] = "Scissorhands, arXiv 2305.17118"
    facts: ClassVar[Facts] = Facts(
        protects="the newest `recent` tokens",
        budget="C a KV head, the same everywhere",
        acts="after the prompt; then C + 1 - m tokens are kept whenever C + 1 are held",
        flops="prompt: 2 window T D HQ; every m steps: 6 window n D HQ",
        bytes="prompt: K once more, 4 T HK written; every m steps: K and V read twice more, "
        "what is kept moved",
    )

    def __post_init__(self) -> None:
        positive("window", self.window)
        positive("recent", self.recent, at_least=0)
        number("drop", self.drop, at_most=1)
        one_of("group", self.group, ("mean", "max", "sum"))

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        m = max(1, math.floor(budget * exact(self.drop)))
        low = budget + 1 - m
        # Of a prompt over budget stay low .. budget tokens.
        prefill = tokens - m * -(-(tokens - budget) // m) if tokens > budget else None
        layer = LayerPlan(
            budget, recent=min(self.recent, low), decode="interval", prefill=prefill, low=low
        )
        return (layer,) * shape.num_layers

    def needs(self, layer: int, phase: Phase) -> Need:
        return Need("count", rows=self.window, group=self.group)

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.columns is not None, "scissorhands ranks by the counts that needs() asked for"
        return -stats.columns
