"""AdaKV: the heads of a layer share their budget by need, on top of any scorer (arXiv 2407.11550).

F = the free slots of a layer, those of all its KV heads together without the protected tokens;
b = F / HK; s the scorer's scores, [B, HK, S]:

    f_h   = how many of the F largest s of the layer are in head h
    cap_h = (1 - floor) f_h + floor b                 mode="mix", the paper
    cap_h = floor b, and head h's share of the largest of the rest      mode="safeguard", kvpress
    keep    in each head the protected tokens and the cap_h largest s; decoding appends

Fractions are rounded by largest remainder, ties to the lower head, so a layer holds exactly what
was planned. Equal scores of several heads: the newer key first, then the lower head. normalise
multiplies a head's scores by the share of its mass in its b largest. The first `skip` layers keep b
in every head. Around Pyramid the layers differ in F (Ada-PyramidKV). A head that ends up with few
keys holds few pages. Under tensor parallelism every rank shares among its own heads.

Later turns: the heads of a layer again hold the planned total together, or all they have.

Defaults: SnapKV(32, 7, max) as published; floor 0.2, which the authors advise for GQA and their
LongBench runs use (0.5 in the README); normalise is off in their runs.

Not reproduced: totals lost to floor and round (official); batch size 1; budgets frozen at the first
prompt; kvpress counts protected tokens in its safeguard, masks keys by a synthetic one and frees
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import Policy, Selection, Stats, TopK, flag, number, one_of, positive
from sparsekv.policies.budgets import exact
from sparsekv.policies.expected import Expected
from sparsekv.policies.snapkv import SnapKV
from sparsekv.policies.wrapper import Wrapper, check_scorer, marked, unprotected

_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class AdaKV(Wrapper):
    """Budgets per head: `floor` of the mean for each, the rest where the largest scores are."""

    scorer: Policy = field(default_factory=SnapKV)
    floor: float = 0.2
    mode: Literal["mix", "safeguard"] = "mix"
    normalise: bool = False
    skip: int = 0

    name: ClassVar[str] = "adakv"
    keeps: ClassVar[str] = "as its scorer, with more keys in heads that need them"
    paper: ClassVar[str] = "Ada-KV, arXiv 2407.11550"
    facts: ClassVar[Facts] = Facts(
        protects="what its scorer protects",
        budget="C a KV head on average, shared among the KV heads of a layer",
        acts="once, after the prompt",
        flops="as its scorer, and a top-k of T HK scores",
        bytes="as its scorer, and its scores some times more",
    )
    ragged: ClassVar[bool] = True

    @classmethod
    def readme(cls) -> AdaKV:
        """The official quick start: floor 0.5."""
        return cls(floor=0.5)

    @classmethod
    def kvpress(cls) -> AdaKV:
        """AdaKVPress around SnapKVPress: a safeguard of 0.2, window 64, kernel 5, avg."""
        return cls(SnapKV.kvpress(), mode="safeguard")

    @classmethod
    def expected_attention(cls) -> AdaKV:
        """kvpress' benchmark entry of that name: a safeguard around Expected(epsilon=0.01)."""
        return cls(Expected(epsilon=0.01), mode="safeguard")

    def __post_init__(self) -> None:
        check_scorer(self, self.scorer)
        number("floor", self.floor, at_most=1)
        one_of("mode", self.mode, ("mix", "safeguard"))
        positive("skip", self.skip, at_least=0)
        flag("normalise", self.normalise)
        if self.normalise and self.scorer.signed:
            raise ValueError(
                f"expected a scorer without negative scores for normalise, got {self.scorer.name}"
            )

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
        return topk(scores, self.allocate(scores, keep, protected, topk, layer, stats), protected)

    def allocate(
        self,
        scores: Tensor,
        keep: Tensor,
        protected: Tensor,
        topk: TopK,
        layer: int,
        stats: Stats,
    ) -> Tensor:
        """Keys that each head keeps, protected ones included: int32 [B, HK]; see `select`."""
        if layer < self.skip:
            return torch.minimum(keep, stats.lengths)
        free = unprotected(protected, stats.lengths)
        available = free.sum(-1)
        safe = stats.lengths - available
        total = torch.minimum(stats.lengths.sum(-1), keep.sum(-1))
        left = (total - safe.sum(-1)).clamp_min(0)  # [B], F of the docstring
        base = equal_shares(left, available)
        scores = torch.where(scores > _LOWEST, scores, _LOWEST)  # NaN and -inf, too
        if self.normalise:
            best = topk(scores, (safe + base).int(), protected)
            scores = scores * self._concentration(scores, free, best)
        floor = exact(self.floor)
        if self.mode == "mix":
            f = pooled_counts(scores, free, left, topk)
            p, q = floor.numerator, floor.denominator
            return (safe + rounded((q - p) * f + p * base, q)).int()
        own = base * floor.numerator // floor.denominator
        first = marked(topk(scores, (safe + own).int(), protected), scores)
        rest = left - own.sum(-1)
        return (safe + own + pooled_counts(scores, free & ~first, rest, topk)).int()

    @staticmethod
    def _concentration(scores: Tensor, free: Tensor, best: Selection) -> Tensor:
        """[B, HK, 1]: the share of a head's mass that is in its best keys; 1 without any mass."""
        mass = torch.where(free, scores, 0.0)
        top, all_ = (torch.where(marked(best, scores), mass, 0.0).sum(-1), mass.sum(-1))
        return torch.where(all_ > 0, top / all_, 1.0)[..., None]


def equal_shares(total: Tensor, available: Tensor) -> Tensor:
    """`total` int [B] over heads with `available` int [B, HK] keys, as equally as they allow."""
    heads = available.shape[1]
    capacity, order = available.sort(dim=-1, stable=True)
    left, shares = total.long(), torch.zeros_like(capacity)
    for i in range(heads):
        shares[:, i] = torch.minimum(capacity[:, i], left // (heads - i))
        left = left - shares[:, i]
    return torch.zeros_like(shares).scatter_(-1, order, shares)


def pooled_counts(scores: Tensor, free: Tensor, total: Tensor, topk: TopK) -> Tensor:
    """How many of the `total` int [B] best free keys of a layer each head has: int64 [B, HK]."""
    batch, heads, _ = scores.shape
    # The higher index wins a tie: the newer key, then the lower head.
    lists = torch.where(free, scores, -torch.inf).flip(1).transpose(1, 2).reshape(batch, 1, -1)
    lengths = torch.full_like(total, lists.shape[-1], dtype=torch.int32)[:, None]
    nothing = torch.zeros_like(lists, dtype=torch.bool)
    index = topk(lists, total.int()[:, None], nothing, lengths).index[:, 0]
    owner = torch.where(index < 0, -1, heads - 1 - index % heads)
    return torch.stack([(owner == head).sum(-1) for head in range(heads)], dim=-1)


def rounded(numerators: Tensor, denominator: int) -> Tensor:
    """numerators / denominator [B, HK] in integers of the same sum, by largest remainder.

    Ties go to the lower head. The sum of a row of numerators divides by the denominator.
    """
    floors, rest = numerators // denominator, numerators % denominator
    order = rest.sort(dim=-1, descending=True, stable=True).indices
    first = (
        torch.arange(rest.shape[-1], device=rest.device) < rest.sum(-1, keepdim=True) // denominator
    )
    return floors.scatter_add(-1, order, first.long())
