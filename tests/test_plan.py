"""Limits from plans: one number a layer, row and KV head, and plans that make no sense refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from sparsekv.plan import UNLIMITED, LayerSpec, Limits, make_limits
from sparsekv.policies import HeadPlan, LayerPlan, ModelShape, Policy

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Planned(Policy):
    """The same plan for every layer."""

    layer: LayerPlan

    name: ClassVar[str] = "planned"
    keeps: ClassVar[str] = "as planned"
    paper: ClassVar[str] = "none"

    def plan(self, shape, tokens, budget):
        return (self.layer,) * shape.num_layers

    def score(self, layer, stats):
        return stats.positions.float()


def limits(plan: LayerPlan, tokens: tuple[int, ...] = (40, 7)) -> Limits:
    layers = [LayerSpec(None, CPU), LayerSpec(16, CPU)]
    return make_limits(Planned(plan), 8, layers, ModelShape(1, 4, 2, 16), np.array(tokens))


def test_heads_have_their_own_numbers():
    heads = (HeadPlan(None, sinks=3, recent=9), HeadPlan(10, sinks=4, recent=9))
    made = limits(LayerPlan(None, decode="replace", heads=heads))
    assert made.budget.shape == (2, 2, 2) and made.mode == ["replace", "replace"]
    assert made.budget[0].tolist() == [[UNLIMITED, 10]] * 2
    assert made.sinks[0].tolist() == [[0, 4]] * 2 and made.recent[0].tolist() == [[0, 6]] * 2
    assert made.budget[1].tolist() == [[16, 16]] * 2 and made.keep[1].tolist() == [[15, 15]] * 2
    again = made.select_rows(np.array([1]))
    assert again.low.shape == (2, 1, 2)
    assert all(x.is_contiguous() and x.shape == (1, 2) for x in again.on(CPU, 1))


def test_intervals():
    made = limits(LayerPlan(11, sinks=6, recent=2, decode="interval", prefill=9, low=5))
    assert [x[0, 0, 0] for x in (made.budget, made.keep, made.low)] == [11, 9, 5]
    assert made.sinks[0, 0, 0] == 4  # a compression keeps a token that is no sink


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (LayerPlan(8, decode="interval"), "low= with decode='interval'"),
        (LayerPlan(8, low=4), "low= with decode='interval'"),
        (LayerPlan(0), "at least 1 token"),
        (LayerPlan(8, prefill=9), "no more after a prompt"),
        (LayerPlan(8, decode="interval", low=0), "at least 1 token"),
        (LayerPlan(None, heads=(HeadPlan(4),)), "each of the 2 KV heads"),
        (LayerPlan(None, prefill=3, heads=(HeadPlan(4),) * 2), "without prefill="),
    ],
)
def test_plans_that_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        limits(plan)
