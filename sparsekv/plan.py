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


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer. window: tokens a query sees, itself included (sliding layers), or None.

    device: where the layer's keys are expected; layers with the same device share a page pool.
    """

    window: int | None
    device: torch.device


@dataclass
class Limits:
    """budget, keep, sinks, recent: int32 [L, B]; mode: one decode mode a layer.

    budget is the number of slots a decode step may hold, keep what a prefill leaves (one less in a
    sliding layer: its next query sees window - 1 old keys). select: int32 [L, B], the tokens that a
    decode step attends (`LayerPlan.select`).
    """

    budget: np.ndarray
    keep: np.ndarray
    sinks: np.ndarray
    recent: np.ndarray
    mode: list[str]
    select: np.ndarray
    _device: dict[torch.device, Tensor] = field(default_factory=dict)
    _selected: dict[torch.device, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """budget, sinks, recent of a layer on `device`, each int32 [B]."""
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
        budget, keep = self.budget[:, rows], self.keep[:, rows]
        sinks, recent, select = self.sinks[:, rows], self.recent[:, rows], self.select[:, rows]
        return Limits(budget, keep, sinks, recent, self.mode, select)


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
    rows = [plans[int(n)] for n in tokens]
    grid = [[_normalised(row[i]) for row in rows] for i in range(len(layers))]
    values = np.array(grid, dtype=np.int32).transpose(2, 0, 1)  # [3, L, B]
    sliding = np.array([[spec.window is not None] for spec in layers], dtype=np.int32)
    longest = rows[int(tokens.argmax())]
    select = [[row[i].select or int(UNLIMITED) for row in rows] for i in range(len(layers))]
    return Limits(
        values[0], values[0] - sliding, values[1], values[2], [plan.decode for plan in longest],
        np.array(select, dtype=np.int32),
    )  # fmt: skip


def _sliding(window: int) -> LayerPlan:
    return LayerPlan(window, recent=1, decode="replace")


def _normalised(plan: LayerPlan) -> tuple[int, int, int]:
    """(budget, sinks, recent), protection cut so that a decode step always finds a victim."""
    if plan.budget is None:
        return int(UNLIMITED), 0, 0
    if plan.budget < 1:
        raise ValueError(f"expected a policy to plan at least 1 token a layer, got {plan.budget}")
    sinks = min(plan.sinks, plan.budget - 1)
    return plan.budget, sinks, min(plan.recent, plan.budget - sinks)
