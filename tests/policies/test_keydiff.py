"""KeyDiff: away from the average direction, block by block."""

from __future__ import annotations

import pytest
import torch
from harness import golden_features, golden_prefill, prefill, shape

from sparsekv.policies import KeyDiff, LayerPlan
from sparsekv.policies.features import KeyAnchor


def test_golden():
    row = prefill(KeyDiff(), golden_prefill(), budget=4, features=golden_features)
    assert row.kept() == [[3, 4, 5, 7]]
    expected = [-0.9264, -0.8716, -0.5839, 0.4348, 0.8900, -0.1269, -0.3721, 0.1269]
    anchor = golden_features(KeyAnchor())[0, 0]
    torch.testing.assert_close(-anchor, torch.tensor(expected), rtol=0, atol=6e-5)


def test_plan():
    plan = KeyDiff(block=16).plan(shape(2), 999, 64)
    assert set(plan) == {LayerPlan(79, decode="interval", prefill=64, low=64)}
    assert KeyDiff(block=16).prefill_block == 16 and KeyDiff().prefill_block == 128
    with pytest.raises(ValueError, match="expected block"):
        KeyDiff(block=0)
