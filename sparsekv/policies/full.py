"""Full cache: nothing is evicted.

    kept = {0 .. t}

The dense baseline to measure every other policy against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Policy, Stats


@dataclass(frozen=True)
class Full(Policy):
    """Every token of every layer, whatever the budget."""

    name: ClassVar[str] = "full"
    keeps: ClassVar[str] = "every token"
    paper: ClassVar[str] = "none (dense attention)"
    facts: ClassVar[Facts] = Facts(
        protects="everything",
        budget="none: every head of every layer keeps all",
        acts="never",
        flops="none",
        bytes="none",
    )

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(budget=None),) * shape.num_layers

    def score(self, layer: int, stats: Stats) -> Tensor:
        return torch.zeros_like(stats.positions, dtype=torch.float32)
