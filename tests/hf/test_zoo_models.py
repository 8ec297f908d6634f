"""Families whose queries, keys or outputs are made differently: norms, biases, scaled softmax.

The reference sees post-rotation queries and keys and the output projection of the module, so it
needs nothing of the family; policies that look at more than columns have to find the same.
"""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, build
from rig import Loop, every_token
from zoo import check, example, truth

import sparsekv

LOOKS_AT_MORE = ("expected", "criticalkv", "keydiff", "rkv", "knorm", "keyformer", "quest")
SAME_FORM = ("qwen2", "qwen3", "mixtral", "gemma")


@pytest.mark.parametrize("family", SAME_FORM)
@pytest.mark.parametrize("name", LOOKS_AT_MORE)
def test_families(name, family):
    assert family in FAMILIES
    model = build(family)
    config = model.config
    policy = example(name, config.num_hidden_layers, config.num_key_value_heads)
    length, budget = (90, 48) if name == "quest" else (37, 12)
    for parameter, weight in model.named_parameters():
        if "k_norm" in parameter:  # all ones would give every key the same norm
            weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    reference, loop = truth(model, policy, budget), Loop(sparsekv.patch(model, policy, budget))
    ids = every_token(3)
    for tokens in (length, *[1] * 6, 5):
        now, ids = ids[:, :tokens], ids[:, tokens:]
        token = check(reference, loop, now)
    assert torch.isfinite(reference.feed(token)).all()
