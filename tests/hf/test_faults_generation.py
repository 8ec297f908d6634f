"""Faults of the field, section 5: turns, beams, chunks, other caches, errors, compilation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from rig import EVICTING, POLICIES, Loop, greedy, kept, left_padded, patched, prompt, tiny_llama
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.policies import SnapKV


@pytest.mark.parametrize("policy", POLICIES)
def test_b46_full_text_or_only_the_question(policy, model):
    """Turn 2 is the same whether generate() gets the whole text or only what is new."""
    patched(model, policy, 25)
    answers = []
    for whole in (True, False):
        first = greedy(model, prompt(45), 6)
        text = torch.cat([first.sequences, prompt(11, 1)], 1)
        mask = torch.ones_like(text)
        ids = text if whole else text[:, first.cache.get_seq_length() :]
        cache = {cache_key(model): first.cache}
        run = greedy(model, ids, 6, attention_mask=mask, **cache)
        assert run.cache is first.cache
        assert run.cache.get_seq_length() == text.shape[1] + 5
        answers.append((run.sequences[0, -6:].tolist(), kept(run.cache)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_b46_going_on_is_one_long_generation(policy, model):
    """20 tokens in one call are 8 and 12 in two: continuing is decoding, not a new turn."""
    patched(model, policy, 16)
    long = greedy(model, prompt(30), 20)
    first = greedy(model, prompt(30), 8)
    rest = greedy(model, first.sequences, 12, **{cache_key(model): first.cache})
    assert rest.sequences.tolist() == long.sequences.tolist()
    assert kept(rest.cache) == kept(long.cache)


def rescore(model, ids, tokens):
    """Log-probability of `tokens` after `ids`, fed one by one under the model's policy."""
    loop, total = Loop(model), 0.0
    for token in tokens:
        logits = loop.feed(ids)[0, -1]
        total += float(logits.log_softmax(-1)[token])
        ids = torch.tensor([[token]])
    return total


