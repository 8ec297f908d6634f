"""The reference against itself: settings under which two policies have to agree, and counts.

No policy of the library is used, only stand-ins with the fields that were agreed on; the last test
holds the library's policies to those fields.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from contract import FIELDS, stand_in
from reference import Reference
from reference.duo import retrieval_heads
from reference.keyformer import gumbel_noise, temperature
from reference.kvzip import KVzipReference
from reference.noise import gumbel, hashed, uniform
from reference.plans import make_plans
from reference.pruned import PrunedReference
from reference.pyramidinfer import keep_ratio, layer_tokens
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekv.policies import POLICIES

SNAP = stand_in("snapkv", window=4, kernel=3)
SMALL = {
    "knorm": stand_in("knorm"),
    "random": stand_in("random"),
    "tova": stand_in("tova"),
    "scissorhands": stand_in("scissorhands", window=10, recent=3),
    "keyformer": stand_in("keyformer", tau_steps=10),
    "adakv": stand_in("adakv", scorer=SNAP),
    "criticalkv": stand_in("criticalkv", scorer=SNAP),
    "critical-ada": stand_in("criticalkv", scorer=stand_in("adakv", scorer=SNAP)),
    "chunked": stand_in("chunked", scorer=SNAP, chunk=5),
    "expected": stand_in("expected", future=16),
    "keydiff": stand_in("keydiff", block=8),
    "rkv": stand_in("rkv", window=4, kernel=3, buffer=6),
}


def llama(seed=0, **config):
    torch.manual_seed(seed)
    plain = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "initializer_range": 0.25, "eos_token_id": None,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**plain, **config})).eval()


def ids(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 128, (1, length), generator=generator)


def run(policy, budget=12, length=37, steps=10, chunks=None, cls=Reference, **config):
    """(logits of the steps, kept) after a prompt and some steps."""
    reference = cls(llama(**config), policy, budget)
    for chunk in ids(length).split(chunks or length, dim=1):
        reference.feed(chunk)
    logits = [reference.feed(token) for token in ids(steps, 1).split(1, dim=1)]
    return torch.cat(logits), reference.kept()


def same(one, other):
    assert one[1] == other[1]
    torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SMALL)
def test_counts(name):
    """Every layer and head holds what its plan says, from the prompt on."""
    policy = SMALL[name]
    reference = Reference(llama(), policy, 12)
    reference.feed(ids(37))
    plan = make_plans(policy, 12, 3, 37)[0]
    held = plan.left()
    for token in ids(20, 1).split(1, dim=1):
        for layer in reference.kept():
            counts = [len(head) for head in layer]
            assert sum(counts) == held * len(counts)
            assert "ada" in name or counts == [held] * len(counts)
        reference.feed(token)
        held += 1
        if plan.decode != "grow" and held > plan.budget:
            held = plan.budget if plan.low is None else plan.low


@pytest.mark.parametrize("name", SMALL)
def test_a_budget_that_holds_everything_is_dense(name):
    same(run(SMALL[name], 60), run(stand_in("full"), 60))


@pytest.mark.parametrize("name", ["knorm", "random"])
def test_scores_of_keys_alone_do_not_see_chunks(name):
    """The first layer's keys are the same either way, and so is what it keeps of them."""
    once = run(SMALL[name], steps=1)[1][0]
    for chunks in (10, 30):
        assert run(SMALL[name], chunks=chunks, steps=1)[1][0] == once


def test_keyformer_without_noise_is_h2o():
    quiet = stand_in("keyformer", noise="none", tau_end=1.0, recent_fraction=0.5)
    same(run(quiet), run(stand_in("h2o")))


def test_keyformer_heats_up_to_a_limit():
    assert [temperature(1.0, 2.0, 4, step) for step in (0, 1, 4, 9)] == [1.0, 1.25, 2.0, 2.0]


@pytest.mark.parametrize("mode", ["mix", "safeguard"])
def test_adakv_with_a_full_floor_is_its_scorer(mode):
    for scorer in (SNAP, SMALL["expected"], SMALL["random"]):
        same(run(stand_in("adakv", scorer=scorer, floor=1.0, mode=mode)), run(scorer))


def test_adakv_skips_leading_layers():
    same(run(stand_in("adakv", scorer=SNAP, skip=3)), run(SNAP))


def test_criticalkv_in_one_stage_is_its_scorer():
    same(run(stand_in("criticalkv", scorer=SNAP, first_share=1.0)), run(SNAP))
    ada = SMALL["adakv"]
    same(run(stand_in("criticalkv", scorer=ada, first_share=1.0)), run(ada))


