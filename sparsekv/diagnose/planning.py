"""`make_plan`: how many slots each layer and KV head of a model deserves of a total.

    maximise  sum_lh m_lh(k_lh)    subject to    sum_lh k_lh = L HK C,  k_lh >= w

m: the mass curves of `mass.py`, averaged over texts: of what later queries attend among a prompt's
keys, how much a head that keeps k of them still has. `allocate.py` solves it, by pages: give the
next page where it gains the most. A layer in which every page gains more than elsewhere ends up
full; one whose heads look at sinks and neighbours only gets little more than the window.

per="layer" gives the heads of a layer the same, so that it holds one number a layer; per="head" is
free. Which of them keeps more mass of a text that it was not made from is measured: each text by
the plan of the others (with one text, by its own). "auto" takes heads if they keep more.

Attention mass is not quality. A plan is made for what it measures: texts of the kind and length
that the model will meet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.diagnose.allocate import best_counts, kept_mass
from sparsekv.diagnose.mass import Curves, mass_curves
from sparsekv.policies import Planned, SnapKV, resolve_budget
from sparsekv.policies.base import one_of

FUTURE, PAGE = 256, 16


@dataclass(frozen=True)
class MeasuredPlan:
    """slots int [L, HK], the counts for a prompt of `tokens` at `budget` a head on average.

    kept: the mass that stays, by "uniform", "layer" and "head", of texts that a plan was not made
    from; at_stake: all of it.
    """

    slots: np.ndarray
    per: str
    tokens: int
    budget: int
    window: int
    future: int
    head_dim: int
    kept: dict[str, float]
    at_stake: float

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The slots beyond the window, which every head has."""
        return tuple(tuple(int(n) for n in row) for row in self.slots - self.window)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers whose heads all keep the whole prompt."""
        return tuple(np.flatnonzero((self.slots == self.tokens).all(1)).tolist())

    def policy(self) -> Planned:
        """The policy that spends any budget by this plan."""
        return Planned(SnapKV(window=self.window), self.shares, self.head_dim)


def make_plan(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    keep: int | float,
    scorer: SnapKV | None = None,
    future: int = FUTURE,
    per: str = "auto",
    page: int = PAGE,
) -> MeasuredPlan:
    """Measure `texts`, ids int64 [1, n + future] each, and split `keep` slots a head on average.

    keep: as `budget` of `sparsekv.patch`, of prompts of n tokens.

    Raises:
        ValueError: a budget that does not exceed the scorer's window, or is above n; otherwise see
            `mass_curves`.
    """
    one_of("per", per, ("auto", "layer", "head"))
    scorer = SnapKV() if scorer is None else scorer
    curves = mass_curves(model, texts, scorer=scorer, future=future, page=page)
    budget = resolve_budget(keep, curves.tokens)
    if not scorer.window < budget <= curves.tokens:
        raise ValueError(
            f"expected a budget above the {scorer.window} tokens of the window and up to the "
            f"{curves.tokens} of a prompt, got {budget}"
        )
    kept = compare(curves, budget)
    if per == "auto":
        per = "head" if kept["head"] > kept["layer"] else "layer"
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return MeasuredPlan(
        split(curves.mass.mean(0), curves.slots, budget, per), per, curves.tokens, budget,
        scorer.window, future, head_dim, kept, float(curves.mass[..., -1].mean()),
    )  # fmt: skip


def split(mass: np.ndarray, slots: np.ndarray, budget: int, per: str) -> np.ndarray:
    """Slots int [L, HK] for curves [L, HK, K]; they sum to L HK budget."""
    layers, heads, _ = mass.shape
    total = layers * heads * budget
    if per == "layer":
        return np.repeat(best_counts(mass.sum(1), slots, total, heads)[:, None], heads, 1)
    return best_counts(mass.reshape(layers * heads, -1), slots, total).reshape(layers, heads)


def compare(curves: Curves, budget: int) -> dict[str, float]:
    """Mass kept by equal budgets and by both splits, of texts left out: means over texts."""
    found: dict[str, list[float]] = {"uniform": [], "layer": [], "head": []}
    count, layers, heads, points = curves.mass.shape
    for i, own in enumerate(curves.mass):
        others = np.delete(curves.mass, i, 0) if count > 1 else curves.mass
        tables = {
            "uniform": np.full((layers, heads), budget),
            "layer": split(others.mean(0), curves.slots, budget, "layer"),
            "head": split(others.mean(0), curves.slots, budget, "head"),
        }
        for name, table in tables.items():
            flat = own.reshape(layers * heads, points)
            found[name].append(kept_mass(flat, curves.slots, table.ravel()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def write_plan(plan: MeasuredPlan, file: Path, about: dict[str, Any]) -> None:
    """As JSON for `Planned.load`; about: further fields (model, texts, version)."""
    layers, heads = plan.slots.shape
    model = {"layers": layers, "kv_heads": heads, "head_dim": plan.head_dim}
    data = {
        **about,
        "model": about.get("model", {}) | model,
        "method": "greedy pages on mass curves",
        "per": plan.per,
        "tokens": plan.tokens,
        "budget": plan.budget,
        "window": plan.window,
        "future": plan.future,
        "mass_kept": {name: round(value, 6) for name, value in plan.kept.items()},
        "mass_at_stake": round(plan.at_stake, 6),
        "full_layers": plan.full_layers,
    }
    rows = ",\n  ".join(json.dumps(row) for row in plan.shares)
    text = json.dumps(data, indent=1)[:-2]
    file.write_text(f'{text},\n "shares": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