@pytest.mark.parametrize("policy", POLICIES)
def test_b48_beam_scores_are_those_of_the_text(policy, model):
    """Slots, scores and queries follow the beams: rescoring the text gives the returned score."""
    patched(model, policy, 14)
    rows = [prompt(30), prompt(21, 1)]
    batch = left_padded(*rows)
    output = model.generate(
        **batch, max_new_tokens=8, num_beams=3, num_return_sequences=2, do_sample=False,
        length_penalty=0.0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    for i, sequence in enumerate(output.sequences[:, 30:].tolist()):
        expected = rescore(model, rows[i // 2], sequence)
        assert float(output.sequences_scores[i]) == pytest.approx(expected, abs=1e-3)
    assert output.sequences_scores[0] >= output.sequences_scores[1]


@pytest.mark.parametrize("policy", ["snapkv", "pyramid", "layersplit"])
def test_b48_remembered_queries_follow_their_rows(policy, model):
    """Rows change places between two prefill chunks; the second is shorter than the window."""
    patched(model, policy, 12)
    batch = torch.cat([prompt(30), prompt(30, 1)])
    questions = torch.cat([prompt(3, 2), prompt(3, 3)])
    loop = Loop(model)
    loop.feed(batch)
    loop.cache.reorder_cache(torch.tensor([1, 0]))
    loop.feed(questions)
    for row in range(2):
        alone = Loop(model)
        alone.feed(batch[1 - row][None])
        alone.feed(questions[row][None])
        assert loop.kept(row) == alone.kept()


@pytest.mark.parametrize("policy", EVICTING)
def test_b48_rows_change_places(policy, model):
    """Slots, scores and shifted sinks of two prompts follow their rows; then each is doubled."""
    patched(model, policy, 12)
    rows = [prompt(30), prompt(30, 1)]
    steps = torch.cat([prompt(9, 2), prompt(9, 3)])
    loop = Loop(model)
    loop.feed(torch.cat(rows))
    for ids in steps[:, :3].split(1, dim=1):
        loop.feed(ids)
    loop.cache.reorder_cache(torch.tensor([1, 0]))
    swapped = steps.flip(0)
    for ids in swapped[:, 3:6].split(1, dim=1):
        loop.feed(ids)
    loop.cache.batch_repeat_interleave(2)
    for ids in swapped[:, 6:].repeat_interleave(2, 0).split(1, dim=1):
        logits = loop.feed(ids)
    for row in range(4):
        alone = Loop(model)
        alone.feed(rows[1 - row // 2])
        for ids in swapped[row // 2][None].split(1, dim=1):
            expected = alone.feed(ids)
        torch.testing.assert_close(logits[row], expected[0], atol=1e-4, rtol=0)
        assert loop.kept(row) == alone.kept()


def test_b48_beams_share_pages_until_they_write(model):
    """Forks of one row hold one prompt, and evicting in one beam leaves the others alone."""
    patched(model, "h2o", 12)
    loop = Loop(model)
    loop.feed(prompt(30))
    pages = loop.cache.report().pages_used
    loop.cache.reorder_cache(torch.tensor([0, 0, 0]))
    assert loop.cache.report().pages_used == pages
    ids = torch.tensor([[5], [6], [7]])
    logits = loop.feed(ids)
    for row, token in enumerate(ids):
        alone = Loop(model)
        alone.feed(prompt(30))
        expected = alone.feed(token[None])[0]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)
        assert loop.kept(row) == alone.kept()
    for store in loop.cache.state.stores:
        store.validate()


@pytest.mark.parametrize("length", [39, 40, 41])
@pytest.mark.parametrize("policy", EVICTING)
def test_b52_chunked_prefill(policy, length, model):
    """As many tokens as one shot keeps, its window among them; query-independent: the same."""
    patched(model, policy, 14)
    once = greedy(model, prompt(length), 1)
    chunked = greedy(model, prompt(length), 1, prefill_chunk_size=10)
    assert chunked.cache.get_seq_length() == length
    pairs = zip(kept(once.cache), kept(chunked.cache), strict=True)
    for at_once, in_chunks in pairs:
        for one, other in zip(at_once, in_chunks, strict=True):
            assert len(one) == len(other)
            if POLICIES[policy].name == "streaming":
                assert one == other
            assert other[-2:] == [length - 2, length - 1]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_b52_chunks_within_the_budget_are_dense(size, model):
    expected = greedy(model, prompt(30))
    for policy in ("h2o", "snapkv", "layersplit"):
        run = greedy(patched(model, policy, 64), prompt(30), prefill_chunk_size=size)
        assert run.tokens.tolist() == expected.tokens.tolist()
        torch.testing.assert_close(run.logits, expected.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kwargs", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_b54_other_caches_are_served_densely(kwargs, model):
    """Whoever asks for another cache, or none, gets it."""
    expected = greedy(model, prompt(24))
    run = greedy(patched(model, "snapkv", 8), prompt(24), **kwargs)
    assert run.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(run.logits, expected.logits, atol=1e-4, rtol=0)


def test_b54_a_given_dynamic_cache_is_dense(model):
    batch = left_padded(prompt(24), prompt(17, 1))
    expected = greedy(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    patched(model, "snapkv", 8)
    cache = DynamicCache()
    given = {cache_key(model): cache, "attention_mask": batch["attention_mask"]}
    run = greedy(model, batch["input_ids"], **given)
    assert run.cache is cache and cache.get_seq_length() == 35
    torch.testing.assert_close(run.logits, expected.logits, atol=1e-4, rtol=0)


class RoundedLayer(DynamicLayer):
    """A quantised cache as transformers sees one: it returns other K/V than it was given."""

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = ((8 * x).round() / 8 for x in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


def test_b55_a_given_quantised_cache_is_dense(model):
    """It stays the caller's cache: the result is that of the unpatched model with it."""
    runs = []
    for dense in (True, False):
        if not dense:
            patched(model, "snapkv", 8)
        cache = Cache(layers=[RoundedLayer() for _ in range(3)])
        runs.append(greedy(model, prompt(30), **{cache_key(model): cache}))
    assert runs[0].tokens.tolist() == runs[1].tokens.tolist()
    torch.testing.assert_close(runs[1].logits, runs[0].logits, atol=1e-4, rtol=0)
    exact = greedy(sparsekv.unpatch(model), prompt(30))
    assert not torch.allclose(exact.logits, runs[0].logits, atol=1e-2)


def test_b55_quantised_by_name_is_not_silently_ignored(model):
    """Without its backend transformers itself refuses, patched or not."""
    patched(model, "snapkv", 8)
    with pytest.raises((ImportError, ValueError)):
        greedy(model, prompt(30), cache_implementation="quantized")


@pytest.mark.parametrize("policy", POLICIES)
def test_b56_prompts_do_not_leak_into_each_other(policy, model):
    """A, then B, is B in a fresh process; the second prompt is cut as the first was."""
    patched(model, policy, 14)
    fresh = greedy(patched(tiny_llama(), policy, 14), prompt(33, 1))
    greedy(model, prompt(50))
    later = greedy(model, prompt(33, 1))
    assert torch.equal(later.logits, fresh.logits)
    assert kept(later.cache) == kept(fresh.cache)


@pytest.mark.parametrize("policy", ["streaming-cache", "h2o", "layersplit"])
def test_b56_a_reset_cache_is_a_new_one(policy, model):
    patched(model, policy, 14)
    loop, fresh = Loop(model), Loop(model)
    loop.generate(prompt(40), 5)
    loop.cache.reset()
    assert loop.cache.get_seq_length() == 0 and loop.cache.report().kv_bytes == 0
    got, expected = loop.generate(prompt(33, 1), 5), fresh.generate(prompt(33, 1), 5)
    assert torch.equal(got[1], expected[1])
    assert loop.kept() == fresh.kept()


@dataclass(frozen=True)
class Failing(SnapKV):
    """Fails in its second layer."""

    name = "failing"

    def score(self, layer, stats):
        if layer == 1:
            raise RuntimeError("no scores today")
        return super().score(layer, stats)


def fingerprint(model):
    """All that a patch could leave behind."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = {name: id(value) for name, value in vars(model).items()}
    modules = {name: sorted(vars(module)) for name, module in model.named_modules()}
    configs = (model.config.to_dict(), model.generation_config.to_dict())
    return state, own, modules, configs, model.config._attn_implementation


def assert_same_fingerprint(model, before):
    after = fingerprint(model)
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in after[0])


def test_b57_exception_inside_a_policy(model):
    """The model is as usable as before; the half-written cache says what it is."""
    before = fingerprint(model)
    dense = greedy(model, prompt(30))
    sparsekv.patch(model, Failing(window=8), 12)
    loop = Loop(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no scores today"):
            greedy(model, prompt(30))
    with pytest.raises(RuntimeError, match="no scores today"):
        loop.feed(prompt(30))
    with pytest.raises(ValueError, match="half-written"):
        loop.feed(prompt(1))
    loop.cache.reset()
    assert loop.feed(prompt(9)).isfinite().all()  # within the budget nothing is scored
    sparsekv.unpatch(model)
    assert_same_fingerprint(model, before)
    assert torch.equal(greedy(model, prompt(30)).logits, dense.logits)


@pytest.mark.parametrize("policy", POLICIES)
def test_b57_unpatch_restores_bit_for_bit(policy, model):
    before = fingerprint(model)
    assert sparsekv.unpatch(model) is model  # nothing to take off
    assert_same_fingerprint(model, before)
    assert patched(model, policy, 14) is model
    greedy(model, prompt(20), 2)
    sparsekv.unpatch(sparsekv.unpatch(model))
    assert_same_fingerprint(model, before)
    with pytest.raises(ValueError, match="patched"):
        sparsekv.new_cache(model)


def test_b57_patching_twice_replaces_the_policy(model):
    before = fingerprint(model)
    once = greedy(patched(model, "h2o", 14), prompt(30))
    older = sparsekv.new_cache(model)
    patched(model, "snapkv", 9)
    assert older.report().policy == "h2o"  # caches made before keep theirs
    assert greedy(model, prompt(30), 1).cache.report().kept.max == 9
    twice = greedy(patched(model, "h2o", 14), prompt(30))
    assert torch.equal(twice.logits, once.logits)
    assert_same_fingerprint(sparsekv.unpatch(model), before)


def test_b57_a_patch_that_fails_leaves_the_model_as_it_was():
    """Not patched: not patched. Patched: patched as before."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_llama(max_position_embeddings=32, rope_parameters=rope)
    before = fingerprint(model)
    with pytest.raises(ValueError, match="dynamic"):
        patched(model, "streaming-cache", 14)
    assert_same_fingerprint(model, before)
    patched(model, "h2o", 14)
    before = fingerprint(model)
    for policy, budget in (("streaming-cache", 14), ("h2o", 0)):
        with pytest.raises(ValueError):
            patched(model, policy, budget)
        assert_same_fingerprint(model, before)
    assert greedy(model, prompt(30), 1).cache.report().policy == "h2o"


def test_b57_a_failing_self_test_leaves_the_model_as_it_was(model):
    """The forward that proves a patch may fail too."""
    patched(model, "h2o", 14)
    before = fingerprint(model)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patched(model, "snapkv", 9)
    handle.remove()
    assert_same_fingerprint(model, before)
    assert greedy(model, prompt(30), 1).cache.report().kept.max == 14


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_b60_compiled_forward(policy):
    """torch.compile changes no logit, and nothing is traced again after the third step."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain, compiled = (patched(tiny_llama(num_hidden_layers=2), policy, 14) for _ in range(2))
    compiled.forward = torch.compile(compiled.forward, backend=backend)
    loops = [Loop(model) for model in (plain, compiled)]
    ids, counts = prompt(30), []
    for _ in range(9):
        expected, got = (loop.feed(ids)[:, -1] for loop in loops)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        ids = expected.argmax(-1, keepdim=True)
        counts.append(len(graphs))
    assert loops[0].kept() == loops[1].kept()
    assert counts[3] == counts[-1], counts
    torch._dynamo.reset()
