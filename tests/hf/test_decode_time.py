"""Policies that work between decode steps: fixed steps and compressions outside of them.

A captured step is Python that runs while `capturing` is set: what the device does then is what a
replay does again. Compressions come after it, as after a replay.
"""

from __future__ import annotations

import copy

import pytest
import torch
from families import build
from rig import Loop, greedy, kept, left_padded, prompt, tiny_llama
from zoo import EXAMPLES

import sparsekv
from sparsekv.interval import compress_due
from sparsekv.policies import Duo, KeyDiff, Policy, Scissorhands
from sparsekv.steady import addresses, advance, hold

NAMES = ["tova", "scissorhands", "keyformer", "keydiff", "rkv", "duo"]
INTERVAL = ["scissorhands", "keydiff", "rkv"]
_BUDGETS = [16, 44, 200]  # in use from the first step, from the fifth, never


def example(name: str) -> Policy:
    return EXAMPLES[name](3, 2)


def begun(name: str, budget: int, tokens: int = 40) -> Loop:
    loop = Loop(sparsekv.patch(tiny_llama(), example(name), budget))
    loop.feed(prompt(tokens))
    return loop


def captured(loop: Loop, ids: torch.Tensor) -> torch.Tensor:
    """A step as the device replays it, then what the host does after a replay."""
    loop.cache.state.capturing = True
    logits = loop.feed(ids)
    loop.cache.state.capturing = False
    compress_due(loop.cache.state)
    return logits


@pytest.mark.parametrize("budget", _BUDGETS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("capture", "first"), [(False, 2), (True, 0), (True, 2)])
def test_steady_steps_equal_ordinary_steps(name, budget, first, capture):
    ordinary, steady = begun(name, budget), begun(name, budget)
    ids = prompt(30, seed=9)
    for i in range(30):
        if i in (first, first + 12):
            hold(steady.cache.state, 12)
        held = steady.cache.state.held_steps
        expected = ordinary.feed(ids[:, i : i + 1])
        step = captured if capture and held else Loop.feed
        got = step(steady, ids[:, i : i + 1])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        assert kept(steady.cache) == kept(ordinary.cache)
    steady.cache.state.stores[0].validate()


