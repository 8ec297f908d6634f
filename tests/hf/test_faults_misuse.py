"""A model and a cache that do not belong together, and models that live on after `patch`."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from rig import greedy, patched, prompt, tiny_llama
from transformers import LlamaForCausalLM

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.hf.watch import watch

LOADED = """
import pickle, sys, torch, sparsekv
model = pickle.load(open(sys.argv[1], "rb"))
ids = torch.arange(3, 33)[None]
print(model(ids, **{sys.argv[2]: sparsekv.new_cache(model)}).logits.sum().item())
"""


def generated(model, cache=None, tokens=30):
    given = {} if cache is None else {cache_key(model): cache}
    return greedy(model, prompt(tokens), 4, **given)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_function_is_refused(model, attention):
    """It would attend new tokens alone, and nothing would be cached."""
    want = generated(patched(model, "snapkv", 12)).sequences
    model.set_attn_implementation(attention)
    with pytest.raises(ValueError, match=f"sparsekv.patch has set, got '{attention}'"):
        generated(model)
    with pytest.raises(ValueError, match="got another function"), torch.no_grad():
        model(prompt(30), **{cache_key(model): sparsekv.new_cache(model)})
    assert torch.equal(generated(patched(model, "snapkv", 12)).sequences, want)


def test_a_cache_without_its_patch_is_refused(model):
    cache = sparsekv.new_cache(patched(model, "full", 1))
    sparsekv.unpatch(model)
    with pytest.raises(ValueError, match="a SparseCache works with a patched model"):
        generated(model, cache)
    cache.reset()
    assert generated(patched(model, "full", 1), cache).sequences.shape == (1, 34)


def test_a_cache_of_a_smaller_model_is_refused(model):
    small = tiny_llama(num_hidden_layers=2)
    cache = sparsekv.new_cache(patched(small, "full", 1))
    with pytest.raises(ValueError, match="got one of 2 layers for layer 2"):
        generated(patched(model, "full", 1), cache)


def test_models_of_one_config_cannot_both_be_patched():
    """`unpatch` of one would take the attention function from the other."""
    config = tiny_llama().config
    one, other = (LlamaForCausalLM(config).eval() for _ in range(2))
    before = config._attn_implementation
    patched(one, "snapkv", 8)
    with pytest.raises(ValueError, match="a config of its own"):
        patched(other, "full", 1)
    sparsekv.unpatch(one)
    assert config._attn_implementation == before
    sparsekv.unpatch(patched(other, "full", 1))
    assert config._attn_implementation == before


@pytest.mark.parametrize("policy", ["full", "snapkv", "h2o"])
def test_a_pickled_model_is_patched(model, policy):
    patched(model, policy, 12)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(generated(loaded).sequences, generated(model).sequences)
    assert generated(loaded).cache.report().kept == generated(model).cache.report().kept
    sparsekv.unpatch(loaded)
    sparsekv.unpatch(model)
    assert torch.equal(generated(loaded).sequences, generated(model).sequences)


def test_a_pickled_model_is_patched_in_another_process(model, tmp_path):
    patched(model, "snapkv", 12)
    with (tmp_path / "model").open("wb") as file:
        pickle.dump(model, file)
    line = [sys.executable, "-c", LOADED, str(tmp_path / "model"), cache_key(model)]
    out = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        want = model(ids, **{cache_key(model): sparsekv.new_cache(model)}).logits.sum().item()
    assert float(out) == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize("policy", ["full", "snapkv", "h2o"])
def test_no_gradients_pass_a_cache(model, policy):
    """The forward runs as without autograd, its cache can be copied; a backward pass is refused."""
    caches = [sparsekv.new_cache(patched(model, policy, 12)) for _ in range(2)]
    name = cache_key(model)
    out = model(prompt(30), labels=prompt(30), **{name: caches[0]})
    with torch.no_grad():
        want = model(prompt(30), labels=prompt(30), **{name: caches[1]})
    assert torch.equal(out.logits, want.logits)
    assert copy.deepcopy(caches[0]).report().kept == caches[1].report().kept
    with pytest.raises(ValueError, match="no backward pass through a SparseCache"):
        out.loss.backward()


def test_modes_of_modules_stay(model):
    """A frozen module of a model in training stays in eval mode."""
    model.train()
    model.model.layers[0].eval()
    patched(model, "snapkv", 12)
    watch(model, prompt(12), lambda _: None)
    assert not any(module.training for module in model.model.layers[0].modules())
    assert model.training and model.model.layers[1].training
