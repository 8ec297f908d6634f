"""Faults of the field, section 3: grouped heads, memory, masks, scores."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from reference import Reference
from rig import EVICTING, POLICIES, Loop, greedy, kept, patched, prompt, slot_scores, tiny_llama

import sparsekv
from sparsekv.policies import AdaKV, SnapKV

GROUPS = {"mha": (4, 4), "mqa": (4, 1), "group-16": (32, 2), "one-head": (1, 1)}


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "layersplit", "pyramid"])
@pytest.mark.parametrize("heads", GROUPS)
def test_b28_every_group_shares_one_kept_set(heads, policy):
    """MHA, MQA and 16 queries a KV head: tokens, logits and kept sets of the reference."""
    query_heads, kv_heads = GROUPS[heads]
    model = tiny_llama(num_attention_heads=query_heads, num_key_value_heads=kv_heads)
    reference = Reference(model, POLICIES[policy], 12)
    loop = Loop(patched(model, policy, 12))
    expected = reference.generate(prompt(30), 10)
    got = loop.generate(prompt(30), 10)
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=0)
    assert loop.kept() == reference.kept()


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("policy", EVICTING)
def test_b27_b29_bytes_that_exist(policy, page_size, model):
    """K and V of HK heads (never of HQ), in exactly the pages that the kept tokens need."""
    patched(model, policy, 20, page_size=page_size)
    cache = greedy(model, prompt(70), 1).cache
    pages = sum(-(-len(head) // page_size) for layer in kept(cache) for head in layer)
    page_bytes = 2 * page_size * 16 * 4
    report = cache.report()
    (store,) = cache.state.stores
    assert store.lens.shape == (3, 1, 2)
    assert store.pool.k_pages.shape == (pages + 1, page_size, 16)  # one null page
    assert report.pages_used == pages and report.pages_free == 0
    assert report.kv_bytes == (pages + 1) * page_bytes
    assert report.dense_bytes == 3 * 2 * 70 * 2 * 16 * 4


@pytest.mark.parametrize("policy", EVICTING)
def test_b29_a_long_question_gives_its_pages_back(policy, model):
    """100 tokens onto a cache are held for a moment only."""
    loop = Loop(patched(model, policy, 20))
    for ids in (prompt(70), prompt(1), prompt(100, 1)):
        loop.feed(ids)
    pages = sum(-(-len(head) // 16) for layer in loop.kept() for head in layer)
    report = loop.cache.report()
    assert report.pages_used == pages
    assert report.pages_used + report.pages_free < 3 * 2 * -(-171 // 16)  # never all layers at once


@pytest.mark.parametrize("policy", ["streaming", "h2o", "layersplit"])
def test_b29_decoding_within_a_budget_takes_no_memory(policy, model):
    loop = Loop(patched(model, policy, 16))
    ids = loop.feed(prompt(40))[:, -1].argmax(-1, keepdim=True)
    sizes = []
    for _ in range(24):
        ids = loop.feed(ids)[:, -1].argmax(-1, keepdim=True)
        sizes.append(loop.cache.report().pages_used)
    full_layer = 2 * 2 * (policy == "layersplit")  # 24 more tokens in 2 heads: 2 pages each
    assert sizes[-1] - sizes[0] <= full_layer
    assert sizes[-1] <= 3 * 2 * 2 + full_layer


@pytest.mark.parametrize("policy", POLICIES)
def test_b32_state_lives_on_the_cache(policy, model):
    """After a run nothing of it is reachable from the model, and dense is bitwise what it was."""
    before = greedy(model, prompt(30))
    run = greedy(patched(model, policy, 12), prompt(30))
    state = weakref.ref(run.cache.state)
    pages = weakref.ref(run.cache.state.stores[0].pool.k_pages)
    del run
    gc.collect()
    assert state() is None and pages() is None
    after = greedy(sparsekv.unpatch(model), prompt(30))
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(after.tokens, before.tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_b31_b34_blocks_equal_single_tokens(policy, model):
    """A 6-token and a 20-token question: no query sees a later token, in whatever budgets."""
    patched(model, policy, 64 if POLICIES[policy].name in ("h2o", "streaming") else 24)
    evicts = "layersplit" in policy  # decoding evicts between the tokens of the question
    for length in (6, 20):
        question = prompt(length, 1)
        block, single = Loop(model), Loop(model)
        for loop in (block, single):
            loop.feed(prompt(36) if not evicts else prompt(4))
        at_once = block.feed(question)[0]
        one_by_one = torch.cat([single.feed(token)[0] for token in question.split(1, dim=1)])
        torch.testing.assert_close(at_once, one_by_one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "layersplit"])
def test_b36_same_result_whatever_the_model_used_before(policy, backend, model):
    dense = tiny_llama(attn_implementation=backend)
    assert dense.config._attn_implementation == backend
    expected = greedy(dense, prompt(40))
    full = greedy(patched(dense, "full", 1), prompt(40))
    assert full.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(full.logits, expected.logits, atol=1e-4, rtol=0)
    runs = [greedy(patched(m, policy, 14), prompt(40)) for m in (dense, model)]
    assert kept(runs[0].cache) == kept(runs[1].cache)
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert sparsekv.unpatch(dense).config._attn_implementation == backend


@pytest.mark.parametrize("chunks", [(30,), (30, 1, 1, 1), (13, 10, 7), (1, 1, 5, 20)])
def test_b37_h2o_mass(chunks, model):
    """acc_j = sum over rows i >= j of p_ij: all of it sums to the number of queries."""
    loop = Loop(patched(model, "h2o", 100))
    for chunk in prompt(sum(chunks)).split(list(chunks), dim=1):
        loop.feed(chunk)
    for layer in range(3):
        for head in range(2):
            scores = slot_scores(loop.cache, layer, 0, head)
            assert sum(scores.values()) == pytest.approx(sum(chunks), abs=1e-3)
            assert all(0 <= score <= len(scores) - j for j, score in scores.items())


def test_b37_h2o_sums_are_those_of_the_matrix(model):
    """After eviction too, each kept key carries the sum of the probabilities it received."""
    reference = Reference(model, POLICIES["h2o"], 14)
    loop = Loop(patched(model, "h2o", 14))
    reference.generate(prompt(30), 9)
    loop.generate(prompt(30), 9)
    for layer in range(3):
        for head in range(2):
            scores = slot_scores(loop.cache, layer, 0, head)
            assert scores == pytest.approx(reference.heads[layer][head], abs=1e-4)


@pytest.mark.parametrize("mode", ["mix", "safeguard"])
@pytest.mark.parametrize("length, budget", [(40, 12), (40, 39), (41, 4), (23, 16)])
def test_b21_head_wise_budgets_sum_exactly(length, budget, mode):
    """Also where a head already holds every token, and where all scores are equal."""
    model = tiny_llama()
    for scorer in (SnapKV(window=2), SnapKV(window=1, kernel=31)):
        sparsekv.patch(model, AdaKV(scorer, mode=mode), budget)
        loop = Loop(model)
        loop.feed(prompt(length))
        counts = [len(head) for layer in loop.kept() for head in layer]
        assert sum(counts) == 3 * 2 * budget and max(counts) <= length
