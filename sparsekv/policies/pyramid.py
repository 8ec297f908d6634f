"""PyramidKV: SnapKV's scores, more budget for lower layers than for higher ones (arXiv 2406.02069).

    b_l = high - (high - low) l / (L - 1),  low = (C - w) // beta,  high = 2 (C - w) - low
    layer l keeps b_l + w slots: the last w tokens and its b_l best scores

C is the average over layers and includes the window. Defaults w=8, k=7, max, beta=20 are the
paper's and its harness's (the code's own signature says w=32, k=5, avg).

rounding="exact": largest remainder, the sum is L * C to the slot, no layer gets more than the
prompt has tokens. rounding="official": the released integer arithmetic, which floors the step and
so spends up to 27 % more than C, and falls back to equal layers below 2 (C - w) tokens; for
comparison with published numbers. Whenever the layers come out equal, a warning says so.

Not reproduced: one cache per query head; budgets frozen at the first prompt (Ada-KV's port);
budgets that include the window in the ramp, and fall back to equal layers wherever the highest
would keep less than the window (kvpress).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, one_of, positive
from sparsekv.policies.budgets import pyramid_exact, pyramid_official
from sparsekv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class Pyramid(SnapKV):
    """SnapKV with budgets that fall linearly over depth, about 2 - 1/beta to 1/beta of the mean."""

    window: int = 8
    beta: int = 20
    rounding: Literal["exact", "official"] = "exact"

    name: ClassVar[str] = "pyramid"
    keeps: ClassVar[str] = "as snapkv, with more in lower layers and less in higher ones"
    paper: ClassVar[str] = "PyramidKV, arXiv 2406.02069"
    facts: ClassVar[Facts] = Facts(
        protects="the last `window` tokens of the prompt",
        budget="differs between layers, C on average; the same for the heads of a layer",
        acts="once, after the prompt",
        flops="prompt: 2 window T D HQ; step: none",
        bytes="prompt: K once more, 4 T HK written; step: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("beta", self.beta, at_least=2)
        one_of("rounding", self.rounding, ("exact", "official"))

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        allocate = pyramid_exact if self.rounding == "exact" else pyramid_official
        budgets = allocate(shape.num_layers, tokens, budget, self.window, self.beta)
        if shape.num_layers > 1 and tokens > budget and len(set(budgets)) == 1:
            warnings.warn(
                f"pyramid gives all {shape.num_layers} layers {budget} slots: rounding="
                f"{self.rounding!r} needs a budget above window={self.window}"
                f"{self._official_limit(budget)}, got budget {budget} for {tokens} tokens",
                stacklevel=2,
            )
        return tuple(self._layer(layer_budget) for layer_budget in budgets)

    def _official_limit(self, budget: int) -> str:
        if self.rounding == "exact" or budget <= self.window:
            return ""
        return f" and at least {2 * (budget - self.window)} tokens"
