"""PyramidKV: SnapKV's scores under budgets that fall with depth."""

from __future__ import annotations

import warnings

import pytest
from harness import golden_prefill, prefill, shape
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import Pyramid, SnapKV


def budgets(policy, num_layers, tokens, budget):
    return [plan.budget for plan in policy.plan(shape(num_layers), tokens, budget)]


def test_golden_budgets_include_the_window():
    assert budgets(Pyramid(window=2), 4, 20, 6) == [10, 7, 5, 2]
    assert budgets(Pyramid(window=2, rounding="official"), 4, 20, 6) == [10, 8, 6, 4]


def test_golden_kept_sets_per_layer():
    policy = Pyramid(window=2, pool="none")  # votes in order: 2 5 3 1 4 0
    kept = [
        prefill(policy, golden_prefill(), 5, num_layers=3, layer=layer).kept()[0]
        for layer in range(3)
    ]
    assert budgets(policy, 3, 8, 5) == [8, 5, 2]
    assert kept == [list(range(8)), [2, 3, 5, 6, 7], [6, 7]]


def test_scores_are_those_of_snapkv():
    for budget in (3, 5, 7):
        arguments = (golden_prefill(), budget)
        assert (
            prefill(Pyramid(window=2), *arguments).kept()
            == prefill(SnapKV(window=2), *arguments).kept()
        )


@pytest.mark.parametrize(
    ("policy", "num_layers", "tokens", "budget"),
    [
        (Pyramid(), 32, 1000, 8),  # nothing left above the window
        (Pyramid(), 4, 1000, 3),
        (Pyramid(rounding="official"), 32, 300, 240),  # C <= T < 2 (C - w)
    ],
)
def test_equal_layers_come_with_a_warning(policy, num_layers, tokens, budget):
    with pytest.warns(UserWarning, match=f"got budget {budget} for {tokens} tokens"):
        assert budgets(policy, num_layers, tokens, budget) == [budget] * num_layers


@pytest.mark.parametrize(
    ("num_layers", "tokens", "budget"),
    [
        (32, 1000, 100),  # kvpress: uniform without a word
        (32, 300, 240),  # the same
        (1, 1000, 100),  # one layer: no pyramid is to be expected
        (32, 100, 100),  # everything is kept
    ],
)
def test_no_warning_otherwise(num_layers, tokens, budget):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = budgets(Pyramid(), num_layers, tokens, budget)
    assert (planned[0] > planned[-1]) == (num_layers > 1 and tokens > budget)


@given(st.integers(1, 64), st.integers(1, 4000), st.integers(9, 2000))
def test_plan_spends_the_budget_exactly(num_layers, tokens, budget):
    plan = Pyramid().plan(shape(num_layers), tokens, budget)
    kept = [min(layer.budget, tokens) for layer in plan]
    assert sum(kept) == num_layers * min(budget, tokens)
    assert all(layer.recent == 8 and layer.decode == "grow" for layer in plan)


def test_defaults_and_presets():
    assert (Pyramid().window, Pyramid().kernel, Pyramid().pool, Pyramid().beta) == (8, 7, "max", 20)
    assert isinstance(Pyramid.original(), Pyramid)
    assert Pyramid.longbench() == Pyramid()
