"""The traced forward: the same tokens, evictions and counts as the ordinary one."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from families import FAMILIES, build
from rig import POLICIES, kept, left_padded, patched, prompt, tiny_llama

import sparsekv
from sparsekv.hf.compat import cache_key, output_cache
from sparsekv.hf.traced import CompiledForward, bound_forward
from sparsekv.steady import hold

_PROMPT, _STEPS = 40, 8
CPU = {"backend": "aot_eager"}  # traces and functionalises as inductor does, needs no compiler


def _follow(model, cache_a, cache_b, step: CompiledForward) -> None:
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
            traced = step.step(model, {"input_ids": token, "position_ids": position}, cache_b)
        torch.testing.assert_close(traced.logits, ordinary.logits, atol=2e-5, rtol=2e-5)
        assert traced[key] is cache_b
    assert kept(cache_a) == kept(cache_b)
    assert cache_a.state.seen == cache_b.state.seen
    for store in cache_b.state.stores:
        store.validate()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [16, _PROMPT + 4])
def test_equals_the_ordinary_step(policy, budget):
    """Budgets in use at once, and in the middle."""
    model = patched(tiny_llama(), policy, budget)
    _follow(model, sparsekv.new_cache(model), sparsekv.new_cache(model), CompiledForward(**CPU))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_traced(family):
    """One graph without breaks: windows, softcaps, sinks, experts."""
    with warnings.catch_warnings():  # some have sliding layers only
        warnings.simplefilter("ignore", UserWarning)
        model = sparsekv.patch(build(family), "h2o", 16)
    torch._dynamo.reset()
    _follow(model, sparsekv.new_cache(model), sparsekv.new_cache(model), CompiledForward(**CPU))


def test_a_copy_of_the_model_runs_its_own_weights():
    """What is compiled belongs to no model."""
    model = patched(tiny_llama(), "h2o", 16)
    step = CompiledForward(**CPU)
    _follow(model, sparsekv.new_cache(model), sparsekv.new_cache(model), step)
    other = copy.deepcopy(model)
    assert step.is_warm(model, 1) and not step.is_warm(other, 1)
    with torch.no_grad():
        other.lm_head.weight.mul_(-0.5)
    _follow(other, sparsekv.new_cache(other), sparsekv.new_cache(other), step)


def test_the_op_without_a_running_step_fails():
    """It has no cache to look into."""
    CompiledForward(**CPU)
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16)
    with pytest.raises(LookupError):
        torch.ops.sparsekv.attend(q, k, k, None, 0, 0.25, None, None, None)


def _compiled_model(policy: str):
    """Patched with compile=True, but for the CPU's backend."""
    model = patched(tiny_llama(), policy, 20)
    model.__dict__["forward"] = bound_forward(model, CompiledForward(**CPU))
    return model


def _run(model, ids, mask):
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    return output.sequences, kept(output_cache(output))


@pytest.mark.parametrize("policy", ["streaming-cache", "h2o", "snapkv"])
def test_prompts_of_any_shape_share_one_graph(policy):
    """Rows and columns are dynamic; padding makes a second graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = patched(tiny_llama(), policy, 20), _compiled_model(policy)
    graphs = []
    for lengths in ([40], [61], [33, 33, 33], [57, 30], [44, 21, 44]):
        batch = left_padded(*(prompt(n, seed=n) for n in lengths))
        ids, mask = batch["input_ids"], batch["attention_mask"]
        expected, got = _run(plain, ids, mask), _run(compiled, ids, mask)
        assert torch.equal(got[0], expected[0])
        assert got[1] == expected[1]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] <= 3, graphs


def test_what_cannot_be_traced_runs_as_it_is_after_one_warning():
    """And keeps doing so."""
    model = _compiled_model("h2o")
    model.lm_head.__class__ = _Untraceable
    ids = prompt(40)
    with pytest.warns(UserWarning, match="prompts without torch.compile") as caught:
        first = model.generate(ids, max_new_tokens=3, do_sample=False)
        again = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert sum("torch.compile" in str(w.message) for w in caught) == 1
    assert torch.equal(first, again)
    assert torch.equal(first, patched(tiny_llama(), "h2o", 20).generate(ids, max_new_tokens=3))


class _Untraceable(torch.nn.Linear):
    """A head that dynamo cannot follow."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_training_is_not_compiled():
    """The op has no gradient; dense attention without a cache has."""
    model = _compiled_model("full")
    ids = prompt(20)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_unpatch_gives_the_forward_back():
    """Patched again without compile too; hooks of others are refused, not lost."""
    model = patched(tiny_llama(), "h2o", 20, compile=True)
    assert "forward" in model.__dict__
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"
    assert "forward" not in patched(model, "h2o", 20).__dict__
    patched(model, "snapkv", 20, compile=True)
    patched(model, "h2o", 20, compile=True)
    assert "forward" not in sparsekv.unpatch(model).__dict__
    model.__dict__["forward"] = model.forward
    with pytest.raises(ValueError, match="hooks on its forward"):
        patched(model, "h2o", 20, compile=True)
    assert "forward" in sparsekv.unpatch(patched(model, "h2o", 20, compile="decode")).__dict__
    with pytest.raises(ValueError, match="True, False or 'decode', got 'all'"):
        patched(model, "h2o", 20, compile="all")
