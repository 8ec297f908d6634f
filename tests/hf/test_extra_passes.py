"""KVzip through a model: scores against an explicit computation, budgets, turns, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build
from rig import Loop, greedy, kept, left_padded, prompt, tiny_llama
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.hf.extra_passes import ProbeCache
from sparsekv.policies import KVzip, Quest
from sparsekv.probing import Probe, keep_best


class Letters:
    """A tokenizer stub: ids 2 .. 97 by character."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [2 + ord(c) % 96 for c in text]}

    def apply_chat_template(self, turn, tokenize, add_generation_prompt):
        return f"[{turn[0]['content']}][a]"


def policy(**changes):
    return KVzip(**{"tokenizer": Letters(), "chunk": 16, **changes})


def explicit_scores(model, context, chosen):
    """fp32 [L, HK, T] of one row with eager attention over a DynamicCache and full matrices."""
    seen = {}

    def recording(module, query, key, value, attention_mask, scaling, **kwargs):
        group = query.shape[1] // key.shape[1]
        tokens, slots = query.shape[2], key.shape[2]
        logits = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        visible = torch.ones(tokens, slots, dtype=torch.bool).tril(slots - tokens)
        seen[module.layer_idx] = logits.masked_fill(~visible, -torch.inf)[0]
        probs = seen[module.layer_idx].softmax(-1)
        return (probs @ value[0].repeat_interleave(group, 0))[None].transpose(1, 2), None

    AttentionInterface.register("recording", recording)
    AttentionMaskInterface.register("recording", eager_mask)
    model.set_attn_implementation("recording")
    heads = model.config.num_key_value_heads
    scores = torch.zeros(model.config.num_hidden_layers, heads, len(context))
    for one in chosen.repeats(context):
        loop = Loop(model, DynamicCache())
        loop.feed(torch.tensor([context]))
        loop.feed(torch.tensor([one.ids]))
        for layer, logits in seen.items():
            sees = torch.zeros(logits.shape[-1], dtype=torch.bool)
            sees[: chosen.sinks] = sees[one.start : one.stop] = sees[len(context) :] = True
            probs = logits.masked_fill(~sees, -torch.inf).softmax(-1)  # [HQ, m, T + m]
            best = probs.unflatten(0, (heads, -1)).amax((1, 2))
            scores[layer, :, one.start : one.stop] = best[:, one.start : one.stop]
    return scores


def positions_kept(cache, row=0):
    return [[set(head) for head in layer] for layer in kept(cache, row)]


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("budget", [12, 0.3])
def test_kept_keys_are_those_of_the_explicit_scores(uniform, sinks, budget):
    chosen, ids = policy(uniform=uniform, sinks=sinks), prompt(50)
    average = 12 if budget == 12 else 15
    scores = explicit_scores(tiny_llama(), ids[0].tolist(), chosen)
    assert (scores[..., sinks:] > 0).all()
    expected = keep_best(scores, average, sinks, uniform)
    model = sparsekv.patch(tiny_llama(), chosen, budget)
    loop = Loop(model)
    loop.feed(ids)
    assert sparsekv.compress(model, loop.cache, ids) is loop.cache
    for layer, heads in enumerate(positions_kept(loop.cache)):
        for head, found in enumerate(heads):
            assert found == set(expected[layer, head].nonzero().flatten().tolist())
    lens = loop.cache.state.stores[0].lens
    assert lens.sum() == 3 * 2 * average
    assert (lens == average).all() or not uniform
    loop.cache.state.stores[0].validate()


def test_generate_compresses_by_itself(model):
    """The first new token is that of the full prompt; the cache is that of a manual loop."""
    ids = prompt(70)
    dense = greedy(model, ids, 1)
    sparsekv.patch(model, policy(), 10)
    run = greedy(model, ids, 6)
    assert run.tokens[0, 0] == dense.tokens[0, 0]
    loop = Loop(model)
    logits = loop.feed(ids)
    sparsekv.compress(model, loop.cache, ids)
    assert loop.cache.report().kept.mean == 10
    before = positions_kept(loop.cache)
    tokens = [int(logits[0, -1].argmax())]
    for _ in range(5):
        tokens.append(int(loop.feed(torch.tensor([[tokens[-1]]]))[0, -1].argmax()))
    assert run.tokens[0].tolist() == tokens
    new = set(range(70, 75))
    assert positions_kept(run.cache) == [[head | new for head in layer] for layer in before]


