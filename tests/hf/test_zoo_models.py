"""Families whose queries, keys or outputs are made differently: norms, biases, scaled softmax.

The reference sees post-rotation queries and keys and the output projection of the module, so it
needs nothing of the family; policies that look at more than columns have to find the same.
"""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, build
from rig import Loop, prompt
from zoo import check, example, truth

import sparsekv

LOOKS_AT_MORE = ("expected", "criticalkv", "keydiff", "rkv", "knorm", "keyformer", "quest")
SAME_FORM = ("qwen2", "qwen3", "mixtral", "gemma")


@pytest.mark.parametrize("family", SAME_FORM)
@pytest.mark.parametrize("name", LOOKS_AT_MORE)
def test_families(name, family):
    assert family in FAMILIES
    if (name, family) == ("knorm", "qwen3"):
        pytest.skip("keys are normalised: all have one norm, and rounding would decide")
    model = build(family)
    config = model.config
    policy = example(name, config.num_hidden_layers, config.num_key_value_heads)
    length, budget = (90, 48) if name == "quest" else (37, 12)
    reference, loop = truth(model, policy, budget), Loop(sparsekv.patch(model, policy, budget))
    token = check(reference, loop, prompt(length, 3))
    for _ in range(6):
        token = check(reference, loop, token)
    check(reference, loop, prompt(5, 4))
    assert torch.isfinite(reference.feed(token)).all()
