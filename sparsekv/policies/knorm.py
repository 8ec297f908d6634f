"""Key norm: keys of small L2 norm stay (arXiv 2406.11430).

    score_j = -|k_j|_2            [B, HK, S], keys as cached (a rotation keeps the norm)
    keep    the C highest         nothing protected, decoding appends

Devoto et al. observed that keys of low norm get much attention. It sees neither queries nor
attention, so it is the control that a policy with a statistic has to beat. No setting. The paper
leaves out the first two layers of some models; kvpress's KnormPress, like this, does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Phase, Policy, Stats
from sparsekv.policies.features import Feature, KeyNorm


@dataclass(frozen=True)
class Knorm(Policy):
    """The keys of the smallest norm."""

    name: ClassVar[str] = "knorm"
    keeps: ClassVar[str] = "keys of the smallest norm"
    paper: ClassVar[str] = "A simple and effective L2 norm-based strategy, arXiv 2406.11430"
    facts: ClassVar[Facts] = Facts(
        protects="nothing",
        budget="C a KV head, the same everywhere",
        acts="once, after the prompt",
        flops="prompt: 2 T D HK; step: none",
        bytes="prompt: K once more, 4 T HK written; step: none",
    )
    signed: ClassVar[bool] = True

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(budget),) * shape.num_layers

    def features(self, layer: int, phase: Phase) -> tuple[Feature, ...]:
        return (KeyNorm(),) if phase == "prefill" else ()

    def score(self, layer: int, stats: Stats) -> Tensor:
        return -stats.features[KeyNorm()]
