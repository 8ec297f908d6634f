"""Full: the budget is ignored."""

from __future__ import annotations

from harness import golden_decode, golden_prefill, prefill, shape

from sparsekv.policies import Full, LayerPlan


def test_everything_is_kept_for_ever():
    assert Full().plan(shape(3), 1000, 1) == (LayerPlan(budget=None),) * 3
    row = prefill(Full(), golden_prefill(), budget=1)
    row.decode(8, golden_decode)
    assert row.kept() == [list(range(9))]
