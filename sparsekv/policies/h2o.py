"""H2O: heavy hitters by accumulated attention, and the newest tokens (arXiv 2306.14048).

    prefill   acc_j = sum_{i >= j} mean_{h in group} A_hij       over ALL query rows; [B, HK, S]
    decode    acc_j += mean_{h in group} A_htj                   for the one query t
    keep      the newest C - heavy tokens, the current one included, and the `heavy` largest acc
    evict     at every decode step: attend C + 1 keys, drop the lowest acc that is not recent

heavy = floor(C * heavy_fraction). The paper uses half heavy, half recent ("20 % cache" is 10 % of
the prompt each), fixed on the prompt and constant afterwards. Accumulated in fp32; the group mean
takes the place of the paper's per-query-head score, because the cache is stored per KV head.
Prefill needs the column sums of all T rows: half the FLOPs of dense causal attention again.

Not reproduced from the official code: a token that leaves the recent window is invisible for one
step (`utils_hh`); the LLaMA evaluation picks the heavy set from future rows (`utils_lm_eval`);
fp16 accumulation, which stops counting once sums reach 1024; one score for the whole batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Need, Phase, Policy, Stats, number, one_of
from sparsekv.policies.budgets import exact


@dataclass(frozen=True)
class H2O(Policy):
    """`heavy_fraction` of the budget by accumulated attention, the rest for the newest tokens."""

    heavy_fraction: float = 0.5
    group: Literal["mean", "max", "sum"] = "mean"

    name: ClassVar[str] = "h2o"
    keeps: ClassVar[str] = "keys with the most attention so far and the newest tokens"
    paper: ClassVar[str] = "H2O, arXiv 2306.14048"
    facts: ClassVar[Facts] = Facts(
        protects="the newest C - heavy tokens",
        budget="C a KV head, the same everywhere",
        acts="after the prompt; then each step attends C + 1 keys and drops one",
        flops="prompt: T^2 D HQ, the logits once more; step: none",
        bytes="prompt: Q and K once more, 4 T HK written; step: 4 n HQ + 20 n HK for "
        "probabilities, scores and positions",
    )
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("heavy_fraction", self.heavy_fraction, at_most=1)
        one_of("group", self.group, ("mean", "max", "sum"))

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        heavy = math.floor(budget * exact(self.heavy_fraction))
        layer = LayerPlan(budget, recent=budget - heavy, decode="evict")
        return (layer,) * shape.num_layers

    def needs(self, layer: int, phase: Phase) -> Need:
        return Need("sum", rows=None, group=self.group)

    def decay(self, layer: int) -> float:
        return 1.0

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.state is not None, "h2o ranks by the state that observe() accumulated"
        return stats.state
