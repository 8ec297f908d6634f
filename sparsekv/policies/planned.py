"""Planned: budgets that were measured on a model, by layer and KV head, for any scorer's ranking.

    keep_lh = r + min(T - r, s share_lh)          sum_lh keep_lh = L HK C
    r = what the scorer protects of a head, at least 1; s makes the sum right

`sparsekv plan` measures the shares (see `sparsekv/diagnose/planning.py`): the free slots that each
head of a model deserves of a total. Here only their proportions count, so a plan serves every
budget and every length; at those that it was made for it gives just the counts that were measured.
Fractions are rounded by largest remainder, ties to the lower layer and head: the sum is exact. A
head that would hold more than the prompt has passes the rest on. Where C <= r all heads are equal,
and a warning says so.

The scorer ranks a prompt once, per head, as under AdaKV; whatever budgets it plans by itself are
not used. With equal shares this is the scorer.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import HeadPlan, LayerPlan, ModelShape, Policy, positive
from sparsekv.policies.budgets import planned_exact
from sparsekv.policies.snapkv import SnapKV
from sparsekv.policies.wrapper import Wrapper, check_scorer


@dataclass(frozen=True)
class Planned(Wrapper):
    """`shares` [layers][KV heads], integers >= 0; `head_dim` of the model they belong to."""

    scorer: Policy = field(default_factory=SnapKV)
    shares: tuple[tuple[int, ...], ...] | None = None
    head_dim: int | None = None

    name: ClassVar[str] = "planned"
    keeps: ClassVar[str] = (
        "as its scorer, with more in layers and heads that were measured to need it"
    )
    paper: ClassVar[str] = "none (measured by `sparsekv plan`)"
    facts: ClassVar[Facts] = Facts(
        protects="what its scorer protects",
        budget="C a KV head on average; differs between layers and heads by their shares",
        acts="once, after the prompt",
        flops="as its scorer",
        bytes="as its scorer",
    )

    @property
    def tensor_parallel(self) -> Literal["local", "refused"]:  # type: ignore[override]
        """Shares are those of all heads of a layer, and a rank sees its own."""
        return "refused"

    @property
    def shape(self) -> ModelShape | None:
        """Of the model that the shares belong to."""
        if self.shares is None:
            return None
        heads = len(self.shares[0])
        return ModelShape(len(self.shares), heads, heads, self.head_dim or 1)

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> Planned:
        """From a file that `sparsekv plan` wrote; `settings` replace what it says.

        Raises:
            ValueError: a file that cannot be read or holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            shares = tuple(tuple(layer) for layer in data["shares"])
            made = {"shares": shares, "head_dim": data["model"]["head_dim"]}
            # Shares are what is free beyond the window that they were measured with.
            made["scorer"] = SnapKV(window=data.get("window", SnapKV.window))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"expected a plan that `sparsekv plan` wrote in {path}, got {error!r}"
            ) from error
        return cls(**(made | settings))

    def __post_init__(self) -> None:
        check_scorer(self, self.scorer)
        if self.head_dim is not None:
            positive("head_dim", self.head_dim)
        if self.shares is None:
            return
        if len({len(layer) for layer in self.shares}) != 1 or not self.shares[0]:
            raise ValueError("expected shares as one row of equal length a layer, got others")
        for layer in self.shares:
            for share in layer:
                positive("every share", share, at_least=0)
        if not any(map(any, self.shares)):
            raise ValueError("expected at least one share above 0, got none")

    def ready(self) -> None:
        super().ready()
        if self.shares is None:
            raise ValueError(
                "expected Planned(shares=...), one share for each layer and KV head, got none: "
                "measure them with `sparsekv plan` and load its file with Planned.load(path)"
            )

    def fits(self, shape: ModelShape) -> None:
        self.ready()
        super().fits(shape)
        assert self.shares is not None
        wanted = (len(self.shares), len(self.shares[0]), self.head_dim or shape.head_dim)
        found = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        if wanted != found:
            raise ValueError(
                "expected the model that the plan was made for, with {} layers of {} KV heads of "
                "{}, got {} of {} of {}".format(*wanted, *found)
            )

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        self.fits(shape)
        assert self.shares is not None
        plans = self.scorer.plan(shape, tokens, budget)
        reserved = max(1, *(min(plan.sinks + plan.recent, budget) for plan in plans))
        if reserved == budget < tokens:
            warnings.warn(
                f"planned gives all heads {budget} slots: its shares need a budget above the "
                f"{reserved} that {self.scorer.name} protects",
                stacklevel=2,
            )
        counts = planned_exact(self.shares, tokens, budget, reserved)
        return tuple(_layer(plan, layer) for plan, layer in zip(plans, counts, strict=True))


def _layer(plan: LayerPlan, counts: list[int]) -> LayerPlan:
    """The scorer's plan of a layer with other budgets: one, or one a KV head."""
    if len(set(counts)) == 1:
        return replace(plan, budget=counts[0])
    heads = tuple(HeadPlan(count, plan.sinks, plan.recent) for count in counts)
    return replace(plan, budget=max(counts), heads=heads)
