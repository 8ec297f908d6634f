"""Faults of the field, section 2: short prompts, windows, budgets."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import Reference
from rig import (
    EVICTING,
    POLICIES,
    Loop,
    greedy,
    kept,
    left_padded,
    patched,
    prompt,
    slot_scores,
    tiny_llama,
)
from zoo import SUPPORT, example

import sparsekv
from sparsekv.policies import H2O, LayerSplit, Pyramid, SnapKV, Streaming, resolve_budget
from sparsekv.policies import POLICIES as LIBRARY


def assert_dense(model, ids, new=8, **kwargs):
    """A patched model gives the tokens and logits of the unpatched one; returns its cache."""
    got = greedy(model, ids, new, **kwargs)
    expected = greedy(tiny_llama(), ids, new, **kwargs)
    assert got.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)
    return got.cache


def lengths(cache, row=0):
    """Kept tokens by layer and head."""
    return [[len(head) for head in layer] for layer in kept(cache, row)]


@pytest.mark.parametrize("length", [20, 63, 64])
@pytest.mark.parametrize("policy", [SnapKV(window=64), Pyramid(window=64), LayerSplit()])
def test_b10_prompt_within_the_observation_window(policy, length, model):
    cache = assert_dense(sparsekv.patch(model, policy, 80), prompt(length))
    assert lengths(cache) == [[length + 7] * 2] * 3


def test_b10_budget_below_the_window_keeps_the_newest(model):
    sparsekv.patch(model, SnapKV(window=64), 10)
    assert kept(greedy(model, prompt(20), 1).cache) == [[list(range(10, 20))] * 2] * 3


@pytest.mark.parametrize("length", [1, 3, 4])
def test_b11_prompt_within_the_sinks(length, model):
    assert_dense(sparsekv.patch(model, Streaming(), 16), prompt(length))


@pytest.mark.parametrize("policy", POLICIES)
def test_b12_one_token_prompt(policy, model):
    """The first decode step is not taken for a prompt, nor the prompt for a decode step."""
    patched(model, policy, 16)
    cache = assert_dense(model, prompt(1))
    assert lengths(cache) == [[8] * 2] * 3
    loop = Loop(model)
    loop.feed(prompt(1))
    loop.feed(prompt(1, 1))
    assert loop.kept() == [[[0, 1]] * 2] * 3


@pytest.mark.parametrize("kwargs", [{}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 2}])
def test_b13_empty_prompt(kwargs, model):
    patched(model, "snapkv", 16)
    with pytest.raises(ValueError, match="at least 1 token"):
        greedy(model, prompt(0), **kwargs)


def test_b13_empty_row(model):
    patched(model, "snapkv", 16)
    batch = left_padded(prompt(9), prompt(0))
    with pytest.raises(ValueError, match="at least 1 token in every row"):
        greedy(model, batch["input_ids"], attention_mask=batch["attention_mask"])


@pytest.mark.parametrize("budget", [30, 31, 1000])
@pytest.mark.parametrize("policy", POLICIES)
def test_b14_budget_covers_the_prompt(policy, budget, model):
    """Dense, bit for bit what the full policy gives, and nothing is cut."""
    cache = assert_dense(patched(model, policy, budget), prompt(30), 1)
    assert lengths(cache) == [[30] * 2] * 3
    full = greedy(patched(model, "full", 1), prompt(30), 1)
    again = greedy(patched(model, policy, budget), prompt(30), 1)
    assert torch.equal(again.logits, full.logits)
    order = torch.arange(30).expand(1, 2, -1)
    for layer in range(3):
        (store, local), (other, _) = again.cache.state.store(layer), full.cache.state.store(layer)
        got, expected = store.gather(local, order), other.gather(local, order)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("policy", POLICIES)
def test_b15_keeping_everything(policy, model):
    """1.0 keeps the whole prompt."""
    full = greedy(patched(model, "full", 1.0), prompt(30), 1)
    run = greedy(patched(model, policy, 1.0), prompt(30), 1)
    assert lengths(run.cache) == [[30] * 2] * 3
    assert torch.equal(run.logits, full.logits)


@pytest.mark.parametrize("name", LIBRARY)
def test_b15_budgets_beyond_int32(name):
    """However a policy splits a budget, one that nothing reaches is as one above the tokens."""
    model, batch = tiny_llama(), left_padded(prompt(30), prompt(19, 1))
    if SUPPORT[name]["padding"] == "refused":
        batch = {"input_ids": prompt(30)}
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    runs = []
    for budget in (64, 2**31 - 1, 2**31, 10**12, sys.maxsize):
        sparsekv.patch(model, example(name), budget)
        runs.append(greedy(model, batch["input_ids"], 8, attention_mask=mask))
    for run in runs[1:]:
        assert torch.equal(run.logits, runs[0].logits)
        assert kept(run.cache) == kept(runs[0].cache)
        for store in run.cache.state.stores:
            store.validate()


@pytest.mark.parametrize("budget", [0, -1, 0.0, -0.5, 1.5, float("nan"), True, "8", None])
def test_b16_no_budget_is_an_error(budget, model):
    with pytest.raises(ValueError, match="budget"):
        sparsekv.patch(model, "snapkv", budget)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:pyramid gives all 3 layers")
@pytest.mark.parametrize("budget", [1, 0.001])
@pytest.mark.parametrize("policy", EVICTING)
def test_b16_smallest_budget_keeps_one_token(policy, budget, model):
    """Never an empty cache, never everything; the newest, except where nothing is protected."""
    run = greedy(patched(model, policy, budget), prompt(30), 1)
    for head in (head for layer in kept(run.cache)[1:] for head in layer):
        assert len(head) == 1
        assert head == [29] or "layersplit" in policy
    assert greedy(model, prompt(30), 6).logits.isfinite().all()


@pytest.mark.parametrize(("budget", "count"), [(0.2, 20), (0.1, 10), (0.29, 29), (0.145, 15)])
def test_b17_no_float_truncation(budget, count, model):
    run = greedy(patched(model, "snapkv", budget), prompt(100), 1)
    assert lengths(run.cache) == [[count] * 2] * 3


@given(n=st.integers(1, 5000), m=st.integers(1, 5000), thousandths=st.integers(1, 1000))
def test_b17_monotone(n, m, thousandths):
    kept_of_n, kept_of_m = (resolve_budget(thousandths / 1000, x) for x in (n, m))
    assert (kept_of_n <= kept_of_m) or n > m
    assert resolve_budget(max(thousandths - 1, 1) / 1000, n) <= kept_of_n <= n


@pytest.mark.parametrize("policy", [SnapKV(window=32), Pyramid(window=6), SnapKV(window=5)])
@pytest.mark.parametrize("budget", [7, 12, 40])
def test_b19_window_is_never_cut(policy, budget, model):
    """The last min(window, budget) tokens stay."""
    sparsekv.patch(model, policy, budget)
    cache = greedy(model, prompt(70), 1).cache
    for head in (head for layer in kept(cache) for head in layer):
        newest = min(policy.window, len(head))
        assert head[-newest:] == list(range(70 - newest, 70))
    if policy.name == "snapkv":
        assert lengths(cache) == [[budget] * 2] * 3


@pytest.mark.parametrize(("length", "budget"), [(100, 30), (60, 48), (60, 59), (90, 8)])
def test_b20_pyramid_is_a_pyramid(length, budget):
    """Measured: falling with depth, summing to L * budget, none above the prompt."""
    model = sparsekv.patch(tiny_llama(num_hidden_layers=6), Pyramid(window=4), budget)
    counts = [layer[0] for layer in lengths(greedy(model, prompt(length), 1).cache)]
    assert sum(counts) == 6 * budget
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 1
    assert all(1 <= count <= length for count in counts)


def test_b20_a_flat_pyramid_warns(model):
    sparsekv.patch(model, Pyramid(window=8), 8)
    with pytest.warns(UserWarning, match="pyramid gives all 3 layers 8 slots"):
        greedy(model, prompt(40), 1)


def uniform_llama():
    """Every query looks at all its keys alike."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    return model


