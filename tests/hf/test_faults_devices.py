"""Faults of the field, sections 6 and 7: devices, masks of other kinds, ranks, shared prefixes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from rig import EVICTING, POLICIES, Loop, greedy, kept, patched, prompt, tiny_llama
from transformers import DynamicCache

import sparsekv.hf.cache as hf_cache
from sparsekv import SparseCache
from sparsekv.attention import attend
from sparsekv.headwise import Scores
from sparsekv.hf.compat import cache_key
from sparsekv.plan import LayerSpec
from sparsekv.state import SparseState

CPU = torch.device("cpu")


@pytest.mark.parametrize("policy", EVICTING)
def test_b66_no_tensor_on_a_default_device(policy, model, monkeypatch):
    """Under another default device everything still lives where its layer's keys are."""
    expected = Loop(patched(model, policy, 12))
    got = Loop(model)

    def elsewhere(*args):
        with torch.device("meta"):
            return attend(*args)

    for loop, function in ((expected, attend), (got, elsewhere)):
        monkeypatch.setattr(hf_cache, "attend", function)
        loop.logits = [loop.feed(ids) for ids in prompt(36).split([24, 1, 1, 1, 7, 1, 1], dim=1)]
    for one, other in zip(expected.logits, got.logits, strict=True):
        assert torch.equal(one, other)
    assert got.kept() == expected.kept()


@pytest.mark.parametrize(
    "devices", [["cpu", "cpu:0", "cpu"], ["meta"] * 3, ["meta", "cpu", "meta"]]
)
def test_b66_layers_on_several_devices(devices, model):
    """One page store a device; an expectation that turns out wrong costs nothing but a store."""
    policy = POLICIES["h2o"]
    plain = Loop(patched(model, "h2o", 12))
    cache = SparseCache(policy, 12, [LayerSpec(None, torch.device(name)) for name in devices])
    spread = Loop(model, cache)
    for ids in prompt(36).split([24, 1, 1, 7, 1, 1, 1], dim=1):
        assert torch.equal(spread.feed(ids), plain.feed(ids))
    assert spread.kept() == plain.kept()
    assert len(cache.state.stores) == len(set(devices))
    report = cache.report()
    assert report.pages_used == plain.cache.report().pages_used
    cache.reorder_cache(torch.tensor([0, 0]))
    ids = torch.tensor([[5], [6]])
    assert spread.feed(ids).isfinite().all()
    for store in cache.state.stores:
        assert store.pool.device == CPU
        store.validate()


def test_b68_masks_of_other_shapes_are_refused(model):
    """A 4-D mask, a mask of the new tokens only, a mask of another batch."""
    loop = Loop(patched(model, "snapkv", 12))
    four = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="2-D padding mask"):
        loop.feed(prompt(20), attention_mask=four)
    loop = Loop(model)
    loop.feed(prompt(20))
    with pytest.raises(ValueError, match="2-D padding mask"):
        loop.feed(prompt(5), attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="batch of 1"):
        loop.feed(torch.cat([prompt(5), prompt(5)]))


def test_b68_masks_of_other_shapes_reach_dense_attention(model):
    """With a foreign cache, or none, they mean what they mean without a patch."""
    four = torch.zeros(1, 1, 20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -1e9)
    four[..., 3:9] = -1e9
    packed = torch.cat([torch.arange(9), torch.arange(11)])[None]
    results = []
    for _ in range(2):
        with torch.no_grad():
            given = {cache_key(model): DynamicCache()}
            results.append(
                [
                    model(prompt(20), attention_mask=four, use_cache=False).logits,
                    model(prompt(20), attention_mask=four, use_cache=True, **given).logits,
                    model(prompt(20), position_ids=packed, use_cache=False).logits,
                ]
            )
        patched(model, "snapkv", 12)
    for dense, got in zip(*results, strict=True):
        torch.testing.assert_close(got, dense, atol=1e-5, rtol=0)


def test_b68_decode_step_with_padding_is_refused(model):
    loop = Loop(patched(model, "snapkv", 12))
    loop.feed(torch.cat([prompt(20), prompt(20, 1)]))
    mask = torch.ones(2, 21)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="real token in every row"):
        loop.feed(torch.tensor([[5], [6]]), attention_mask=mask)