def test_memory_is_given_back(model):
    ids = prompt(400)
    sparsekv.patch(model, policy(chunk=200), 0.2)
    loop = Loop(model)
    loop.feed(ids)
    full = loop.cache.report().kv_bytes
    sparsekv.compress(model, loop.cache, ids)
    report = loop.cache.report()
    assert report.pages_free == 0 and report.kv_bytes < 0.35 * full  # a last page may be partial
    loop.cache.state.stores[0].validate()


@pytest.mark.parametrize("budget", [40, 1.0, 1000])
def test_within_the_budget_nothing_happens(budget, model):
    ids = prompt(40)
    dense = greedy(model, ids, 10)
    sparsekv.patch(model, policy(), budget)
    run = greedy(model, ids, 10)
    assert torch.equal(run.tokens, dense.tokens)
    assert run.cache.report().kept.min == 49


@pytest.mark.parametrize("budget", [9, 0.25])
def test_rows_of_a_batch_are_those_of_single_prompts(budget, model):
    sparsekv.patch(model, policy(), budget)
    rows = [prompt(60, 1), prompt(33, 2), prompt(9, 3)]
    batch = left_padded(*rows)
    together = greedy(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for i, row in enumerate(rows):
        alone = greedy(model, row)
        assert torch.equal(together.tokens[i], alone.tokens[0])
        shift = 60 - row.shape[1]
        padded = [[{c - shift for c in h} for h in x] for x in positions_kept(together.cache, i)]
        assert padded == positions_kept(alone.cache)


def test_later_turns_grow(model):
    """A second turn compresses nothing: its tokens all stay, like those that were generated."""
    sparsekv.patch(model, policy(), 10)
    cache = sparsekv.new_cache(model)
    loop = Loop(model, cache)
    ids = prompt(60)
    loop.feed(ids)
    sparsekv.compress(model, cache, ids)
    before = positions_kept(cache)
    loop.feed(prompt(20, 5))
    assert positions_kept(cache) == [[h | set(range(60, 80)) for h in x] for x in before]
    turn = torch.cat([ids, prompt(20, 5), prompt(7, 6)], 1)
    run = greedy(model, turn, 3, **{cache_key(model): cache})
    now = positions_kept(run.cache)
    assert now == [[h | set(range(60, 89)) for h in x] for x in before]
    with pytest.raises(ValueError, match="holds its whole context, got a compressed one"):
        sparsekv.compress(model, cache, torch.cat([turn, run.tokens[:, :2]], 1))


def test_a_prompt_in_chunks_keeps_what_one_forward_keeps(model):
    sparsekv.patch(model, policy(), 10)
    whole = greedy(model, prompt(60), 4)
    parts = greedy(model, prompt(60), 4, prefill_chunk_size=13)
    assert positions_kept(whole.cache) == positions_kept(parts.cache)
    assert torch.equal(whole.tokens, parts.tokens)


def test_a_second_prompt_knows_nothing_of_the_first(model):
    sparsekv.patch(model, policy(), 10)
    fresh = greedy(model, prompt(60, 5))
    greedy(model, prompt(44, 6))
    again = greedy(model, prompt(60, 5))
    assert torch.equal(fresh.tokens, again.tokens)
    assert positions_kept(fresh.cache) == positions_kept(again.cache)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3", "mistral"])
def test_a_pass_is_dense_attention_over_the_cache(family):
    """What the layers compute in a pass is what they would compute with a dense cache."""
    model, ids = build(family), prompt(60)
    dense = Loop(model, DynamicCache())
    dense.feed(ids)
    new = prompt(21, 4)
    expected = dense.feed(new)
    sparsekv.patch(model, policy(), 10)
    loop = Loop(model)
    for part in ids.split(25, dim=1):  # the keys of a sliding layer stand in any order
        loop.feed(part)
    state = loop.cache.state
    found = {i: torch.zeros(2, 60) for i in state.ordinal}
    probe = Loop(model, ProbeCache(Probe(state, 0, 4, 25, 4, found)))
    logits = probe.feed(new, position_ids=torch.arange(60, 81)[None])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    assert loop.cache.get_seq_length() == 60 and state.tokens.tolist() == [60]
    for scores in found.values():
        assert (scores[:, 4:25] > 0).all() and not scores[:, :4].any() and not scores[:, 25:].any()


def test_quantised_pages_are_compressed_too():
    model = sparsekv.patch(tiny_llama(), policy(), 10, kv_dtype="int8")
    report = greedy(model, prompt(60), 2).cache.report()
    assert report.kept.mean == 11


def test_what_cannot_be_repeated_is_refused(model):
    with pytest.raises(ValueError, match="expected a tokenizer"):
        sparsekv.patch(model, "kvzip")
    sparsekv.patch(model, policy(), 10)
    ids, loop = prompt(40), Loop(model)
    loop.feed(ids)
    with pytest.raises(ValueError, match=r"the cache has seen, \[40\] a row, got \[39\]"):
        sparsekv.compress(model, loop.cache, ids[:, 1:])
    with pytest.raises(ValueError, match="attention_mask"):
        sparsekv.compress(model, loop.cache, ids, torch.ones(1, 39))
    with pytest.raises(ValueError, match="allows assisted generation, got 'kvzip'"):
        greedy(model, ids, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="expected input_ids for policy 'kvzip'"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"expected sparsekv.compress\(.* got a cache of \[40\]"):
        loop.feed(ids[:, :1])
    sparsekv.patch(model, "snapkv")
    with pytest.raises(ValueError, match="under policy 'kvzip', got 'snapkv'"):
        sparsekv.compress(model, sparsekv.new_cache(model), ids)


def test_rows_that_are_copies_are_asked_once(model):
    sparsekv.patch(model, policy(), 10)
    calls = []
    hook = model.model.register_forward_pre_hook(lambda *args: calls.append(1))
    alone = greedy(model, prompt(50), 1)
    once = len(calls)
    copies = greedy(model, torch.cat([prompt(50)] * 3), 1)
    hook.remove()
    assert len(calls) == 2 * once
    assert all(kept(copies.cache, i) == kept(alone.cache) for i in range(3))


def test_beams_and_unpatch(model):
    ids = prompt(50)
    plain = {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    plain["attention_mask"] = torch.ones_like(ids)
    dense = model.generate(ids, **plain)
    sparsekv.patch(model, policy(), 500)
    assert torch.equal(model.generate(ids, **plain), dense)
    sparsekv.patch(model, policy(), 10)
    assert model.generate(ids, **plain).shape == dense.shape
    sparsekv.unpatch(model)
    assert "_prefill" not in model.__dict__
    assert torch.equal(model.generate(ids, **plain), dense)


def test_a_context_of_sinks_alone_and_a_model_without_full_layers(model):
    """Nothing to ask for: the first tokens stay; sliding layers keep their windows."""
    sparsekv.patch(model, policy(), 2)
    run = greedy(model, prompt(3), 2)
    assert kept(run.cache) == [[[0, 1, 3]] * 2] * 3
    with pytest.warns(UserWarning, match="no layer to act on"):
        windowed = sparsekv.patch(build("mistral-window"), policy(), 2)
    assert greedy(windowed, prompt(40), 3).cache.report().kept.max == 24


@pytest.mark.parametrize("name", ["quest", "kvzip"])
def test_a_prefix_can_be_copied(name, model):
    """Questions on deep copies of one cached context do not see one another."""
    chosen = {"quest": Quest(0), "kvzip": policy()}[name]
    loop = Loop(sparsekv.patch(model, chosen, 32))
    loop.feed(prompt(70))
    if name == "kvzip":
        sparsekv.compress(model, loop.cache, prompt(70))
    before = kept(loop.cache)
    answers = []
    for seed in (1, 2, 1):
        branch = Loop(model, copy.deepcopy(loop.cache))
        branch.feed(prompt(6, seed))
        answers.append(branch.feed(prompt(1, seed)))
    assert torch.equal(answers[0], answers[2]) and not torch.equal(answers[0], answers[1])
    assert kept(loop.cache) == before
