"""What policies share that take another one's scores and choose keys in their own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsekv.policies.base import LayerPlan, ModelShape, Need, Phase, Policy, Selection, Stats
from sparsekv.policies.features import Feature

# A long prompt in many layers: enough for any scorer to plan what it does with one.
_PROBE = ModelShape(num_layers=128, num_heads=1, num_kv_heads=1, head_dim=1)
_PROBE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Wrapper(Policy):
    """Base of policies around a `scorer`, whose budgets, statistics and scores are taken over."""

    scorer: Policy

    @property
    def tensor_parallel(self) -> Literal["local", "refused"]:  # type: ignore[override]
        """As the scorer's."""
        return self.scorer.tensor_parallel

    @property
    def shape(self) -> ModelShape | None:
        """Of the only model that the scorer fits, if there is one."""
        return getattr(self.scorer, "shape", None)

    def ready(self) -> None:
        self.scorer.ready()

    def fits(self, shape: ModelShape) -> None:
        self.scorer.fits(shape)

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return self.scorer.plan(shape, tokens, budget)

    def needs(self, layer: int, phase: Phase) -> Need | None:
        return self.scorer.needs(layer, phase)

    def features(self, layer: int, phase: Phase) -> tuple[Feature, ...]:
        return self.scorer.features(layer, phase)

    def score(self, layer: int, stats: Stats) -> Tensor:
        return self.scorer.score(layer, stats)


def check_scorer(wrapper: Policy, scorer: object) -> None:
    """Raise ValueError unless `scorer` ranks a prompt once, per head, and lets decoding append."""
    expected = f"expected a scorer for {wrapper.name}"
    if not isinstance(scorer, Policy):
        raise ValueError(f"{expected} that is a policy object, got {scorer!r}")
    probe = getattr(scorer, "shape", None) or _PROBE  # what was measured fits one model only
    plans = scorer.plan(probe, _PROBE_TOKENS, _PROBE_TOKENS // 2)
    modes = sorted({plan.decode for plan in plans} - {"grow"})
    if modes or scorer.stateful:
        how = f"whose decode steps {' and '.join(modes)}" if modes else "that keeps scores per slot"
        raise ValueError(f"{expected} that acts once, after the prompt, got {scorer.name} {how}")
    if all(plan.budget is None for plan in plans):
        raise ValueError(f"{expected} that drops keys, got {scorer.name}, which keeps everything")
    if any(plan.heads is not None for plan in plans):
        raise ValueError(f"{expected} that gives the heads of a layer equal budgets, got others")
    if type(scorer).select is not Policy.select:
        raise ValueError(
            f"{expected} that ranks the keys of each head, got {scorer.name}, which chooses keys "
            "in its own way"
        )


def marked(selection: Selection, like: Tensor) -> Tensor:
    """bool, shaped as `like` [B, R, S]: the selected keys."""
    width = like.shape[-1]
    index = torch.where(selection.index < 0, width, selection.index).long()
    marks = torch.zeros(*like.shape[:-1], width + 1, dtype=torch.bool, device=like.device)
    return marks.scatter_(-1, index, True)[..., :width]


def unprotected(protected: Tensor, lengths: Tensor) -> Tensor:
    """bool [B, HK, S]: the valid keys that may go."""
    rank = torch.arange(protected.shape[-1], device=protected.device)
    return (rank < lengths[..., None]) & ~protected