def run_rank(policy, steps, heads):
    """Feed the KV heads `heads` of random layers to a state; outputs and the state."""
    generator = torch.Generator().manual_seed(0)
    state = SparseState(policy, 12, [LayerSpec(None, CPU)] * 2)
    outs = []
    for tokens in steps:
        for layer in range(2):
            q = torch.randn(2, 8, tokens, 16, generator=generator)
            k, v = (torch.randn(2, 4, tokens, 16, generator=generator) for _ in range(2))
            q = q.unflatten(1, (4, 2))[:, heads].flatten(1, 2)
            scores = Scores(0.25)
            outs.append(attend(state, layer, q, k[:, heads], v[:, heads], None, scores))
    return outs, state


@pytest.mark.parametrize("policy", EVICTING)
def test_b71_ranks_agree(policy):
    """KV heads sharded over two ranks: the same pages, and together the single process."""
    steps = [40, *[1] * 9, 13, *[1] * 4]
    everything, single = run_rank(POLICIES[policy], steps, slice(0, 4))
    ranks = [run_rank(POLICIES[policy], steps, heads) for heads in (slice(0, 2), slice(2, 4))]
    for whole, first, second in zip(everything, ranks[0][0], ranks[1][0], strict=True):
        torch.testing.assert_close(torch.cat([first, second], dim=2), whole, atol=1e-5, rtol=0)
    stores = [state.stores[0] for _, state in ranks]
    assert np.array_equal(stores[0].lens, stores[1].lens)
    assert np.array_equal(stores[0].table, stores[1].table)
    assert np.array_equal(stores[0].pool._free, stores[1].pool._free)
    whole = single.stores[0]
    for layer in range(2):
        halves = [store.view(layer, "positions") for store in stores]
        positions = torch.cat([half[..., : whole.width(layer) * 16] for half in halves], 1)
        in_use = torch.arange(positions.shape[-1]) < whole.seqlens[layer][..., None]
        expected = whole.view(layer, "positions").masked_fill(~in_use, -1).sort(-1).values
        assert torch.equal(positions.masked_fill(~in_use, -1).sort(-1).values, expected)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "streaming-cache", "layersplit"])
def test_b72_nothing_leaks_over_many_requests(policy, model):
    """One cache object, reset between requests of every kind."""
    loop = Loop(patched(model, policy, 10))
    for length in (1, 5, 10, 11, 17, 33, 64):
        loop.generate(prompt(length), 3)
        loop.cache.reorder_cache(torch.tensor([0, 0]))
        loop.feed(torch.tensor([[5], [6]]))
        loop.cache.batch_select_indices(torch.tensor([False, True]))
        loop.cache.batch_repeat_interleave(3)
        loop.feed(torch.tensor([[5], [6], [7]]))
        stores = loop.cache.state.stores
        for store in stores:
            store.validate()
            store.free()
            assert store.pool.pages_used == 0
        loop.cache.reset()
        assert loop.cache.report().pages_used == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_b79_b80_a_prefix_may_be_copied(policy, model):
    """Questions on deep copies of one prefilled cache: each as if fresh, the prefix unchanged."""
    patched(model, policy, 14)
    prefix = Loop(model)
    prefix.feed(prompt(30))
    before = prefix.kept()
    for seed in (1, 2):
        question = torch.cat([prompt(30), prompt(6, seed)], 1)
        cache = copy.deepcopy(prefix.cache)
        run = greedy(model, question, 6, **{cache_key(model): cache})
        fresh = Loop(model)
        fresh.feed(prompt(30))
        tokens, logits = fresh.generate(prompt(6, seed), 6)
        assert run.tokens[0].tolist() == tokens
        torch.testing.assert_close(run.logits[:, 0], logits, atol=1e-4, rtol=0)
        assert kept(cache) == fresh.kept()
    assert prefix.kept() == before
    assert prefix.cache.get_seq_length() == 30


def test_b79_rows_of_one_prefix_are_independent():
    """Three forks, each evicting other tokens, each equal to its own run."""
    model = patched(tiny_llama(3), "h2o", 12)
    loop = Loop(model)
    loop.feed(prompt(30))
    loop.cache.batch_repeat_interleave(3)
    alone = [Loop(model) for _ in range(3)]
    for single in alone:
        single.feed(prompt(30))
    steps = torch.cat([prompt(20, seed) for seed in (1, 2, 3)])
    for ids in steps.split(1, dim=1):
        logits = loop.feed(ids)
        for row, single in enumerate(alone):
            expected = single.feed(ids[row : row + 1])[0]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)
    for row, single in enumerate(alone):
        assert loop.kept(row) == single.kept()
