"""R-KV: attention of the last queries less redundancy, for long reasoning (arXiv 2505.24133).

    I     = max_pool_k( mean_i softmax_{j < n - w}( max_{h in group} x_hij ) )   i: last w queries
    R     = softmax_j( mean_i cos(k_i, k_j) )   but each i skips j = i and its last j with cos > s
    Z     = mix I - (1 - mix) R                 score, [B, HK, S]; the last w tokens are protected

The group is reduced on logits, before the softmax, and the window's own keys are left out of it. R
is high for the old members of a cluster of near duplicates; the newest one is spared.

    prefill   keep the C best and newest
    decode    appends; when C + buffer tokens are held, keep C

w = 8, k = 7, s = 0.5 and a buffer of 128 generated tokens are the paper's, as is mix = 0.1; the
code has 0.07 (`RKV.code()`). The step that makes a compression due still attends all keys.

Not reproduced from the official code: a key without near duplicates zeroes entry 0 of its row (an
accidental bonus or malus of the first token); batches of one; a step counter that no prompt resets.
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
    number,
    pool_columns,
    pooling,
    positive,
)
from sparsekv.policies.features import Feature, GroupMaxWindow, KeySimilarity


@dataclass(frozen=True)
class RKV(Policy):
    """`window` queries, pooling `kernel`, `similarity` of duplicates, `mix`, `buffer` steps."""

    window: int = 8
    kernel: int = 7
    similarity: float = 0.5
    mix: float = 0.1
    buffer: int = 128

    name: ClassVar[str] = "rkv"
    keeps: ClassVar[str] = "keys that the last queries attend to and that have no newer likeness"
    paper: ClassVar[str] = "R-KV, arXiv 2505.24133"
    facts: ClassVar[Facts] = Facts(
        protects="the newest `window` tokens",
        budget="C a KV head, the same everywhere",
        acts="after the prompt; then whenever C + buffer tokens are held",
        flops="prompt: 4 window T D HQ + 2 T^2 D HK; every `buffer` steps the same with n for T",
        bytes="prompt: K several times more, 8 T HK written; every `buffer` steps the same with n "
        "for T, what is kept moved",
    )
    signed: ClassVar[bool] = True

    @classmethod
    def code(cls) -> RKV:
        """The official repository's default: mix 0.07."""
        return cls(mix=0.07)

    def __post_init__(self) -> None:
        positive("window", self.window)
        pooling(self.kernel, "max")
        positive("buffer", self.buffer)
        for name in ("similarity", "mix"):
            number(name, getattr(self, name), at_most=1)

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        layer = LayerPlan(
            budget + self.buffer - 1, recent=min(self.window, budget), decode="interval",
            prefill=budget, low=budget,
        )  # fmt: skip
        return (layer,) * shape.num_layers

    def features(self, layer: int, phase: Phase) -> tuple[Feature, ...]:
        return GroupMaxWindow(self.window), KeySimilarity(self.similarity)

    def score(self, layer: int, stats: Stats) -> Tensor:
        attention, redundancy = (stats.features[f] for f in self.features(layer, "decode"))
        older = stats.lengths - self.window
        importance = pool_columns(attention, self.kernel, "max", older)
        return self.mix * importance - (1.0 - self.mix) * redundancy
