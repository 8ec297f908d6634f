"""TOVA: the last row decides, for all heads of a layer."""

from __future__ import annotations

import torch
from harness import columns, golden_decode, golden_prefill, prefill, shape

from sparsekv.policies import TOVA, LayerPlan, Need


def test_golden_last_row():
    row = columns(golden_prefill(), TOVA().needs(0, "prefill"), num_kv_heads=2)[0]
    mean = [0.0136, 0.0959, 0.3175, 0.0158, 0.1402, 0.2085, 0.0194, 0.1891]
    torch.testing.assert_close(row, torch.tensor([mean, mean]), rtol=0, atol=6e-5)


def test_golden_prefill_and_decode():
    row = prefill(TOVA(), golden_prefill(), budget=4)
    assert row.kept() == [[2, 4, 5, 7]]  # the newest but one is gone
    row.decode(8, golden_decode)
    assert row.kept() == [[2, 5, 7, 8]]
    last = torch.tensor([[[0.2620, 0.5284, 0.1285, 0.0578]]])
    torch.testing.assert_close(row.state, last, rtol=0, atol=6e-5)


def test_even_the_newest_token_may_go():
    row = prefill(TOVA(), golden_prefill(), budget=4)
    row.decode(8, lambda held: torch.tensor([[0.3, 0.3, 0.2, 0.15, 0.05]]).expand(2, -1))
    assert row.kept() == [[2, 4, 5, 7]]


def test_plan_protects_nothing():
    assert set(TOVA().plan(shape(3), 100, 8)) == {LayerPlan(8, decode="evict")}
    assert TOVA().needs(0, "decode") == Need("sum", rows=1, group="layer_mean")
    assert TOVA().decay(0) == 0.0
    assert TOVA.tensor_parallel == "refused"
