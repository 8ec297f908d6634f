"""Quest: every token stays cached, a decode step reads the best pages (arXiv 2406.10774).

Per page p of P tokens and KV head, m_p and M_p are the channel-wise smallest and largest keys
(after RoPE). For the query heads g of the group an upper bound of q.k over the page's keys is

    U_p = max_{g in group} sum_i max(q_gi m_pi, q_gi M_pi)                            [B, HK, pages]

A step attends the K = budget // P pages with the largest U_p (at least 2), page 0 and the newest
page always among them, the rest is not read; K is fixed for a generation, also where the budget is
a fraction of the prompt. While the cache is within the budget it attends all of it. Prompts and
the first `dense_layers` layers are dense (2 in the paper).

This is selection, not eviction: IT FREES NO MEMORY. The bounds even cost 2 / P of the keys. What it
saves is reading: about K P + tokens / P keys instead of all.

The official kernels serve as many KV heads as query heads and batch 1; the maximum over the group
and one list of pages a KV head are choices made here, and so is page 0. Not reproduced: the
evaluation script lets the newest page compete and numbers layers from a depth of 32.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Policy, Stats, positive


@dataclass(frozen=True)
class Quest(Policy):
    """The best pages of each step in all layers but the first `dense_layers`."""

    dense_layers: int = 2

    name: ClassVar[str] = "quest"
    keeps: ClassVar[str] = "every token; a step reads the pages that its query may attend most"
    paper: ClassVar[str] = "Quest, arXiv 2406.10774"
    facts: ClassVar[Facts] = Facts(
        protects="everything; a step attends the first and the newest page in any case",
        budget="C tokens a step attends in each layer but the first ones; the cache has none",
        acts="every step, on what is read; nothing goes",
        flops="step: 4 n / P D HQ for the bounds; 4 C D HQ of attention instead of 4 n D HQ",
        bytes="prompt: K once more; step: 4 n / P D HK of bounds read, K and V of C tokens instead "
        "of n",
    )
    selects_pages: ClassVar[bool] = True
    note: ClassVar[str | None] = (
        "quest frees no memory: every token stays cached, decode steps read the best pages only"
    )

    def __post_init__(self) -> None:
        positive("dense_layers", self.dense_layers, at_least=0)

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        dense = min(self.dense_layers, shape.num_layers)
        if dense == shape.num_layers and tokens > budget:
            warnings.warn(
                f"quest attends everything: dense_layers={self.dense_layers} in a model of {dense}",
                stacklevel=2,
            )
        selecting = LayerPlan(None, select=budget)
        return (LayerPlan(None),) * dense + (selecting,) * (shape.num_layers - dense)

    def score(self, layer: int, stats: Stats) -> Tensor:
        return torch.zeros_like(stats.positions, dtype=torch.float32)  # nothing is ever dropped
