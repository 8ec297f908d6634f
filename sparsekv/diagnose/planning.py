"""`make_plan`: how many slots each layer and KV head of a model deserves of a total.

    minimise  sum_lh l_lh(k_lh)    subject to    sum_lh k_lh = L HK C,  k_lh >= w

l: the loss curves of `curves.py`, averaged over texts: what later queries lose when a head keeps k
keys of a prompt. `allocate.py` solves it: the next slots go where they save the most. A head whose
every key saves more than those of others ends up full; one that looks at sinks and neighbours gets
little more than the window.

measure="error" counts errors behind the output projection, "mass" attention that is missed. The
texts decide what is measured: where the later tokens repeat a part of the prompt, the heads that
look things up are at work and their errors count; where the text goes on, they mostly rest on the
first token. `texts.stretches` makes both.

per="layer" gives the heads of a layer the same, so that it holds one number a layer; per="head" is
free. Which of them loses less on a text that it was not made from is measured: each text by the
plan of the others (with one text, by its own). "auto" takes heads if they lose less.
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

from sparsekv.diagnose.allocate import best_counts, lost
from sparsekv.diagnose.curves import Curves, loss_curves
from sparsekv.diagnose.texts import read_texts, stretches
from sparsekv.policies import Planned, SnapKV, resolve_budget
from sparsekv.policies.base import one_of

LATER, PAGE = 256, 16


@dataclass(frozen=True)
class MeasuredPlan:
    """slots int [L, HK], the counts for a prompt of `tokens` at `budget` a head on average.

    loss: by "uniform" (equal budgets), "layer" and "head", of texts that a plan was not made from.
    """

    slots: np.ndarray
    per: str
    measure: str
    tokens: int
    later: int
    budget: int
    window: int
    head_dim: int
    loss: dict[str, float]

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
    later: int = LATER,
    scorer: SnapKV | None = None,
    measure: str = "error",
    per: str = "auto",
    page: int = PAGE,
) -> MeasuredPlan:
    """Measure `texts`, ids int64 [1, n + later] each, and split `keep` slots a head on average.

    keep: as `budget` of `sparsekv.patch`, of prompts of n tokens. measure: "error" or "mass". per:
    "auto", "layer" or "head".

    Raises:
        ValueError: a budget that does not exceed the scorer's window, or is above n; otherwise see
            `loss_curves`.
    """
    one_of("per", per, ("auto", "layer", "head"))
    scorer = SnapKV() if scorer is None else scorer
    curves = loss_curves(model, texts, scorer=scorer, later=later, measure=measure, page=page)
    budget = resolve_budget(keep, curves.tokens)
    if not scorer.window < budget <= curves.tokens:
        raise ValueError(
            f"expected a budget above the {scorer.window} tokens of the window and up to the "
            f"{curves.tokens} of a prompt, got {budget}"
        )
    loss = compare(curves, budget)
    if per == "auto":
        per = "head" if loss["head"] < loss["layer"] else "layer"
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return MeasuredPlan(
        split(curves.loss.mean(0), curves.slots, budget, per), per, measure, curves.tokens, later,
        budget, scorer.window, head_dim, loss,
    )  # fmt: skip


def default_plan(model: PreTrainedModel, tokenizer: Any) -> MeasuredPlan:
    """A quick one: two prompts of 1024 tokens of Python's help, a tenth kept."""
    (text,) = read_texts(None)
    texts = stretches(tokenizer, text, 1024, 128, 2, repeat=True)
    return make_plan(model, texts, keep=0.1, later=128)


def split(loss: np.ndarray, slots: np.ndarray, budget: int, per: str) -> np.ndarray:
    """Slots int [L, HK] for curves [L, HK, K]; they sum to L HK budget."""
    layers, heads, _ = loss.shape
    total = layers * heads * budget
    if per == "layer":
        return np.repeat(best_counts(loss.sum(1), slots, total, heads)[:, None], heads, 1)
    return best_counts(loss.reshape(layers * heads, -1), slots, total).reshape(layers, heads)


def compare(curves: Curves, budget: int) -> dict[str, float]:
    """Losses of equal budgets and of both splits, of texts left out: means over texts."""
    found: dict[str, list[float]] = {"uniform": [], "layer": [], "head": []}
    count, layers, heads, points = curves.loss.shape
    for i, own in enumerate(curves.loss):
        others = np.delete(curves.loss, i, 0) if count > 1 else curves.loss
        tables = {
            "uniform": np.full((layers, heads), budget),
            "layer": split(others.mean(0), curves.slots, budget, "layer"),
            "head": split(others.mean(0), curves.slots, budget, "head"),
        }
        for name, table in tables.items():
            found[name].append(lost(own.reshape(-1, points), curves.slots, table.ravel()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def write_plan(plan: MeasuredPlan, file: Path, about: dict[str, Any]) -> None:
    """As JSON for `Planned.load`; about: further fields (model, texts, version)."""
    layers, heads = plan.slots.shape
    model = {"layers": layers, "kv_heads": heads, "head_dim": plan.head_dim}
    data = {
        **about,
        "model": about.get("model", {}) | model,
        "measure": plan.measure,
        "per": plan.per,
        "tokens": plan.tokens,
        "later": plan.later,
        "budget": plan.budget,
        "window": plan.window,
        "loss": {name: round(value, 6) for name, value in plan.loss.items()},
        "full_layers": plan.full_layers,
    }
    rows = ",\n  ".join(json.dumps(row) for row in plan.shares)
    text = json.dumps(data, indent=1)[:-2]
    file.write_text(f'{text},\n "shares": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
