"""TOVA: the cache as a multi-state RNN that drops what its newest token looks at least
(arXiv 2401.06104).

    s_j = 1/HQ sum_h A_h,t,j      of the newest query t, all HQ heads of the layer; [B, HK, S]

    prefill   keep the C largest s of the prompt's last row
    decode    attend C + 1 keys, drop the lowest s

One set of tokens a layer, the same in all its heads: the paper finds that better than one a head.
There is no window and no sink: nothing is protected, the newest token may go at once. Only the last
row counts, so a slot's score is overwritten at every step (a decay of 0). The paper's headline is
C = 512. All heads must vote, so a model sharded over tensor-parallel ranks is refused.

Not reproduced: kvpress forces the last token to stay; the official cache reports one token more
than it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Need, Phase, Policy, Stats


@dataclass(frozen=True)
class TOVA(Policy):
    """The budget goes to what the newest query attends to, averaged over the heads of a layer."""

    name: ClassVar[str] = "tova"
    keeps: ClassVar[str] = "keys that the newest query attends to, one set a layer"
    paper: ClassVar[str] = "TOVA, arXiv 2401.06104"
    facts: ClassVar[Facts] = Facts(
        protects="nothing, not even the newest token",
        budget="C a KV head, the same everywhere; the heads of a layer keep the same tokens",
        acts="after the prompt; then each step attends C + 1 keys and drops one",
        flops="prompt: 2 T D HQ; step: none",
        bytes="prompt: K once more, 4 T HK written; step: 4 n HQ + 20 n HK for probabilities, "
        "scores and positions",
    )
    stateful: ClassVar[bool] = True
    tensor_parallel: ClassVar[Literal["local", "refused"]] = "refused"

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(budget, decode="evict"),) * shape.num_layers

    def needs(self, layer: int, phase: Phase) -> Need:
        return Need("sum", rows=1, group="layer_mean")

    def decay(self, layer: int) -> float:
        return 0.0

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.state is not None, "tova ranks by the last row that observe() kept"
        return stats.state
