"""CriticalKV: a second stage that weighs scores by what a value can change (arXiv 2502.03805).

n = the free slots of a head (protected tokens are outside both stages), s the scorer's scores:

    u_j     = mean_{h in group} |v_j W_O^(h)|_1                    [B, HK, S]
    stage 1   the floor(n * first_share) largest s
    stage 2   the n - those largest (s + epsilon) u among the rest
    keep      the protected tokens and both; decoding appends

It bounds the L1 change of the attention's output, provided that stage 1 covers most of the mass.
epsilon gives tokens that were never attended a chance; it is per query row, where s is a sum over
rows. Around AdaKV the heads' n are AdaKV's: CriticalAdaKV. u needs the model's output projection;
patch() refuses models where it cannot be read (quantised, offloaded, or not called o_proj). Under
tensor parallelism the projection is split by heads, so every rank has what its heads need.

Defaults: SnapKV(32, 7, max); first_share 0.5 and epsilon 1e-4 of the paper and of kvpress.

Not reproduced from kvpress: protected tokens that use up stage 1 and, multiplied by u, become inf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.adakv import AdaKV
from sparsekv.policies.base import Phase, Policy, Selection, Stats, TopK, number
from sparsekv.policies.budgets import exact
from sparsekv.policies.features import Feature, ProjectedValueNorm, ValueNorm
from sparsekv.policies.snapkv import SnapKV
from sparsekv.policies.wrapper import Wrapper, check_scorer, marked, unprotected


@dataclass(frozen=True)
class CriticalKV(Wrapper):
    """`first_share` of the free slots by score alone, the others by (score + epsilon) times u."""

    scorer: Policy = field(default_factory=SnapKV)
    first_share: float = 0.5
    epsilon: float = 1e-4

    name: ClassVar[str] = "criticalkv"
    keeps: ClassVar[str] = "as its scorer, with half chosen by what their values can change, too"
    paper: ClassVar[str] = "CriticalKV, arXiv 2502.03805"
    facts: ClassVar[Facts] = Facts(
        protects="what its scorer protects",
        budget="as its scorer",
        acts="once, after the prompt",
        flops="as its scorer, and in the prompt 2 T D D_model HQ, one more output projection",
        bytes="as its scorer, and in the prompt V and W_O once more, 4 T HK written",
    )

    @classmethod
    def ada(cls) -> CriticalKV:
        """CriticalAdaKV of kvpress: around AdaKV with a safeguard of 0.2."""
        return cls(AdaKV(mode="safeguard"))

    def __post_init__(self) -> None:
        ranked = self.scorer.scorer if isinstance(self.scorer, AdaKV) else self.scorer
        check_scorer(self, ranked)
        if ranked.signed:
            raise ValueError(
                f"expected a scorer without negative scores for criticalkv, got {ranked.name}"
            )
        if any(isinstance(feature, ValueNorm) for feature in ranked.features(0, "prefill")):
            raise ValueError(
                f"expected a scorer that does not weigh by values for criticalkv, which does, got "
                f"{ranked!r} (value_norm=False turns it off)"
            )
        number("first_share", self.first_share, at_most=1)
        number("epsilon", self.epsilon)

    @property
    def ragged(self) -> bool:  # type: ignore[override]  # constant in other policies
        """Whether heads may hold different counts: as the scorer's."""
        return self.scorer.ragged

    def features(self, layer: int, phase: Phase) -> tuple[Feature, ...]:
        own = (ProjectedValueNorm(),) if phase == "prefill" else ()
        return (*self.scorer.features(layer, phase), *own)

    def select(
        self,
        scores: Tensor,
        keep: Tensor,
        protected: Tensor,
        topk: TopK,
        *,
        layer: int,
        stats: Stats,
    ) -> Selection:
        if isinstance(self.scorer, AdaKV):
            keep = self.scorer.allocate(scores, keep, protected, topk, layer, stats)
        safe = stats.lengths - unprotected(protected, stats.lengths).sum(-1)
        share = exact(self.first_share)
        first = (keep - safe).clamp_min(0) * share.numerator // share.denominator
        certain = protected | marked(topk(scores, (safe + first).int(), protected), scores)
        weighed = (scores + self._epsilon(layer)) * stats.features[ProjectedValueNorm()]
        return topk(weighed, keep, certain)

    def _epsilon(self, layer: int) -> float:
        """epsilon in the unit of the scores: a sum over query rows has the sum of theirs."""
        need = self.needs(layer, "prefill")
        if need is None or need.statistic != "sum" or need.rows is None:
            return self.epsilon
        return self.epsilon * need.rows
