"""Per-layer, per-row limits: what a policy planned, plus the window of sliding layers.

Integer arithmetic on the host; one small upload per prefill tells the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import upload
from sparsekv.policies.base import LayerPlan, ModelShape, Policy
from sparsekv.policies.budgets import resolve_budget

# A budget that nothing reaches: layers that keep everything.
UNLIMITED = np.iinfo(np.int32).max
# Decode modes in which a step by itself writes slots that exist, and holds its budget.
EVICTING = ("replace", "evict")


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer. window: tokens a query sees, itself included (sliding layers), or None.

    device: where the layer's keys are expected; layers with the same device share a page pool.
    """

    window: int | None
    device: torch.device


@dataclass
class Limits:
    """budget, keep, low, sinks, recent: int32 [L, B, HK]; mode: one decode mode a layer.

    budget is the number of slots a decode step may hold, keep what a prefill leaves (one less in a
    sliding layer: its next query sees window - 1 old keys), low what a compression between decode
    steps leaves. select: int32 [L, B], the tokens that a decode step attends (`LayerPlan.select`).
    """

    budget: np.ndarray
    keep: np.ndarray
    low: np.ndarray
    sinks: np.ndarray
    recent: np.ndarray
    mode: list[str]
    select: np.ndarray
    _device: dict[torch.device, Tensor] = field(default_factory=dict)
    _selected: dict[torch.device, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """budget, sinks, recent of a layer on `device`, each int32 [B, HK], contiguous."""
        if device not in self._device:
            # Rows picked by index leave their axis strided, which the kernels refuse.
            stacked = np.ascontiguousarray(np.stack([self.budget, self.sinks, self.recent]))
            self._device[device] = upload(stacked, device)
        budget, sinks, recent = self._device[device][:, layer]
        return budget, sinks, recent

    def select_on(self, device: torch.device, layer: int) -> Tensor:
        """`select` of a layer on `device`, int32 [B]."""
        if device not in self._selected:
            self._selected[device] = upload(np.ascontiguousarray(self.select), device)
        return self._selected[device][layer]

    def select_rows(self, rows: np.ndarray) -> Limits:
        """The limits of the given rows."""
        budget, keep, low = self.budget[:, rows], self.keep[:, rows], self.low[:, rows]
        sinks, recent, select = self.sinks[:, rows], self.recent[:, rows], self.select[:, rows]
        return Limits(budget, keep, low, sinks, recent, self.mode, select)


def make_limits(
    policy: Policy,
    budget: int | float,
    layers: Sequence[LayerSpec],
    shape: ModelShape,
    tokens: np.ndarray,
) -> Limits:
    """Limits for rows that have seen `tokens` int [B] real tokens."""
    plans: dict[int, list[LayerPlan]] = {}
    for count in {int(n) for n in tokens}:
        governed = iter(policy.plan(shape, count, resolve_budget(budget, count)) if count else ())
        plans[count] = [
            next(governed, LayerPlan(None)) if spec.window is None else _sliding(spec.window)
            for spec in layers
        ]
    heads = shape.num_kv_heads
    tables = {count: [_per_head(plan, heads) for plan in row] for count, row in plans.items()}
    grid = np.array([tables[int(n)] for n in tokens], dtype=np.int32)  # [B, L, HK, 5]
    most, keep, low, sinks, recent = grid.transpose(3, 1, 0, 2)  # each [L, B, HK]
    sliding = np.array([[[spec.window is not None]] for spec in layers], dtype=np.int32)
    longest = plans[int(tokens.max())]
    if policy.stateful and any(plan.decode == "interval" for plan in longest):
        raise ValueError(
            f"expected a policy without a score per slot for decode='interval', got {policy.name!r}"
        )
    select = [
        [plans[int(n)][i].select or int(UNLIMITED) for n in tokens] for i in range(len(layers))
    ]
    modes: list[str] = [plan.decode for plan in longest]
    selects = np.array(select, dtype=np.int32)
    return Limits(most, keep - sliding, low, sinks, recent, modes, selects)


def _sliding(window: int) -> LayerPlan:
    return LayerPlan(window, recent=1, decode="replace")


def _per_head(plan: LayerPlan, heads: int) -> list[tuple[int, ...]]:
    """(budget, keep, low, sinks, recent) of each KV head."""
    if plan.heads is None:
        return [_normalised(plan)] * heads
    if len(plan.heads) != heads or plan.decode == "interval" or plan.prefill is not None:
        raise ValueError(
            f"expected heads= with a plan for each of the {heads} KV heads, without prefill= or "
            f"decode='interval', got {plan}"
        )
    return [_normalised(LayerPlan(head.budget, head.sinks, head.recent)) for head in plan.heads]


def _normalised(plan: LayerPlan) -> tuple[int, ...]:
    """Integers of a plan; protection is cut so that a decode step always finds a victim."""
    if (plan.decode == "interval") != (plan.low is not None):
        raise ValueError(f"expected low= with decode='interval' and only then, got {plan}")
    if plan.budget is None:
        keep = int(UNLIMITED) if plan.prefill is None else plan.prefill
        return int(UNLIMITED), keep, int(UNLIMITED), 0, 0
    keep = plan.budget if plan.prefill is None else plan.prefill
    low = plan.budget if plan.low is None else plan.low
    if not 1 <= min(keep, low) <= max(keep, low) <= plan.budget:
        raise ValueError(
            f"expected a policy to plan at least 1 token a layer, and no more after a prompt or a "
            f"compression than its budget, got {plan}"
        )
    sinks = min(plan.sinks, min(keep, low) - 1)
    return plan.budget, keep, low, sinks, min(plan.recent, plan.budget - sinks)