@pytest.mark.parametrize("pool", ["max", "none"])
def test_b22_equal_scores(pool):
    """Equal votes: the newest win, in every run."""
    model = sparsekv.patch(uniform_llama(), SnapKV(window=4, pool=pool), 12)
    assert kept(greedy(model, prompt(30), 1).cache) == [[list(range(18, 30))] * 2] * 3


@pytest.mark.parametrize("policy", [H2O(), LayerSplit(full_layers=0, window_rows=1)])
def test_b22_equal_scores_while_decoding(policy):
    """Scored by one row, uniform attention ties all keys: the oldest of equals goes."""
    model = uniform_llama()
    reference = Reference(model, policy, 12)
    loop = Loop(sparsekv.patch(model, policy, 12))
    for ids in prompt(44).split([30, *[1] * 14], dim=1):
        reference.feed(ids)
        loop.feed(ids)
        assert loop.kept() == reference.kept()


def test_b22_protected_keys_survive_better_scores():
    """With uniform attention h2o's sums fall with the position, so the recent half scores worst."""
    model = sparsekv.patch(uniform_llama(), H2O(), 12)
    expected = [*range(6), *range(24, 30)]
    assert kept(greedy(model, prompt(30), 1).cache) == [[expected] * 2] * 3


def test_b24_h2o_does_not_freeze(model):
    """The last `recent` tokens are there at every step, and a new token outlives them."""
    loop = Loop(patched(model, "h2o", 16))
    ids = loop.feed(prompt(20))[:, -1].argmax(-1, keepdim=True)
    for step in range(20, 84):
        ids = loop.feed(ids)[:, -1].argmax(-1, keepdim=True)
        for head in (head for layer in loop.kept() for head in layer):
            assert head[-8:] == list(range(step - 7, step + 1))
            assert len(head) == 16
    older = [head[:-8] for layer in loop.kept() for head in layer]
    assert any(j >= 20 for head in older for j in head), "no generated token among the heavy"


@pytest.mark.parametrize("length", [3, 16, 17, 200])
@pytest.mark.parametrize("policy", EVICTING)
def test_b25_length_at_every_step(policy, length, model):
    """Never above the budget: nothing waits for an interval. snapkv and pyramid grow by one."""
    loop = Loop(patched(model, policy, 16))
    ids, grows = prompt(length), POLICIES[policy].name in ("snapkv", "pyramid")
    for step in range(5):
        ids = loop.feed(ids)[:, -1].argmax(-1, keepdim=True)
        counts = lengths(loop.cache)
        governed = counts[1:] if "layersplit" in policy else counts
        total = sum(map(sum, governed))
        seen = length + step
        expected = min(length, 16) + step if grows else min(seen, 16)
        assert total == expected * 2 * len(governed)
        if not grows:
            assert {n for layer in governed for n in layer} == {expected}
        if "layersplit" in policy:
            assert counts[0] == [seen] * 2


def test_b25_scores_of_a_replaced_slot_start_afresh(model):
    """The token that takes a slot does not inherit the score of its victim."""
    loop = Loop(patched(model, "layersplit-sum", 10))
    ids = loop.feed(prompt(30))[:, -1].argmax(-1, keepdim=True)
    for _ in range(3):
        ids = loop.feed(ids)[:, -1].argmax(-1, keepdim=True)
        for head in range(2):
            scores = slot_scores(loop.cache, 1, 0, head)
            assert 0 < scores[max(scores)] <= 1
