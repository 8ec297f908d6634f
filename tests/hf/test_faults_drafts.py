"""Faults of the field, section 5: drafts that are taken back (assisted decoding, crop)."""

from __future__ import annotations

import pytest
import torch
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

import sparsekv
from sparsekv.hf.compat import cache_key, output_cache


def repetitive(seed=0):
    """40 tokens, the last 12 of which have come before: prompt lookup finds drafts in it."""
    ids = prompt(28, seed)
    return torch.cat([ids, ids[:, 5:17]], 1)


def assistant(seed, **config):
    """A draft model that proposes 4 tokens a round."""
    model = tiny_llama(seed, **config)
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def assert_same_run(drafted, plain):
    """Same tokens, and the same cache once the drafted run has let go of its drafts."""
    assert drafted.tokens.tolist() == plain.tokens.tolist()
    assert kept(drafted.cache) == kept(plain.cache)


@pytest.mark.parametrize("budget", [14, 0.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_b50_prompt_lookup(policy, budget, model):
    patched(model, policy, budget)
    plain = greedy(model, repetitive(), 20)
    drafted = greedy(model, repetitive(), 20, prompt_lookup_num_tokens=4)
    assert_same_run(drafted, plain)


def test_b50_prompt_lookup_accepts_drafts():
    """Zero queries make a model of bigrams: its text is periodic, so drafts are accepted too."""
    model = tiny_llama(1, initializer_range=0.02)
    patched(model, "h2o", 14)
    calls = []
    model.model.register_forward_hook(lambda *args: calls.append(1))
    plain = greedy(model, repetitive(), 30)
    steps, calls[:] = len(calls), []
    assert_same_run(greedy(model, repetitive(), 30, prompt_lookup_num_tokens=4), plain)
    assert len(calls) < steps - 5


@pytest.mark.parametrize("helper", ["same-weights", "other-weights"])
@pytest.mark.parametrize("policy", POLICIES)
def test_b50_assistant_model(policy, helper, model):
    """Nearly every draft is accepted, or nearly none."""
    patched(model, policy, 14)
    plain = greedy(model, prompt(30), 14)
    draft = assistant(0) if helper == "same-weights" else assistant(5, num_hidden_layers=1)
    assert_same_run(greedy(model, prompt(30), 14, assistant_model=draft), plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_b50_sparse_assistant_of_a_dense_target(policy, model):
    """The assistant's cache lives over all rounds and is cropped; the target's text is dense."""
    expected = greedy(model, prompt(30), 14)
    draft = patched(assistant(0), policy, 14)
    run = greedy(model, prompt(30), 14, assistant_model=draft)
    assert run.tokens.tolist() == expected.tokens.tolist()


def test_b50_both_sparse(model):
    patched(model, "snapkv", 14)
    plain = greedy(model, prompt(30), 14)
    draft = patched(assistant(0), "streaming", 10)
    assert_same_run(greedy(model, prompt(30), 14, assistant_model=draft), plain)


def assisted(model, draft, ids, new, **kwargs):
    """The run of `model`, what each call of the assistant returned, and the assistant's cache."""
    calls, generate = [], draft.generate
    draft.generate = lambda *args, **own: calls.append(generate(*args, **own)) or calls[-1]
    run = greedy(model, ids, new, assistant_model=draft, **kwargs)
    del draft.generate
    return run, [call.sequences[0].tolist() for call in calls], output_cache(calls[-1])


def draft_model(kind):
    """Another model, whose drafts are rejected from the first, or the target with some noise."""
    if kind == "other":
        return assistant(5, num_hidden_layers=1)
    draft = assistant(0)
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.01 * torch.randn_like(weight)
    return draft


@pytest.mark.parametrize("length", [1, 2, 30])
@pytest.mark.parametrize("kind", ["other", "noise"])
def test_b50_rejected_drafts_of_a_full_assistant(kind, length, model):
    """Every draft of every round is that of the unpatched assistant."""
    expected = greedy(model, prompt(length), 14)
    dense, drafts, _ = assisted(model, draft_model(kind), prompt(length), 14)
    run, own, _ = assisted(model, patched(draft_model(kind), "full", 14), prompt(length), 14)
    assert run.tokens.tolist() == dense.tokens.tolist() == expected.tokens.tolist()
    assert own == drafts
    assert len(drafts) > 3


@pytest.mark.parametrize("kwargs", [{}, {"prefill_chunk_size": 29}], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", ["other", "noise"])
@pytest.mark.parametrize("policy", POLICIES)
def test_b50_rejected_drafts_of_a_sparse_assistant(policy, kind, kwargs, model):
    """The target's text is dense; the assistant's cache is that of a run that saw no draft.

    Its prompt is evicted one token early: the last one is taken back with the first drafts.
    """
    if kwargs and cache_key(model) == "past_key_values":
        pytest.skip("transformers 5.17 feeds the whole text again in every round of chunks")
    ids = prompt(30)
    draft = patched(draft_model(kind), policy, 14, defer_eviction=bool(kwargs))
    run, drafts, cache = assisted(model, draft, ids, 14, **kwargs)
    assert run.tokens.tolist() == greedy(model, ids, 14).tokens.tolist()
    plain, text = Loop(draft), torch.tensor([drafts[-1][:-1]])  # the last draft is not fed
    for part in (text[:, :29], *text[:, 29:].split(1, 1)):
        plain.feed(part)
    assert plain.kept() == kept(cache)
    cache.crop(0)
    for store in cache.state.stores:
        store.validate()


def test_b50_drafts_in_turn_two_are_refused(model):
    """transformers feeds the whole text again, whatever the cache holds, and gives other text."""
    patched(model, "full", 1)
    kwargs = {"prompt_lookup_num_tokens": 3}
    first = greedy(model, repetitive(), 6, **kwargs)
    text = torch.cat([first.sequences, prompt(7, 1)], 1)
    with pytest.raises(ValueError, match="empty cache"):
        greedy(model, text, 10, **{cache_key(model): first.cache}, **kwargs)


@pytest.mark.parametrize("policy", POLICIES)
def test_b50_turn_two_without_drafts(policy, model):
    """What prompt lookup leaves on a cache does not reach a plain turn, nor a manual loop."""
    patched(model, policy, 16)
    question = prompt(7, 1)
    results = []
    for kwargs in ({}, {"prompt_lookup_num_tokens": 3}):
        first = greedy(model, repetitive(), 6, **kwargs)
        text = torch.cat([first.sequences, question], 1)
        second = greedy(model, text, 5, **{cache_key(model): first.cache})
        loop = Loop(model, second.cache)
        logits = [loop.feed(ids) for ids in (second.tokens[:, -1:], prompt(9, 2), prompt(1, 3))]
        results.append((second.tokens.tolist(), torch.cat(logits, 1), loop.kept()))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=0)
    assert results[0][2] == results[1][2]


def scores_of(loop):
    """Scores of all heads by position."""
    if not loop.cache.state.policy.stateful:
        return []
    return [slot_scores(loop.cache, i, 0, h) for i in range(3) for h in range(2)]


@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_b51_crop_restores_slots_and_scores(policy, accepted, model):
    """Five drafts in one forward, some taken back, twice: as if those had never been."""
    patched(model, policy, 14)
    drafting, plain = Loop(model), Loop(model)
    drafting.cache.activate_past_recording()
    for loop in (drafting, plain):
        loop.feed(prompt(24))
    for round_ in range(2):
        drafts = prompt(5, round_)
        together = drafting.feed(drafts)[0]
        drafting.cache.crop(accepted - 5)
        for i in range(accepted):
            alone = plain.feed(drafts[:, i : i + 1])[0]
            torch.testing.assert_close(together[i : i + 1], alone, atol=1e-4, rtol=0)
        assert drafting.cache.get_seq_length() == plain.cache.get_seq_length()
        assert drafting.kept() == plain.kept()
        for got, expected in zip(scores_of(drafting), scores_of(plain), strict=True):
            assert got == pytest.approx(expected, abs=1e-5)
    ids = prompt(1, 9)
    torch.testing.assert_close(drafting.feed(ids), plain.feed(ids), atol=1e-4, rtol=0)
    drafting.cache.crop(0)
    for store in drafting.cache.state.stores:
        store.validate()


@pytest.mark.parametrize("policy", ["snapkv", "pyramid", "layersplit"])
def test_b51_rejected_drafts_leave_the_observation_window(policy, model):
    """Prompt, drafts that are all rejected, more prompt: scored by queries of both chunks."""
    patched(model, policy, 14)
    drafting, plain = Loop(model), Loop(model)
    for loop in (drafting, plain):
        loop.feed(prompt(24))
        if loop is drafting:
            loop.cache.activate_past_recording()
            loop.feed(prompt(5, 1))
            loop.cache.crop(-5)
            loop.cache.state.recording = False
        loop.feed(prompt(3, 2))
    assert drafting.kept() == plain.kept()


@pytest.mark.parametrize("policy", EVICTING)
def test_b51_crop_into_evicted_tokens_is_refused(policy, model):
    """Without recording, or beyond what was recorded, the state before is gone."""
    loop = Loop(patched(model, policy, 14))
    loop.feed(prompt(24))
    loop.feed(prompt(1))
    with pytest.raises(ValueError, match="crop"):
        loop.cache.crop(-1)
    loop.cache.activate_past_recording()
    loop.feed(prompt(3))
    with pytest.raises(ValueError, match="crop at most the 3 tokens"):
        loop.cache.crop(-4)
    before = loop.kept()
    loop.cache.crop(-3)
    assert loop.cache.get_seq_length() == 25
    assert loop.kept() != before


def test_b51_crop_takes_tensors_and_absolute_lengths(model):
    """transformers 5.17 hands over a 0-d tensor; a positive number is the length to keep."""
    loop = Loop(patched(model, "h2o", 14))
    loop.cache.activate_past_recording()
    loop.feed(prompt(24))
    loop.feed(prompt(4))
    loop.cache.crop(torch.tensor(-1))
    assert loop.cache.get_seq_length() == 27
    loop.feed(prompt(3))
    loop.cache.crop(28)
    assert loop.cache.get_seq_length() == 28
    with pytest.raises(ValueError, match="at most 28"):
        loop.cache.crop(29)


def test_b51_crop_of_everything_empties_the_cache(model):
    """Also without a record, as a one-token prompt of an assistant needs it."""
    patched(model, "h2o", 14)
    loop, fresh = Loop(model), Loop(model)
    loop.feed(prompt(24))
    loop.cache.crop(-24)
    assert loop.cache.get_seq_length() == 0
    torch.testing.assert_close(loop.feed(prompt(20, 1)), fresh.feed(prompt(20, 1)))
    assert loop.kept() == fresh.kept()


def test_b51_a_batch_can_be_cropped(model):
    """Rows of different lengths, cropped by hand (transformers drafts for single rows only)."""
    patched(model, "h2o", 12)
    batch = left_padded(prompt(20), prompt(9, 1))
    drafting, plain = Loop(model), Loop(model)
    drafting.cache.activate_past_recording()
    for loop in (drafting, plain):
        loop.feed(batch["input_ids"], attention_mask=batch["attention_mask"])
    drafts = torch.cat([prompt(4, 2), prompt(4, 3)])
    drafting.feed(drafts)
    drafting.cache.crop(-2)
    for i in range(2):
        plain.feed(drafts[:, i : i + 1])
    for row in range(2):
        assert drafting.kept(row) == plain.kept(row)


def test_unpatched_models_still_draft(model):
    sparsekv.unpatch(patched(model, "h2o", 12))
    plain = greedy(model, repetitive(), 10)
    drafted = greedy(model, repetitive(), 10, prompt_lookup_num_tokens=3)
    assert drafted.tokens.tolist() == plain.tokens.tolist()
