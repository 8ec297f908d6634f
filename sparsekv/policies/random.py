"""Random eviction: the control that every other policy has to beat.

    score_j = uniform(seed, layer, head, position_j)      in (0, 1), [B, HK, S]
    keep      the C highest                               nothing protected, decoding appends

The number is a hash of what it is for (`policies/noise.py`): the same in every run, in any batch
and however a prompt is cut into chunks. Heads are numbered as this process sees them, so the ranks
of a tensor-parallel model draw the same numbers for their own heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Policy, Stats, positive
from sparsekv.policies.noise import uniform


@dataclass(frozen=True)
class Random(Policy):
    """Keys at random, the same for the same `seed`."""

    seed: int = 0

    name: ClassVar[str] = "random"
    keeps: ClassVar[str] = "keys at random"
    paper: ClassVar[str] = "none (control)"
    facts: ClassVar[Facts] = Facts(
        protects="nothing",
        budget="C a KV head, the same everywhere",
        acts="once, after the prompt",
        flops="none; some 40 integer operations a key of the prompt",
        bytes="prompt: 4 T HK written; step: none",
    )

    def __post_init__(self) -> None:
        positive("seed", self.seed, at_least=0)

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(budget),) * shape.num_layers

    def score(self, layer: int, stats: Stats) -> Tensor:
        heads = torch.arange(stats.positions.shape[1], device=stats.positions.device)
        return uniform(self.seed, layer, heads[:, None], stats.positions)
