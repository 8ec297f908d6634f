"""Keyformer: accumulated attention under Gumbel noise and a rising temperature (arXiv 2403.09054).

    f_j  <- f_j + sum_{queries i} softmax_j( (x_hij + zeta_hij) / tau )    then over the group
    tau   = min(tau_end, tau_start + itr (tau_end - tau_start) / tau_steps)

f is [B, HK, S]; itr counts the decode steps since the prompt and is 0 in the prompt. zeta is
standard Gumbel noise, a function of (seed, layer, query head, position of i, position of j), so
that a text scores the same in any batch; noise="none" leaves the temperature only.

    prefill   keep the newest `recent` tokens and the largest f
    decode    attend C + 1 keys, drop the lowest f that is not recent

recent = floor(C * recent_fraction); the paper recommends 0.2 to 0.3, tau from 1 to 2 and 128 steps
of it. No sinks. Of the query heads of a group the mean is taken, because the cache is stored per
KV head. The noisy rows have a softmax of their own: the prompt costs two more passes over QK^T.

Not reproduced from the official code: the key set is frozen after the prompt and no generated
token can enter it; scores summed over the batch; noise without a seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import (
    Gumbel,
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
class Keyformer(Policy):
    """`recent_fraction` of the budget for the newest tokens, the rest by noisy attention."""

    recent_fraction: float = 0.3
    tau_start: float = 1.0
    tau_end: float = 2.0
    tau_steps: int = 128
    seed: int = 0
    noise: Literal["gumbel", "none"] = "gumbel"
    group: Literal["mean", "max", "sum"] = "mean"

    name: ClassVar[str] = "keyformer"
    keeps: ClassVar[str] = "keys with the most noisy attention so far and the newest tokens"
    paper: ClassVar[str] = "Keyformer, arXiv 2403.09054"
    facts: ClassVar[Facts] = Facts(
        protects="the newest C recent_fraction tokens",
        budget="C a KV head, the same everywhere",
        acts="after the prompt; then each step attends C + 1 keys and drops one",
        flops="prompt: 2 T^2 D HQ, the logits twice more, and T^2 HQ draws of noise; step: none",
        bytes="prompt: Q and K twice more, 4 T HK written; step: 12 n HQ + 24 n HK for "
        "probabilities, scores and positions",
    )
    stateful: ClassVar[bool] = True
    # Heads are numbered for the noise as this process sees them.
    tensor_parallel: ClassVar[Literal["local", "refused"]] = "refused"

    def __post_init__(self) -> None:
        number("recent_fraction", self.recent_fraction, at_most=1)
        number("tau_start", self.tau_start)
        number("tau_end", self.tau_end)
        if not 0.0 < self.tau_start <= self.tau_end:
            raise ValueError(
                f"expected 0 < tau_start <= tau_end, got {self.tau_start!r} and {self.tau_end!r}"
            )
        positive("tau_steps", self.tau_steps)
        positive("seed", self.seed, at_least=0)
        if self.seed >= 1 << 32:
            raise ValueError(f"expected a seed below 2^32, got {self.seed}")
        one_of("noise", self.noise, ("gumbel", "none"))
        one_of("group", self.group, ("mean", "max", "sum"))

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        recent = math.floor(budget * exact(self.recent_fraction))
        return (LayerPlan(budget, recent=recent, decode="evict"),) * shape.num_layers

    def needs(self, layer: int, phase: Phase) -> Need:
        noise = Gumbel(self.seed, self.tau_start, self.tau_end, self.tau_steps, self.noise)
        return Need("sum", rows=None, group=self.group, noise=noise)

    def decay(self, layer: int) -> float:
        return 1.0

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.state is not None, "keyformer ranks by the state that observe() accumulated"
        return stats.state
