"""LayerSplit: full layers first, then windows that replace their weakest key."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import columns, golden_decode, golden_prefill, prefill, shape
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import LayerPlan, LayerSplit, Need


def test_prefill_keeps_recent_and_best_of_all_columns():
    # Window sums of the last 2 rows over ALL columns: 6 (.3954) and 2 (.3801) lead, then 5, 3.
    policy = LayerSplit(full_layers=1, window_rows=2)
    full = prefill(policy, golden_prefill(), 4, num_layers=2, layer=0)
    assert full.kept() == [list(range(8))]
    row = prefill(policy, golden_prefill(), 3, num_layers=2, layer=1)
    assert row.plan.recent == 0
    assert row.kept() == [[2, 5, 6]]
    assert prefill(policy, golden_prefill(), 4, num_layers=2, layer=1).kept() == [[2, 5, 6, 7]]


@pytest.mark.parametrize("accum", ["ema", "sum"])
def test_decode_replaces_before_attention_and_then_accumulates(accum):
    policy = LayerSplit(full_layers=0, window_rows=2, recent=2, accum=accum)
    row = prefill(policy, golden_prefill(), budget=4)
    before = row.state.clone()  # positions 2 5 6 7
    row.decode(8, golden_decode)
    assert row.positions.tolist() == [[[2, 6, 7, 8]]]  # 5 had the least: .3190
    held = golden_decode(row.positions).mean(0).float()  # 5 is not attended any more
    old = torch.cat([before[..., [0, 2, 3]], torch.zeros(1, 1, 1)], -1)
    torch.testing.assert_close(row.state, (0.5 * old if accum == "ema" else old) + held)


def test_prefill_replaces_the_state():
    stale = torch.full((1, 1, 8), 99.0)
    policy = LayerSplit(window_rows=2)
    fresh = columns(golden_prefill(), policy.needs(3, "prefill"), num_kv_heads=1)
    assert policy.observe(3, "prefill", stale, fresh, torch.arange(8)[None, None]) is fresh


@given(st.integers(1, 300), st.integers(1, 50))
def test_moving_average_keeps_the_mass_of_a_window_sum(window_rows, steps):
    policy, rows = LayerSplit(window_rows=window_rows), torch.full((1, 1, 4), 0.25)
    state = window_rows * rows
    for _ in range(steps):
        state = policy.observe(9, "decode", state, rows, torch.arange(4)[None, None])
    assert state.sum().item() == pytest.approx(window_rows, rel=1e-4)


def test_pooling_stops_at_the_recent_tokens():
    policy = LayerSplit(full_layers=0, window_rows=2, recent=2, pool="max", kernel=3)
    assert prefill(policy, golden_prefill(), budget=4).kept() == [[2, 3, 6, 7]]  # as SnapKV max 3


@pytest.mark.parametrize(
    ("policy", "slots", "recent"),
    [
        (LayerSplit(), 2048, 256),
        (LayerSplit(), 512, 128),
        (LayerSplit(), 3, 0),
        (LayerSplit.alpha32(), 2048, 32),
        (LayerSplit.alpha8(), 2048, 8),
        (LayerSplit(recent=10), 2048, 10),
        (LayerSplit(recent=10), 4, 4),
    ],
)
def test_recent(policy, slots, recent):
    window = LayerPlan(slots, recent=recent, decode="replace")
    plan = policy.plan(shape(5), 4000, slots)
    assert plan == (LayerPlan(None),) * 3 + (window,) * 2
    assert policy.needs(2, "prefill") is None
    assert policy.needs(3, "decode") == Need("sum", rows=policy.window_rows)


@given(
    layers=st.integers(1, 80),
    full=st.integers(0, 6),
    tokens=st.integers(1, 5000),
    budget=st.integers(1, 5000),
)
def test_average_budget_is_never_exceeded(layers, full, tokens, budget):
    policy = LayerSplit(full_layers=full, budget_is="average")
    if layers > full and layers * budget - full * tokens < layers - full:
        with pytest.raises(ValueError, match=rf"expected .* got {budget} x {layers}"):
            policy.plan(shape(layers), tokens, budget)
        return
    plan = policy.plan(shape(layers), tokens, budget)
    assert [p.budget for p in plan[:full]] == [None] * min(full, layers)
    if layers > full:
        held = full * tokens + sum(p.budget for p in plan[full:])
        assert layers * budget - (layers - full) < held <= layers * budget
        assert tokens > budget or plan[-1].budget >= tokens  # within budget, nothing goes


def test_average_budget_needs_one_slot_a_window():
    policy, model = LayerSplit(full_layers=1, budget_is="average"), shape(4)
    assert policy.plan(model, 5, 2)[3].budget == 1
    with pytest.raises(ValueError, match=r"1 full layers of 6 tokens .* got 2 x 4 = 8 slots"):
        policy.plan(model, 6, 2)  # 2 slots are left for 3 windows


def test_a_full_cache_when_all_layers_are_full():
    for budget_is in ("window", "average"):
        policy = LayerSplit(full_layers=3, budget_is=budget_is)
        for layers in (1, 3):
            assert policy.plan(shape(layers), 4000, 1) == (LayerPlan(None),) * layers


def test_defaults():
    expected = (3, 256, None, "ema", "none", 7, "mean", "window")
    assert dataclasses.astuple(LayerSplit()) == expected
