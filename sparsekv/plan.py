"""Per-layer, per-row limits: what a policy planned, plus the window of sliding layers.

Integer arithmetic on the host; one small upload per prefill tells the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import upload
from sparsekv.policies.base import HeadPlan, LayerPlan, ModelShape, Policy, one_of
from sparsekv.policies.budgets import resolve_budget

# A budget that nothing reaches: layers that keep everything. Larger ones come down to it.
UNLIMITED = int(np.iinfo(np.int32).max)
# Decode modes in which a step by itself writes slots that exist, and holds its budget.
EVICTING = ("replace", "evict")
_MODES = ("grow", *EVICTING, "interval")
_COUNTS = ("budget", "prefill", "low", "select", "sinks", "recent")


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
    """Limits for rows that have seen `tokens` int [B] real tokens.

    Raises:
        ValueError: the policy plans for another number of layers, or what makes no sense.
    """
    plans: dict[int, list[LayerPlan]] = {}
    for count in {int(n) for n in tokens}:
        governed = iter(_governed(policy, budget, shape, count))
        plans[count] = [
            next(governed) if spec.window is None else _sliding(spec.window) for spec in layers
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
        [min(plans[int(n)][i].select or UNLIMITED, UNLIMITED) for n in tokens]
        for i in range(len(layers))
    ]
    modes: list[str] = [plan.decode for plan in longest]
    selects = np.array(select, dtype=np.int32)
    return Limits(most, keep - sliding, low, sinks, recent, modes, selects)


def _governed(
    policy: Policy, budget: int | float, shape: ModelShape, tokens: int
) -> Sequence[LayerPlan]:
    """What a policy plans for the layers that it governs, checked."""
    if tokens == 0:
        return (LayerPlan(None),) * shape.num_layers
    plans, whose = tuple(policy.plan(shape, tokens, resolve_budget(budget, tokens))), type(policy)
    if len(plans) != shape.num_layers:
        raise ValueError(
            f"expected a plan of {shape.num_layers} layers from {whose.__name__}, got {len(plans)}"
        )
    for plan in plans:
        _check(plan)
        if plan.decode in EVICTING and policy.evicts_by == "score" and not policy.stateful:
            raise ValueError(
                f"expected a policy with a score per slot (stateful, see observe) or with "
                f"evicts_by='position' for decode={plan.decode!r}, got {whose.__name__}"
            )
        if plan.select is not None and not (policy.selects_pages and plan.select):
            raise ValueError(
                f"expected select= >= 1 in a plan, and that only of a policy that selects_pages, "
                f"got {plan} from {whose.__name__}"
            )
    return plans


def _check(plan: LayerPlan) -> None:
    """Raise ValueError unless every field of a plan is of its kind."""
    if not isinstance(plan, LayerPlan):
        raise ValueError(f"expected a LayerPlan for every layer, got {plan!r}")
    one_of("decode", plan.decode, _MODES)
    heads = plan.heads or ()
    for head in heads:
        if not isinstance(head, HeadPlan):
            raise ValueError(f"expected a HeadPlan for every KV head, got {head!r}")
    for part in (plan, *heads):
        for name in _COUNTS:
            value = getattr(part, name, None)
            if value is None and name not in ("sinks", "recent"):
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
                raise ValueError(
                    f"expected {name} of a plan to be an integer >= 0, got {value!r} in {part}"
                )


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
    most = max(UNLIMITED, plan.prefill or 0) if plan.budget is None else plan.budget
    keep = most if plan.prefill is None else plan.prefill
    low = most if plan.low is None or plan.budget is None else plan.low
    if not 1 <= min(keep, low) <= max(keep, low) <= most:
        raise ValueError(
            f"expected a policy to plan at least 1 token a layer, and no more after a prompt or a "
            f"compression than its budget, got {plan}"
        )
    budget, keep, low = (min(count, UNLIMITED) for count in (most, keep, low))
    if plan.budget is None:
        return budget, keep, low, 0, 0
    sinks = min(plan.sinks, min(keep, low) - 1)
    return budget, keep, low, sinks, min(plan.recent, budget - sinks)
