"""Planned: exact budgets from shares, whatever is asked for."""

from __future__ import annotations

import json
import math

import pytest
from harness import shape
from hypothesis import given
from hypothesis import strategies as st
from reference.planned import slots

from sparsekv.policies import (
    H2O,
    AdaKV,
    Chunked,
    CriticalKV,
    Expected,
    HeadPlan,
    Knorm,
    Planned,
    Pyramid,
    SnapKV,
)
from sparsekv.policies.budgets import planned_exact

SHARES = ((8, 2), (1, 1), (0, 4))
MODEL = shape(3, 4, 2)
TABLES = st.integers(1, 4).flatmap(
    lambda heads: st.lists(
        st.tuples(*[st.integers(0, 30) | st.just(10**9)] * heads), min_size=1, max_size=6
    ).filter(lambda rows: any(map(any, rows)))
)


@given(shares=TABLES, tokens=st.integers(1, 400), budget=st.integers(1, 400), data=st.data())
def test_counts(shares, tokens, budget, data):
    """Exact in sum, within the prompt, ordered as the shares, and those of a slow pouring."""
    reserved = data.draw(st.integers(1, budget))
    counts = planned_exact(shares, tokens, budget, reserved)
    flat = [n for row in counts for n in row]
    assert sum(flat) == budget * len(flat)
    assert counts == slots(shares, budget, reserved, tokens)
    if tokens <= budget:
        assert set(flat) == {budget}
        return
    assert all(reserved <= n <= tokens for n in flat)
    cells = [share for row in shares for share in row]
    for a, n in zip(cells, flat, strict=True):
        assert all(n >= m for b, m in zip(cells, flat, strict=True) if a > b)


def test_worked_example():
    """6 cells of 20 slots, 8 of each reserved: 72 free for 16 shares, 4.5 each."""
    plans = Planned(SnapKV(window=8), SHARES).plan(MODEL, 1000, 20)
    counts = [[head.budget for head in plan.heads or ()] for plan in plans]
    assert counts == [[44, 17], [13, 12], [8, 26]]  # of two halves the first is rounded up
    assert plans[0].heads == (HeadPlan(44, 0, 8), HeadPlan(17, 0, 8))
    by_layer = Planned(SnapKV(window=8), ((10, 10), (1, 1), (5, 5))).plan(MODEL, 1000, 20)
    assert [(plan.budget, plan.heads, plan.recent) for plan in by_layer] == [
        (31, None, 8), (10, None, 8), (19, None, 8),
    ]  # fmt: skip


def test_a_plan_repeats_what_was_measured():
    """At its own budget and length the free slots are the shares themselves."""
    free = ((112, 40), (16, 0), (48, 72))
    counts = planned_exact(free, 640, 80, 32)
    assert counts == [[32 + share for share in row] for row in free]


def test_shares_serve_every_budget_in_proportion():
    for budget in (33, 64, 100, 1000):
        counts = planned_exact(SHARES, 10**6, budget, 32)
        free = 6 * (budget - 32)
        for row, shares in zip(counts, SHARES, strict=True):
            for count, share in zip(row, shares, strict=True):
                assert math.floor(free * share / 16) <= count - 32 <= math.ceil(free * share / 16)


@pytest.mark.parametrize("scorer", [SnapKV(), Pyramid(window=8), Expected(), Knorm()])
@pytest.mark.filterwarnings("ignore:p")
def test_equal_shares_are_the_scorer_but_for_its_budgets(scorer):
    plans = Planned(scorer, ((1, 1),) * 3).plan(MODEL, 700, 64)
    uniform = scorer.plan(MODEL, 700, 64)
    assert {plan.budget for plan in plans} == {64} and not any(plan.heads for plan in plans)
    assert [plan.sinks for plan in plans] == [plan.sinks for plan in uniform]
    assert [plan.recent for plan in plans] == [plan.recent for plan in uniform]


def test_a_budget_that_is_all_window_is_uniform_and_says_so():
    policy = Planned(SnapKV(window=32), SHARES)
    with pytest.warns(UserWarning, match="planned gives all heads 20 slots.*the 20 that snapkv"):
        plans = policy.plan(MODEL, 100, 20)
    assert {(plan.budget, plan.recent, plan.heads) for plan in plans} == {(20, 20, None)}


@pytest.mark.filterwarnings("error")
def test_a_prompt_within_its_budget_has_no_shares():
    for tokens in (1, 20):
        plans = Planned(shares=SHARES).plan(MODEL, tokens, 20)
        assert {(plan.budget, plan.heads) for plan in plans} == {(20, None)}


def test_without_shares_it_says_where_they_come_from():
    for act in (lambda p: p.ready(), lambda p: p.plan(MODEL, 10, 4), lambda p: p.fits(MODEL)):
        with pytest.raises(ValueError, match=r"expected Planned\(shares=.*sparsekv plan"):
            act(Planned())


def test_another_model_is_refused():
    policy = Planned(shares=SHARES, head_dim=4)
    policy.fits(MODEL)
    for other in (shape(4, 4, 2), shape(3, 4, 4)):
        with pytest.raises(ValueError, match="expected the model that the plan was made for, with"):
            policy.plan(other, 10, 4)
    with pytest.raises(ValueError, match="3 layers of 2 KV heads of 8, got 3 of 2 of 4"):
        Planned(shares=SHARES, head_dim=8).fits(MODEL)


@pytest.mark.parametrize(
    "arguments",
    [
        {"shares": ()},
        {"shares": ((),)},
        {"shares": ((1,), (1, 2))},
        {"shares": ((0, 0),)},
        {"shares": ((-1, 2),)},
        {"shares": ((0.5, 2),)},
        {"head_dim": 0},
        {"scorer": H2O()},
        {"scorer": AdaKV()},
    ],
)
def test_bad_settings(arguments):
    with pytest.raises(ValueError, match="expected"):
        Planned(**arguments)


def test_wrappers_take_plans_by_layer():
    """AdaKV shares within a layer, so the layers may differ and the heads may not."""
    by_layer = Planned(shares=((3, 3), (1, 1)), head_dim=4)
    for wrapper in (AdaKV, CriticalKV, Chunked):
        policy = wrapper(by_layer)
        assert [plan.budget for plan in policy.plan(shape(2, 4, 2), 900, 64)] == [80, 48]
        with pytest.raises(ValueError, match="equal budgets, got others"):
            wrapper(Planned(shares=SHARES))
        with pytest.raises(ValueError, match=r"expected Planned\(shares"):
            wrapper(Planned())
    both = CriticalKV(AdaKV(by_layer))
    assert both.shape == by_layer.shape
    with pytest.raises(ValueError, match="expected the model that the plan was made for"):
        both.fits(MODEL)


def test_load(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"shares": SHARES, "model": {"head_dim": 4}, "more": 1}))
    policy = Planned.load(file)
    assert policy == Planned(shares=SHARES, head_dim=4) and hash(policy) == hash(Planned.load(file))
    assert Planned.load(file, scorer=Knorm()) == Planned(Knorm(), SHARES, 4)
    file.write_text(json.dumps({"shares": SHARES, "model": {"head_dim": 4}, "window": 8}))
    assert Planned.load(file) == Planned(SnapKV(window=8), SHARES, 4)  # as it was measured
    with pytest.raises(ValueError, match="expected a plan that `sparsekv plan` wrote in"):
        Planned.load(tmp_path / "none.json")
    for text in ("[1, 2]", "{}", "no", '{"shares": 3, "model": {"head_dim": 4}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="expected a plan that `sparsekv plan` wrote in"):
            Planned.load(file)
