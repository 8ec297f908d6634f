"""The traced decode step: the same tokens, evictions and counts as the ordinary one."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from families import FAMILIES, build
from rig import POLICIES, kept, patched, prompt, tiny_llama

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.hf.step import CompiledStep
from sparsekv.steady import hold

_PROMPT, _STEPS = 40, 8
CPU = {"backend": "aot_eager"}  # traces and functionalises as inductor does, needs no compiler


def _follow(model, cache_a, cache_b, step: CompiledStep) -> None:
    """_STEPS tokens, once through the model and once through the traced step."""
    ids = prompt(_STEPS, seed=9)
    key = cache_key(model)
    for cache in (cache_a, cache_b):
        with torch.no_grad():
            model(prompt(_PROMPT), **{key: cache}, use_cache=True)
        hold(cache.state, _STEPS)
    for i in range(_STEPS):
        token, position = ids[:, i : i + 1], torch.tensor([[_PROMPT + i]])
        with torch.no_grad():
            ordinary = model(token, position_ids=position, **{key: cache_a}, use_cache=True)
            traced = step(model, {"input_ids": token, "position_ids": position}, cache_b)
        torch.testing.assert_close(traced.logits, ordinary.logits, atol=2e-5, rtol=2e-5)
        assert traced[key] is cache_b
    assert kept(cache_a) == kept(cache_b)
    assert cache_a.state.seen == cache_b.state.seen
    for store in cache_b.state.stores:
        store.validate()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [16, _PROMPT + 4, 200])
def test_equals_the_ordinary_step(policy, budget):
    """Budgets in use at once, in the middle, and never."""
    model = patched(tiny_llama(), policy, budget)
    _follow(model, sparsekv.new_cache(model), sparsekv.new_cache(model), CompiledStep(**CPU))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_traced(family):
    """One graph without breaks: windows, softcaps, sinks, experts."""
    with warnings.catch_warnings():  # some have sliding layers only
        warnings.simplefilter("ignore", UserWarning)
        model = sparsekv.patch(build(family), "h2o", 16)
    torch._dynamo.reset()
    _follow(model, sparsekv.new_cache(model), sparsekv.new_cache(model), CompiledStep(**CPU))


def test_a_copy_of_the_model_runs_its_own_weights():
    """What is compiled belongs to no model."""
    model = patched(tiny_llama(), "h2o", 16)
    step = CompiledStep(**CPU)
    _follow(model, sparsekv.new_cache(model), sparsekv.new_cache(model), step)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(-0.5)
    _follow(other, sparsekv.new_cache(other), sparsekv.new_cache(other), step)


def test_the_op_without_a_running_step_fails():
    """It has no cache to look into."""
    CompiledStep(**CPU)
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16)
    with pytest.raises(LookupError):
        torch.ops.sparsekv.decode_step(q, k, k, 0, 0.25, None, None, None)
