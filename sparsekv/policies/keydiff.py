"""KeyDiff: keep the keys that differ most from the average direction (arXiv 2504.15364).

    a     = mean_j k_j / |k_j|             over the n keys of a head, after RoPE
    score = -cos(k_j, a)                   [B, HK, S]

No query, no sinks, no window: nothing is protected. The rows are normalised before the mean, the
mean is not (a cosine does not care).

    prefill   block by block inside each layer: attend what is kept and the block, keep C of both
    decode    appends; when C + b tokens are held, keep C

This is the paper's hard cap on memory: with blocks of b = 128 tokens a layer never holds more than
C + b, and tokens of later blocks do not see what earlier blocks have lost. A prompt within the
budget is attended at once. Blocks are counted from the first token of a forward, so the chunks of a
chunked prefill end blocks, too.

Not reproduced: kvpress runs the blocks after a full forward, which saves no memory, and keeps the
first C tokens of the prompt unscored at the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Phase, Policy, Stats, positive
from sparsekv.policies.features import Feature, KeyAnchor

_ANCHOR = KeyAnchor()


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keys unlike the others; `block` tokens come between two cuts."""

    block: int = 128

    name: ClassVar[str] = "keydiff"
    keeps: ClassVar[str] = "keys that point away from the average key"
    paper: ClassVar[str] = "KeyDiff, arXiv 2504.15364"
    facts: ClassVar[Facts] = Facts(
        protects="nothing",
        budget="C a KV head, the same everywhere",
        acts="after every `block` tokens of the prompt, inside each layer; then whenever "
        "C + block tokens are held",
        flops="4 n D HK for each cut",
        bytes="K read twice for each cut, what is kept moved; step: none",
    )
    signed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("block", self.block)

    @property
    def prefill_block(self) -> int:  # type: ignore[override]  # None in other policies
        """Tokens of a prompt that a layer attends before it cuts."""
        return self.block

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        most = budget + self.block - 1
        layer = LayerPlan(most, decode="interval", prefill=budget, low=budget)
        return (layer,) * shape.num_layers

    def features(self, layer: int, phase: Phase) -> tuple[Feature, ...]:
        return (_ANCHOR,)

    def score(self, layer: int, stats: Stats) -> Tensor:
        return -stats.features[_ANCHOR]