def test_chunks_of_one_token_on_one_head_are_the_scorer():
    one = {"num_key_value_heads": 1}
    same(run(stand_in("chunked", scorer=SNAP, chunk=1), **one), run(SNAP, **one))


def test_chunks_stay_whole():
    """Eight free slots: one chunk of five and the newest three of the second best."""
    for layer in run(SMALL["chunked"], steps=1)[1]:
        assert layer[0] == layer[1]
        free = [j for j in layer[0] if j < 33]
        sizes = sorted(sum(j // 5 == c for j in free) for c in {j // 5 for j in free})
        assert sizes in ([3, 5], [3, 2, 3], [2, 3, 3])  # chunk 6 has three free tokens


def test_keydiff_in_one_block_is_one_cut():
    wide = stand_in("keydiff", block=37)
    reference = Reference(llama(), wide, 12)
    reference.feed(ids(37))
    assert [len(head) for layer in reference.kept() for head in layer] == [12] * 6
    narrow = Reference(llama(), SMALL["keydiff"], 12)
    narrow.feed(ids(37))
    assert narrow.kept() != reference.kept()


def test_keydiff_blocks_are_chunks():
    """A prompt in blocks is the prompt fed in those chunks, which change later attention."""
    same(run(SMALL["keydiff"], length=40), run(SMALL["keydiff"], length=40, chunks=8))


def test_tova_holds_one_set_a_layer():
    assert all(layer[0] == layer[1] for layer in run(SMALL["tova"])[1])


def test_scissorhands_drops_blocks():
    plan = make_plans(SMALL["scissorhands"], 12, 1, 37)[0]
    assert (plan.budget, plan.left(), plan.low, plan.recent) == (12, 7, 7, 3)
    plan = make_plans(stand_in("scissorhands", drop=0.01), 12, 1, 37)[0]
    assert (plan.budget, plan.left(), plan.low) == (12, 12, 12)
    assert make_plans(stand_in("scissorhands", drop=1.0), 5, 1, 37)[0].left() == 2
    assert make_plans(stand_in("scissorhands"), 1, 1, 37)[0].left() == 1


def test_duo_of_two_kinds():
    """All heads retrieval: full. All streaming: StreamingLLM. In between: by the quantile."""
    flat = ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6))
    same(run(stand_in("duo", gates=flat, sparsity=0.0)), run(stand_in("full")))
    heads = retrieval_heads(flat, 0.5)
    assert heads == [[False, False], [False, True], [True, True]]
    duo = run(stand_in("duo", gates=flat, sinks=2, recent=6))[1]
    streaming = [[0, 1, *range(41, 47)], [*range(47)]]
    assert duo == [[streaming[full] for full in row] for row in heads]
    cut = run(stand_in("duo", gates=flat, sinks=4, recent=60), budget=6)[1]
    assert cut[0][0] == [0, 1, 2, *range(44, 47)]  # sinks at most half
    tied = retrieval_heads(((0.5, 0.5), (0.5, 0.5)), 0.5)
    assert tied == [[True, True], [False, False]]


def test_quest_keeps_everything_and_attends_pages():
    full = run(stand_in("full"), length=90)
    picked = run(stand_in("quest", dense_layers=1), budget=48, length=90)
    assert picked[1] == full[1] == [[list(range(100))] * 2] * 3
    assert not torch.allclose(picked[0], full[0], atol=1e-4)
    same(run(stand_in("quest", dense_layers=3), budget=48, length=90), full)
    same(run(stand_in("quest", dense_layers=0), budget=112, length=90), full)


