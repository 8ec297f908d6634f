"""Knorm: small keys stay."""

from __future__ import annotations

import torch
from harness import GOLDEN_KEYS, golden_features, golden_prefill, prefill, shape

from sparsekv.policies import Knorm, LayerPlan
from sparsekv.policies.features import KeyNorm


def test_golden():
    norms = golden_features(KeyNorm())[0, 0]
    torch.testing.assert_close(norms, GOLDEN_KEYS[:8].norm(dim=-1).float())
    # 5, 16, 6, 6, 9, 9, 6, 9 squared: three keys tie at 6, and all of them fit.
    row = prefill(Knorm(), golden_prefill(), budget=4, features=golden_features)
    assert row.kept() == [[0, 2, 3, 6]]
    # Two of the three: the newest.
    row = prefill(Knorm(), golden_prefill(), budget=3, features=golden_features)
    assert row.kept() == [[0, 3, 6]]


def test_plan_protects_nothing_and_grows():
    assert Knorm().plan(shape(2), 99, 10) == (LayerPlan(10),) * 2
    assert Knorm().needs(0, "prefill") is None