@pytest.mark.parametrize("budget", _BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_where_it_is(name, budget):
    """What a graph was captured with is what later steps use, across compressions."""
    loop = begun(name, budget)
    hold(loop.cache.state, 20)
    captured(loop, prompt(1, seed=8))
    before = addresses(loop.cache.state)
    for token in prompt(19, seed=9)[0]:
        captured(loop, token.view(1, 1))
        assert addresses(loop.cache.state) == before
    assert loop.cache.state.held_steps == 0


@pytest.mark.parametrize("budget", _BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_advance_counts_as_a_step_does(name, budget):
    loop = begun(name, budget)
    hold(loop.cache.state, 12)
    for token in prompt(12, seed=9)[0]:
        counted = copy.deepcopy(loop.cache.state)
        advance(counted)
        loop.cache.state.capturing = True
        loop.feed(token.view(1, 1))
        loop.cache.state.capturing = False
        state = loop.cache.state
        assert counted.seen == state.seen and (counted.tokens == state.tokens).all()
        assert (counted.stores[0].lens == state.stores[0].lens).all()
        compress_due(state)


@pytest.mark.parametrize("name", INTERVAL)
def test_budget_holds_at_every_step(name):
    """From the first step on, and each compression leaves what was planned (B25)."""
    loop = begun(name, 16)
    limits, lens = loop.cache.state.limits, loop.cache.state.stores[0].lens
    assert (lens == limits.keep).all() and (lens <= 16).all()
    compressions = 0
    for token in prompt(40, seed=9)[0]:
        before = lens.copy()
        loop.feed(token.view(1, 1))
        lens = loop.cache.state.stores[0].lens
        assert (lens <= limits.budget).all()
        due = before == limits.budget
        assert (lens == limits.low)[due].all() and (lens == before + 1)[~due].all()
        compressions += int(due.any())
    assert compressions >= 2


def test_rows_of_a_batch_compress_each_in_its_time():
    """Rows that reach their budgets at different steps, each as if it were alone."""
    for name in INTERVAL:
        model = sparsekv.patch(tiny_llama(1), example(name), 20)
        rows = [prompt(31, 1), prompt(9, 2), prompt(24, 3)]
        batch = left_padded(*rows)
        together = greedy(model, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
        for i, row in enumerate(rows):
            alone = greedy(model, row, 30)
            assert together.tokens[i].tolist() == alone.tokens[0].tolist()
            width = batch["input_ids"].shape[1] - row.shape[1]
            moved = [[[j + width for j in head] for head in layer] for layer in kept(alone.cache)]
            assert kept(together.cache, i) == moved


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "qwen2-mixed"])
@pytest.mark.parametrize("name", INTERVAL)
def test_other_families(name, family):
    """Sliding layers, softcap, sinks: a padded row is what it is alone, and budgets hold."""
    model = sparsekv.patch(build(family), example(name), 20)
    rows = [prompt(31, 1), prompt(9, 2)]
    batch = left_padded(*rows)
    together = greedy(model, batch["input_ids"], 24, attention_mask=batch["attention_mask"])
    state = together.cache.state
    assert (state.stores[0].lens <= state.limits.budget).all()
    for i, row in enumerate(rows):
        alone = greedy(model, row, 24)
        assert together.tokens[i].tolist() == alone.tokens[0].tolist()
        width = batch["input_ids"].shape[1] - row.shape[1]
        moved = [[[j + width for j in head] for head in layer] for layer in kept(alone.cache)]
        assert kept(together.cache, i) == moved


@pytest.mark.parametrize("name", INTERVAL)
def test_forks_compress_apart(name):
    """Rows that share pages: a compression of one leaves the other what it had."""
    loop = begun(name, 16)
    loop.cache.reorder_cache(torch.tensor([0, 0, 0]))
    alone = [begun(name, 16) for _ in range(3)]
    for step in range(14):
        ids = torch.cat([prompt(1, seed=50 + step + 100 * row) for row in range(3)])
        together = loop.feed(ids)
        for row in range(3):
            expected = alone[row].feed(ids[row : row + 1])[0]
            torch.testing.assert_close(together[row], expected, atol=1e-4, rtol=0)
            assert kept(loop.cache, row) == kept(alone[row].cache)
    loop.cache.state.stores[0].validate()


@pytest.mark.parametrize("accepted", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("name", INTERVAL)
def test_drafts_across_a_compression_are_taken_back(name, accepted):
    loop, plain = begun(name, 16), begun(name, 16)
    for token in prompt(3, seed=4)[0]:
        loop.feed(token.view(1, 1))
        plain.feed(token.view(1, 1))
    loop.cache.activate_past_recording()
    drafts = prompt(12, seed=5)
    loop.feed(drafts)
    loop.cache.crop(accepted - 12)
    loop.cache.state.recording = False
    for token in drafts[0, :accepted]:
        plain.feed(token.view(1, 1))
    assert kept(loop.cache) == kept(plain.cache)
    for token in prompt(12, seed=6)[0]:
        ids = token.view(1, 1)
        torch.testing.assert_close(loop.feed(ids), plain.feed(ids), atol=1e-4, rtol=0)
        assert kept(loop.cache) == kept(plain.cache)
    loop.cache.state.stores[0].validate()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e5m2"])
@pytest.mark.parametrize("name", INTERVAL)
def test_quantised_slots_are_compressed(name, kv_dtype):
    from reference import Reference

    model = tiny_llama(2).double()
    reference = Reference(model, example(name), 12, kv_dtype=kv_dtype)
    loop = Loop(sparsekv.patch(model, example(name), 12, kv_dtype=kv_dtype))
    ids = prompt(30, 2)
    for _ in range(24):
        expected, got = reference.feed(ids), loop.feed(ids)[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0, check_dtype=False)
        assert loop.kept() == reference.kept()
        ids = expected[-1:].argmax(-1, keepdim=True)


def test_keydiff_never_holds_more_than_a_block_over_its_budget():
    """A hard cap on memory while the prompt is read, which is what the blocks are for."""
    loop = Loop(sparsekv.patch(tiny_llama(), KeyDiff(block=16), 32))
    loop.feed(prompt(400))
    pages = loop.cache.state.stores[0].pool.num_pages
    heads = 3 * 2  # layers, KV heads
    assert pages <= heads * (32 + 16) // 16 + heads  # and a page of growth each


def test_a_prompt_within_budget_is_not_cut_into_blocks():
    dense = Loop.dense(tiny_llama()).feed(prompt(40))
    loop = Loop(sparsekv.patch(tiny_llama(), KeyDiff(block=4), 40))
    full = Loop(sparsekv.patch(tiny_llama(), "full"))
    assert torch.equal(loop.feed(prompt(40)), full.feed(prompt(40)))
    torch.testing.assert_close(full.feed(prompt(1)), loop.feed(prompt(1)), atol=0, rtol=0)
    assert dense.shape == (1, 40, 128)


def test_what_cannot_be_served_is_refused_with_the_reason(monkeypatch):
    with pytest.raises(ValueError, match="expected defer_eviction=False with policy 'keydiff'"):
        sparsekv.patch(tiny_llama(), "keydiff", 16, defer_eviction=True)
    with pytest.raises(ValueError, match=r"expected Duo\(gates="):
        sparsekv.patch(tiny_llama(), "duo", 16)
    with pytest.raises(ValueError, match="expected gates for 3 layers of 2 KV heads, got 1 of 2"):
        sparsekv.patch(tiny_llama(), Duo(((0.1, 0.9),)), 16)
    monkeypatch.setattr("sparsekv.hf.patch.tp_size", lambda model: 2)
    for name in ("tova", "keyformer", "duo"):
        with pytest.raises(ValueError, match="tensor-parallel ranks"):
            sparsekv.patch(tiny_llama(), example(name), 16)


def test_duo_bytes_are_those_of_its_heads():
    """Retrieval heads grow, streaming heads do not."""
    gates = ((0.9, 0.1), (0.1, 0.9), (0.8, 0.2))
    loop = Loop(sparsekv.patch(tiny_llama(), Duo(gates, sinks=2, recent=14), 64))
    loop.feed(prompt(40))
    for token in prompt(30, seed=9)[0]:
        loop.feed(token.view(1, 1))
    held = loop.cache.state.stores[0].lens[:, 0]
    assert held.tolist() == [[70, 16], [16, 70], [70, 16]]
    assert kept(loop.cache)[0][1] == [0, 1, *range(56, 70)]


def test_scissorhands_needs_no_state_of_slots():
    """An interval policy with a score per slot is not a thing."""

    class Stateful(Scissorhands):
        stateful = True

    with pytest.raises(ValueError, match="without a score per slot"):
        greedy(sparsekv.patch(tiny_llama(), Stateful(), 16), prompt(40))