def test_rkv_of_importance_alone_is_a_vote():
    """mix = 1 leaves the votes, of which the group's largest logit is SnapKV's for one query."""
    alone = stand_in("rkv", window=4, kernel=3, mix=1.0)
    votes = stand_in("snapkv", window=4, kernel=3)
    config = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32}
    one, other = (Reference(llama(**config), p, 12) for p in (alone, votes))
    one.feed(ids(37)), other.feed(ids(37))
    overlap = [
        len(set(a) & set(b))
        for x, y in zip(one.kept(), other.kept(), strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert min(overlap) >= 8  # they differ in what the softmax runs over only


def test_pruning_with_decay_one_is_dense():
    model, dense = llama(), Reference(llama(), stand_in("full"), 1)
    pruned = PrunedReference(model, stand_in("pyramidinfer", exceed=100), 1.0)
    for chunk in (ids(37), *ids(6, 1).split(1, dim=1)):
        torch.testing.assert_close(pruned.feed(chunk), dense.feed(chunk), atol=1e-5, rtol=0)
    assert pruned.kept() == dense.kept()


def test_pruned_counts():
    """The schedule after the prompt; while decoding windows of `exceed` shrink once each."""
    policy = stand_in("pyramidinfer", min_context=2, sinks=2, exceed=6)
    pruned = PrunedReference(llama(num_hidden_layers=4), policy, 0.5)
    logits = pruned.feed(ids(40))
    held = layer_tokens(4, 40, 8, 0.5, 2)
    assert [len(layer[0]) for layer in pruned.kept()] == held[:4]
    assert len(logits) == held[4]
    for layer in pruned.kept():
        assert layer[0][:2] == [0, 1] and layer[0][-9:] == [*range(31, 40)]
    for step, token in enumerate(ids(14, 1).split(1, dim=1), start=1):
        pruned.feed(token)
        got = [len(layer[0]) for layer in pruned.kept()]
        if step < 14:  # R + exceed tokens have to come
            assert got == [n + step for n in held[:4]]
    keep = [max(int(6 * 0.9 * keep_ratio(layer, 4, 0.1)), 1) for layer in range(4)]
    assert got == [n + 14 - 6 + k for n, k in zip(held[:4], keep, strict=True)]


@pytest.mark.parametrize("uniform", [False, True])
def test_kvzip_keeps_what_the_passes_need(uniform):
    policy = stand_in("kvzip", chunk=16, uniform=uniform)
    reference = KVzipReference(llama(), policy, 12)
    context = ids(40)
    dense = reference.feed(context)[-1]
    passes = [
        (torch.cat([ids(5, start), context[:, start:end]], 1), start, end)
        for start, end in ((4, 20), (20, 36), (36, 40))
    ]
    reference.compress(passes)
    assert reference.cache.get_seq_length() == 40
    counts = [len(head) for layer in reference.kept() for head in layer]
    assert sum(counts) == 12 * 6 and (set(counts) == {12}) == uniform
    assert all(head[:4] == [0, 1, 2, 3] for layer in reference.kept() for head in layer)
    torch.testing.assert_close(
        dense, Reference(llama(), stand_in("full"), 1).feed(context)[-1], atol=1e-5, rtol=0
    )
    before = reference.kept()
    reference.feed(ids(3, 5))
    reference.feed(ids(1, 6))
    grown = [[[*head, *range(40, 44)] for head in layer] for layer in before]
    assert reference.kept() == grown  # questions and answers always stay


def plain_hash(*counter):
    """The chain in Python's own integers."""
    h = 0
    for value in counter:
        h = (h + 0x9E3779B9 * (value + 1)) % 2**32
        h = (h ^ h >> 16) * 0x7FEB352D % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        h ^= h >> 16
    return h


def test_noise_is_a_function_of_its_counter():
    counter = (3, 1, [[0], [5]], [7, 2**31, 2**32 - 1])
    table = [[plain_hash(3, 1, i, j) for j in counter[3]] for (i,) in counter[2]]
    assert hashed(*counter).tolist() == table
    noise = gumbel_noise(3, 1, heads=2, at=[4, 9], seen=6)
    assert noise.shape == (2, 2, 6)
    share = ((plain_hash(3, 1, 1, 9, 5) >> 9) + 0.5) * 2.0**-23
    assert float(noise[1, 1, 5]) == pytest.approx(-math.log(-math.log(share)))


def test_noise_is_gumbel():
    noise = gumbel(3, range(6400))
    assert noise.mean() == pytest.approx(0.5772, abs=0.05)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.1)
    draws = uniform(7, range(4000))
    assert draws.min() > 0 and draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.02)


def test_single_precision_holds_the_noise():
    """23 bits and a half fit fp32; 24 do not, and 1 draw in 2^24 would be log(-log 1)."""
    largest = torch.tensor(2**32 - 1)
    assert float(((largest >> 9).float() + 0.5) * 2.0**-23) < 1.0
    assert float(((largest >> 8).float() + 0.5) * 2.0**-24) == 1.0


@pytest.mark.parametrize("name", FIELDS)
def test_the_library_has_the_agreed_fields(name):
    if name not in POLICIES:
        pytest.skip(f"sparsekv.POLICIES has no {name!r} yet")
    wanted = dict(FIELDS[name])
    if "scorer" in wanted:
        wanted["scorer"] = POLICIES["snapkv"]()
    got = {field.name: field.default for field in dataclasses.fields(POLICIES[name])}
    assert list(got) == list(wanted)
    policy = POLICIES[name]()
    assert {k: getattr(policy, k) for k in wanted} == wanted
