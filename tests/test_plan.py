"""Limits from plans: one number a layer, row and KV head, and plans that make no sense refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
    evicts_by: ClassVar[Literal["score", "position"]] = "position"

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
        (LayerPlan(None, prefill=0), "at least 1 token"),
        (LayerPlan(8, decode="bogus"), "decode to be one of grow, replace, .*, got 'bogus'"),
        (LayerPlan(7.9), r"budget of a plan to be an integer >= 0, got 7\.9"),
        (LayerPlan(True), "budget of a plan to be an integer >= 0, got True"),
        (LayerPlan(8, sinks=None), "sinks of a plan to be an integer >= 0, got None"),
        (LayerPlan(8, recent=-1), "recent of a plan to be an integer >= 0, got -1"),
        (LayerPlan(8, prefill="4"), "prefill of a plan to be an integer >= 0, got '4'"),
        (LayerPlan(None, heads=(HeadPlan(4), HeadPlan(4.5))), r"budget of a plan .* got 4\.5"),
        (LayerPlan(None, heads=(4, 4)), "a HeadPlan for every KV head, got 4"),
        (LayerPlan(None, select=32), "a policy that selects_pages, got .* from Planned"),
        (8, "a LayerPlan for every layer, got 8"),
    ],
)
def test_plans_that_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        limits(plan)


@pytest.mark.parametrize("decode", ["replace", "evict"])
def test_a_step_drops_by_scores_that_somebody_keeps(decode):
    """score() is not asked in such a step: without a state all slots would count 0, for ever."""

    class Scored(Planned):
        evicts_by = "score"

    class Stateful(Scored):
        stateful = True

    shape, layers, tokens = ModelShape(1, 4, 2, 16), [LayerSpec(None, CPU)], np.array([40])
    plan = LayerPlan(8, decode=decode)
    with pytest.raises(ValueError, match=f"score per slot .* for decode='{decode}', got Scored"):
        make_limits(Scored(plan), 8, layers, shape, tokens)
    assert make_limits(Stateful(plan), 8, layers, shape, tokens).mode == [decode]


@dataclass(frozen=True)
class Listed(Policy):
    """Just these plans, however many layers there are."""

    layers: tuple[LayerPlan, ...]

    name: ClassVar[str] = "listed"
    keeps: ClassVar[str] = "as listed"
    paper: ClassVar[str] = "none"
    selects_pages: ClassVar[bool] = True

    def plan(self, shape, tokens, budget):
        return self.layers

    def score(self, layer, stats):
        return stats.positions.float()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_plan_for_every_governed_layer(count):
    """Sliding layers have none; a missing plan is no leave to keep everything."""
    layers = [LayerSpec(None, CPU), LayerSpec(16, CPU), LayerSpec(None, CPU)]
    shape, tokens = ModelShape(2, 4, 2, 16), np.array((40, 0))
    both = make_limits(Listed((LayerPlan(8), LayerPlan(9))), 8, layers, shape, tokens)
    assert both.budget[:, 0, 0].tolist() == [8, 16, 9]
    assert both.budget[:, 1, 0].tolist() == [UNLIMITED, 16, UNLIMITED]
    with pytest.raises(ValueError, match=f"a plan of 2 layers from Listed, got {count}"):
        make_limits(Listed((LayerPlan(8),) * count), 8, layers, shape, tokens)


def test_counts_come_down_to_int32():
    """Kernels add and subtract them as int32."""
    more = 10**12
    plans = (
        LayerPlan(more, sinks=more, recent=more, decode="interval", prefill=more, low=more),
        LayerPlan(more, sinks=4, recent=more),
        LayerPlan(None, prefill=more, select=more),
        LayerPlan(np.int64(8), heads=(HeadPlan(more, 4, more), HeadPlan(8))),
    )
    made = make_limits(
        Listed(plans), more, [LayerSpec(None, CPU)] * 4, ModelShape(4, 4, 2, 16), np.array([40])
    )
    for table in (made.budget, made.keep, made.low):
        assert (table[:3] == UNLIMITED).all() and table.dtype == np.int32
    assert made.sinks[:, 0, 0].tolist() == [UNLIMITED - 1, 4, 0, 4]
    assert made.recent[:, 0, 0].tolist() == [1, UNLIMITED - 4, 0, UNLIMITED - 4]
    assert (made.select == UNLIMITED).all()
    with pytest.raises(ValueError, match="select= >= 1"):
        limits_of = Listed((LayerPlan(None, select=0),))
        make_limits(limits_of, 8, [LayerSpec(None, CPU)], ModelShape(1, 4, 2, 16), np.array([40]))
