"""Faults of the field, section 4: positions."""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from rig import EVICTING, POLICIES, Loop, greedy, patched, prompt, slot_scores, tiny_llama

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.policies import H2O, LayerSplit, Streaming


@pytest.mark.parametrize("policy", EVICTING)
def test_b38_queries_sit_at_the_tokens_seen(policy, model):
    """Without position_ids a query's position is what was seen, never what is kept."""
    patched(model, policy, 10)
    given, omitted = Loop(model), Loop(model)
    assert given.cache.get_seq_length() == 0
    start = 0
    for length in (30, 1, 1, 6, 1):
        ids = prompt(length, start)
        positions = torch.arange(start, start + length)[None]
        expected = given.feed(ids, position_ids=positions)
        assert torch.equal(omitted.feed(ids), expected)
        start += length
        assert omitted.cache.get_seq_length() == start
        assert omitted.cache.get_seq_length(2) == start
        assert max(max(head) for layer in omitted.kept() for head in layer) == start - 1


@pytest.mark.parametrize("budget", [3, 4, 5, 12, 20])
def test_b39_contiguous_positions_in_every_layer_and_head(budget):
    """positions="cache": the keys stand at 0 .. n-1 and the query at n-1, at every step."""
    model, policy = tiny_llama(2), Streaming(positions="cache")
    reference = Reference(model, policy, budget)
    loop = Loop(sparsekv.patch(model, policy, budget))
    expected = reference.generate(prompt(26), 12)
    got = loop.generate(prompt(26), 12)
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=0)


def test_b39_more_sinks_than_a_page_holds():
    """The sink keys fill slots one by one while the prompt is short."""
    model, policy = tiny_llama(2), Streaming(sinks=20, positions="cache")
    reference = Reference(model, policy, 24)
    loop = Loop(sparsekv.patch(model, policy, 24))
    expected = reference.generate(prompt(10), 40)
    got = loop.generate(prompt(10), 40)
    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("turns", [(30, 1, 1, 12, 1, 30, 1), (12, 30, 30, 1), (9, 1, 1, 1, 40)])
def test_b39_sinks_that_a_growing_budget_protects_too_late(turns):
    """A tenth of what was seen: two sinks, later three, of which the third is long gone."""
    model, policy = tiny_llama(2), Streaming(sinks=20, positions="cache")
    reference = Reference(model, policy, 0.1)
    loop = Loop(sparsekv.patch(model, policy, 0.1))
    for seed, length in enumerate(turns):
        expected = reference.feed(prompt(length, seed))
        torch.testing.assert_close(loop.feed(prompt(length, seed))[0], expected, atol=1e-4, rtol=0)
        assert loop.kept() == reference.kept()


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_b40_ten_times_the_trained_length(positions):
    """Both documented modes; the rolling one is the published formula far beyond the end."""
    config = {"num_hidden_layers": 1, "max_position_embeddings": 32}
    model, policy = tiny_llama(3, **config), Streaming(positions=positions)
    reference = Reference(model, policy, 24)
    run = greedy(sparsekv.patch(model, policy, 24), prompt(20), 300)
    tokens, logits = reference.generate(prompt(20), 300)
    assert run.logits.isfinite().all()
    assert run.tokens[0].tolist() == tokens
    torch.testing.assert_close(run.logits[:, 0], logits, atol=1e-4, rtol=0)


def test_b40_shifted_and_original_positions_differ(model):
    runs = [
        greedy(sparsekv.patch(model, Streaming(positions=positions), 12), prompt(40))
        for positions in ("original", "cache")
    ]
    assert not torch.allclose(runs[0].logits, runs[1].logits, atol=1e-2)


@pytest.mark.parametrize("policy", [H2O(), LayerSplit(full_layers=0, window_rows=6)])
def test_b41_decode_queries_score_at_their_own_positions(policy, model):
    """What accumulates while decoding is the softmax of each query where it stands."""
    reference = Reference(model, policy, 12)
    loop = Loop(sparsekv.patch(model, policy, 12))
    for step, ids in enumerate(prompt(38).split([24] + [1] * 14, dim=1)):
        reference.feed(ids)
        loop.feed(ids)
        for head in range(2):
            scores = slot_scores(loop.cache, 0, 0, head)
            assert scores == pytest.approx(reference.heads[0][head], abs=1e-5), step


def dynamic_llama():
    """RoPE whose base grows with the length beyond 32 tokens."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return tiny_llama(4, max_position_embeddings=32, rope_parameters=rope)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv", "layersplit"])
def test_b44_dynamic_ntk_scales_by_the_true_length(policy):
    """16 tokens are kept of 48: the base is that of 48 and more."""
    model = dynamic_llama()
    reference = Reference(model, POLICIES[policy], 16)
    run = greedy(patched(model, policy, 16), prompt(48), 10)
    tokens, logits = reference.generate(prompt(48), 10)
    assert run.tokens[0].tolist() == tokens
    torch.testing.assert_close(run.logits[:, 0], logits, atol=1e-4, rtol=0)


def test_b44_dynamic_ntk_cannot_be_shifted():
    model = dynamic_llama()
    with pytest.raises(ValueError, match="dynamic"):
        patched(model, "streaming-cache", 16)
    assert model.config._attn_implementation == "sdpa"


def test_b46_turn_two_stands_after_everything_seen(model):
    """45 tokens, an answer of 10 and 11 more: turn 2 forwards positions 54 .. 65, no more."""
    patched(model, "snapkv", 25)
    first = greedy(model, prompt(45), 10)
    seen = []
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append([*args, *kwargs.values()][1][0].tolist()),
        with_kwargs=True,
    )
    text = torch.cat([first.sequences, prompt(11, 1)], 1)
    greedy(model, text, 3, **{cache_key(model): first.cache})
    handle.remove()
    # The last token of the answer was not fed in turn 1.
    assert seen == [list(range(54, 66)), [66], [67]]
