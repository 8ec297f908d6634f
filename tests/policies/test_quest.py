"""Quest plans pages, not evictions."""

from __future__ import annotations

import sys

import pytest
from harness import shape

from sparsekv.policies import LayerPlan, Quest


@pytest.mark.parametrize("dense", [0, 2, 9])
def test_every_layer_keeps_all_and_the_deeper_ones_select(dense):
    plan = Quest(dense_layers=dense).plan(shape(5), 1000, 64)
    first = min(dense, 5)
    assert plan == (LayerPlan(None),) * first + (LayerPlan(None, select=64),) * (5 - first)


def test_it_says_that_no_memory_is_freed():
    assert "frees no memory" in Quest.note
    assert "FREES NO MEMORY" in str(sys.modules[Quest.__module__].__doc__)
