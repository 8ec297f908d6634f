"""Wrappers around scorers: each pair equals the reference or is refused, for rows and for heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rig import Loop, greedy, kept, left_padded, prompt, tiny_llama
from zoo import GROUPS, SCORERS, WRAPPERS, check, held_to, may_wrap, truth, wrapped

import sparsekv

pytestmark = pytest.mark.filterwarnings("ignore:pyramid gives all")
pairs = pytest.mark.parametrize(
    ("wrapper", "scorer"), [(wrapper, scorer) for wrapper in WRAPPERS for scorer in SCORERS]
)


@pairs
@pytest.mark.parametrize("heads", GROUPS)
def test_groups_of_heads(wrapper, scorer, heads):
    model = tiny_llama(9, num_hidden_layers=2, **GROUPS[heads])
    with held_to(may_wrap(wrapper, scorer)):
        policy = wrapped(wrapper, scorer, 2, model.config.num_key_value_heads)
        loop = Loop(sparsekv.patch(model, policy, 11))
        reference = truth(model, policy, 11)
        token = check(reference, loop, prompt(30, 9))
        for _ in range(4):
            token = check(reference, loop, token)


@pairs
def test_rows_and_turns(wrapper, scorer):
    """A padded batch of two, a second turn on the same cache; each row as if alone."""
    if may_wrap(wrapper, scorer) == "refused":
        pytest.skip("refused, see test_groups_of_heads")
    policy = wrapped(wrapper, scorer)
    model = sparsekv.patch(tiny_llama(10), policy, 11)
    rows, questions = [prompt(33), prompt(21, 1)], [prompt(7, 2), prompt(7, 3)]
    batch = left_padded(*rows)
    run = greedy(model, batch["input_ids"], 3, attention_mask=batch["attention_mask"])
    loop = Loop(model)
    mask = batch["attention_mask"]
    loop.feed(batch["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0))
    mask = torch.cat([mask, torch.ones(2, 7, dtype=torch.long)], 1)
    logits = loop.feed(
        torch.cat(questions), attention_mask=mask, position_ids=(mask.cumsum(-1) - 1)[:, -7:]
    )
    for i, ids in enumerate(rows):
        alone, reference = greedy(model, ids, 3), truth(tiny_llama(10), policy, 11)
        pad = 33 - ids.shape[1]
        assert run.tokens[i].tolist() == alone.tokens[0].tolist()
        shifted = [[[j + pad for j in head] for head in layer] for layer in kept(alone.cache)]
        assert kept(run.cache, i) == shifted
        reference.feed(ids)
        torch.testing.assert_close(logits[i], reference.feed(questions[i]), atol=1e-4, rtol=0)
        shifted = [[[j + pad for j in head] for head in layer] for layer in reference.kept()]
        assert loop.kept(i) == shifted


@pytest.mark.parametrize("scorer", ["snapkv", "pyramid", "expected"])
@pytest.mark.parametrize(
    "settings",
    [{"mode": "safeguard"}, {"normalise": True}, {"floor": 0.5}, {"floor": 0.0}, {"skip": 1}],
    ids=str,
)
def test_settings_of_adakv(scorer, settings):
    model, policy = tiny_llama(11), replace(wrapped("adakv", scorer), **settings)
    loop, reference = Loop(sparsekv.patch(model, policy, 11)), truth(model, policy, 11)
    token = check(reference, loop, prompt(35, 11))
    for _ in range(3):
        token = check(reference, loop, token)
    check(reference, loop, prompt(6, 12))


@pytest.mark.parametrize("scorer", ["snapkv", "random"])
@pytest.mark.parametrize("settings", [{"first_share": 0.0}, {"first_share": 1.0}], ids=str)
def test_settings_of_criticalkv(scorer, settings):
    model, policy = tiny_llama(12), replace(wrapped("criticalkv", scorer), **settings)
    loop, reference = Loop(sparsekv.patch(model, policy, 11)), truth(model, policy, 11)
    check(reference, loop, prompt(35, 12))


@pytest.mark.parametrize("chunk", [1, 3, 20, 100])
@pytest.mark.parametrize("scorer", ["snapkv", "pyramid", "knorm"])
def test_settings_of_chunked(scorer, chunk):
    model, policy = tiny_llama(13), replace(wrapped("chunked", scorer), chunk=chunk)
    loop, reference = Loop(sparsekv.patch(model, policy, 11)), truth(model, policy, 11)
    token = check(reference, loop, prompt(35, 13))
    check(reference, loop, token)
    check(reference, loop, prompt(8, 14))
