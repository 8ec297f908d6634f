"""PyramidInfer really drops hidden states: what each layer computes on, what a budget buys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference.pyramidinfer import layer_tokens
from rig import Loop, greedy, kept, prompt, tiny_llama
from zoo import example

import sparsekv


def computed(model, ids):
    """Tokens that the MLP of each layer is run on, for a prompt."""
    counts, hooks = [], []
    for block in model.model.layers:
        note = block.mlp.register_forward_pre_hook(
            lambda module, args: counts.append(args[0].shape[1])
        )
        hooks.append(note)
    loop = Loop(model)
    loop.feed(ids)
    for hook in hooks:
        hook.remove()
    return counts, [len(layer[0]) for layer in loop.kept()]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("decay", [0.3, 0.5, 0.9])
def test_layers_compute_on_what_is_left(decay, interval):
    """Attention and MLP of layer l run on the tokens that entered it, and it caches just these."""
    policy = replace(example("pyramidinfer"), decay=decay, interval=interval)
    model = sparsekv.patch(tiny_llama(num_hidden_layers=5), policy, 12)
    wanted = layer_tokens(5, 60, int(0.2 * 60), decay, policy.min_context, interval)[:5]
    assert computed(model, prompt(60)) == (wanted, wanted)


@pytest.mark.parametrize("budget", [50, 55, 58, 0.9])
def test_a_budget_is_the_mean_over_layers(budget):
    """Without a decay it is solved for: never above the budget, and not far below."""
    policy = replace(example("pyramidinfer"), decay=None)
    model = sparsekv.patch(tiny_llama(num_hidden_layers=5), policy, budget)
    held = [len(layer[0]) for layer in kept(greedy(model, prompt(60), 1).cache)]
    slots = 54 if budget == 0.9 else budget
    assert held[0] == 60 and held == sorted(held, reverse=True)
    assert 0.9 * slots <= sum(held) / 5 <= slots


@pytest.mark.parametrize("budget", [14, 40])
def test_a_budget_that_no_decay_meets_is_refused(budget):
    """13 of 60 tokens are the tail, and even decay 0 leaves 47.4 a layer: nothing silent."""
    assert sum(layer_tokens(5, 60, 12, 0.0, 2)[:5]) == 237
    policy = replace(example("pyramidinfer"), decay=None)
    model = sparsekv.patch(tiny_llama(num_hidden_layers=5), policy, budget)
    with pytest.raises(ValueError, match=r"expected .*, got "):
        greedy(model, prompt(60), 1)


def test_what_is_dropped_is_gone_for_all_later_layers():
    policy = replace(example("pyramidinfer"), decay=0.4)
    model = sparsekv.patch(tiny_llama(num_hidden_layers=5), policy, 12)
    held = kept(greedy(model, prompt(60), 1).cache)
    for above, below in zip(held[1:], held, strict=False):
        assert set(above[0]) <= set(below[0])
        assert above[0][:2] == [0, 1] and above[0][-13:] == [*range(47, 60)]
        assert above[0] == above[1]
    assert torch.tensor([len(layer[0]) for layer in held]).diff().le(0).all()
