"""ExpectedAttention: the attention that queries to come are expected to pay (arXiv 2510.00636).

    z_hj    = c k_j.mu_h + c^2 k_j' Sigma_h k_j / 2       c = 1 / sqrt(D), Gaussian queries
    p_j     = mean_{h in group} softmax_{j >= sinks}(z_hj)
    score_j = (p_j + epsilon) |v_j|_2                     [B, HK, S]
    keep      the first `sinks` tokens and the highest scores; decoding appends

mu and Sigma are the mean and the population covariance of the prompt's queries before RoPE, the
first `sinks` left out, turned by the mean rotation of the next `future` positions. No attention
probability is needed. Defaults are those of kvpress, the paper's code: sinks 4, future 512,
epsilon 0. Its benchmark entry "expected_attention" is AdaKV around it, see
`AdaKV.expected_attention`; under CriticalKV set value_norm=False.

A prompt in chunks is scored, at each chunk, by the queries so far; after its last chunk it is the
one-shot prompt again, so with defer_eviction=True the same keys stay. A later turn is scored by
the queries of that turn alone. A softcap of the model is not applied to z, which is no logit.

Not reproduced from the official code: the length of the current call taken for the position, which
is wrong in chunks and later turns; queries projected a second time; prompts of at most `sinks`
tokens refused (here nothing is dropped, or equal scores keep the newest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import (
    LayerPlan,
    ModelShape,
    Phase,
    Policy,
    Stats,
    flag,
    number,
    positive,
)
from sparsekv.policies.features import ExpectedProbability, Feature, ValueNorm


@dataclass(frozen=True)
class Expected(Policy):
    """Mean query (and with `covariance` its spread) against keys, times the value norm."""

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0
    covariance: bool = True
    value_norm: bool = True

    name: ClassVar[str] = "expected"
    keeps: ClassVar[str] = "keys that future queries are expected to attend to, and sinks"
    paper: ClassVar[str] = "Expected Attention, arXiv 2510.00636"
    facts: ClassVar[Facts] = Facts(
        protects="the first `sinks` tokens",
        budget="C a KV head, the same everywhere",
        acts="once, after the prompt",
        flops="prompt: 4 T D^2 HQ; step: none",
        bytes="prompt: Q, K and V once more, 4 T HQ written and read twice; step: none",
    )

    def __post_init__(self) -> None:
        positive("sinks", self.sinks, at_least=0)
        positive("future", self.future)
        number("epsilon", self.epsilon)
        flag("covariance", self.covariance)
        flag("value_norm", self.value_norm)

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(budget, sinks=min(self.sinks, budget - 1)),) * shape.num_layers

    def features(self, layer: int, phase: Phase) -> tuple[Feature, ...]:
        if phase == "decode":
            return ()
        return (self._probability, ValueNorm()) if self.value_norm else (self._probability,)

    def score(self, layer: int, stats: Stats) -> Tensor:
        score = stats.features[self._probability] + self.epsilon
        return score * stats.features[ValueNorm()] if self.value_norm else score

    @property
    def _probability(self) -> ExpectedProbability:
        return ExpectedProbability(self.sinks, self.future, self.covariance)
