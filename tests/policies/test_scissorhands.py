"""Scissorhands: counts of rows below their mean, dropped in blocks."""

from __future__ import annotations

import pytest
from harness import columns, golden_prefill, prefill, shape
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import LayerPlan, Need, Scissorhands


def test_golden_counts():
    low = columns(golden_prefill(), Need("count", rows=3), num_kv_heads=2)[0, :, :6]
    assert low.tolist() == [[3, 1, 2, 3, 2, 3], [3, 3, 2, 2, 2, 1]]


def test_golden_kept_sets():
    """Four go, in two blocks of two; of equal counts the oldest."""
    policy = Scissorhands(window=3, recent=2, drop=0.5)
    row = prefill(policy, golden_prefill(), budget=4, num_kv_heads=2)
    assert row.kept() == [[1, 4, 6, 7], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("tokens", "budget", "drop", "prefill", "low"),
    [
        (8, 16, 0.5, None, 9),  # within budget
        (17, 16, 0.5, 9, 9),
        (24, 16, 0.5, 16, 9),
        (25, 16, 0.5, 9, 9),
        (1000, 100, 0.29, 72, 72),  # 29, not 28: no float truncation
        (9, 1, 0.5, 1, 1),
        (9, 8, 1.0, 1, 1),
        (9, 8, 0.0, 8, 8),  # one at a time
    ],
)
def test_blocks(tokens, budget, drop, prefill, low):
    (plan,) = Scissorhands(drop=drop, recent=1).plan(shape(), tokens, budget)
    assert plan == LayerPlan(budget, 0, 1, "interval", prefill, low)


@given(tokens=st.integers(1, 5000), budget=st.integers(1, 500), drop=st.floats(0.0, 1.0))
def test_what_is_left_lies_between_low_and_budget(tokens, budget, drop):
    (plan,) = Scissorhands(drop=drop).plan(shape(), tokens, budget)
    assert 1 <= plan.low <= budget and plan.recent <= plan.low
    left = tokens if plan.prefill is None else plan.prefill
    assert min(tokens, plan.low) <= left <= budget
    assert (tokens - left) % (budget + 1 - plan.low) == 0


def test_score_is_the_count_reversed():
    row = prefill(Scissorhands(window=3, recent=2), golden_prefill(), budget=8)
    assert row.kept() == [list(range(8))]
    assert Scissorhands().needs(0, "decode") == Need("count", rows=400, group="sum")
    with pytest.raises(ValueError, match="expected drop between"):
        Scissorhands(drop=1.5)
