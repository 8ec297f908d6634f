"""Policies that act once, on the prompt: knorm, random, expected, adakv, criticalkv, chunked.

Padding, batches, chunks, turns, pages and masks; what they keep is compared with their formulas
written out on a dense run.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from reference import Reference
from rig import Loop, greedy, kept, left_padded, prompt, tiny_llama
from transformers import DynamicCache

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.policies import (
    AdaKV,
    Chunked,
    CriticalKV,
    Expected,
    Full,
    Knorm,
    Policy,
    Pyramid,
    Random,
    SnapKV,
)

POLICIES: dict[str, Policy] = {
    "knorm": Knorm(),
    "random": Random(seed=3),
    "expected": Expected(),
    "expected-mean": Expected(sinks=0, future=16, epsilon=0.02, covariance=False),
    "adakv": AdaKV(SnapKV(window=8)),
    "adakv-safeguard": AdaKV(SnapKV(window=4), mode="safeguard", normalise=True),
    "adakv-pyramid": AdaKV(Pyramid(window=4, beta=4), floor=0.5),
    "adakv-expected": AdaKV(Expected(epsilon=0.01), mode="safeguard", skip=1),
    "criticalkv": CriticalKV(SnapKV(window=8)),
    "criticalkv-adakv": CriticalKV(AdaKV(SnapKV(window=8))),
    "criticalkv-expected": CriticalKV(Expected(value_norm=False), first_share=0.25),
    "chunked": Chunked(SnapKV(window=8), chunk=5),
    "chunked-random": Chunked(Random(), chunk=7),
}
RAGGED = [name for name, policy in POLICIES.items() if policy.ragged]
# Whose scores are of the key and its position alone, so that chunks change nothing.
QUERY_FREE = ["knorm", "random"]
every_policy = pytest.mark.parametrize("policy", POLICIES)


def patched(policy: str, budget: int | float, seed: int = 0, **kwargs: Any) -> Any:
    return sparsekv.patch(tiny_llama(seed), POLICIES[policy], budget, **kwargs)


@every_policy
def test_in_budget_is_dense_to_the_bit(policy):
    model = tiny_llama()
    dense = greedy(model, prompt(30), 6, **{cache_key(model): DynamicCache()})
    full = greedy(sparsekv.patch(tiny_llama(), Full(), 1), prompt(30), 6)
    run = greedy(patched(policy, 64), prompt(30), 6)
    assert torch.equal(run.logits, full.logits)
    assert run.tokens.tolist() == dense.tokens.tolist()
    assert {len(head) for layer in kept(run.cache) for head in layer} == {35}


@every_policy
@pytest.mark.parametrize("budget", [12, 0.4])
def test_a_padded_batch_is_its_rows_alone(policy, budget):
    rows = [prompt(40, 1), prompt(23, 2), prompt(9, 3)]
    batch = left_padded(*rows)
    run = greedy(
        patched(policy, budget), batch["input_ids"], 6, attention_mask=batch["attention_mask"]
    )
    for i, row in enumerate(rows):
        alone = greedy(patched(policy, budget), row, 6)
        assert run.tokens[i].tolist() == alone.tokens[0].tolist()
        torch.testing.assert_close(run.logits[:, i], alone.logits[:, 0], atol=1e-4, rtol=0)
        pad = 40 - row.shape[1]
        assert kept(run.cache, i) == [
            [[column + pad for column in head] for head in layer] for layer in kept(alone.cache)
        ]


@every_policy
@pytest.mark.parametrize("chunk", [7, 16])
def test_deferred_chunks_keep_what_one_forward_keeps(policy, chunk):
    one = greedy(patched(policy, 20), prompt(58), 4)
    run = greedy(patched(policy, 20, defer_eviction=True), prompt(58), 4, prefill_chunk_size=chunk)
    assert run.tokens.tolist() == one.tokens.tolist()
    assert kept(run.cache) == kept(one.cache)


@every_policy
def test_deferred_chunks_of_a_padded_batch(policy):
    batch = left_padded(prompt(58, 0), prompt(21, 1))
    mask = {"attention_mask": batch["attention_mask"]}
    one = greedy(patched(policy, 20), batch["input_ids"], 4, **mask)
    run = greedy(
        patched(policy, 20, defer_eviction=True), batch["input_ids"], 4,
        prefill_chunk_size=16, **mask,
    )  # fmt: skip
    assert run.tokens.tolist() == one.tokens.tolist()
    assert [kept(run.cache, i) for i in range(2)] == [kept(one.cache, i) for i in range(2)]


@pytest.mark.parametrize("policy", QUERY_FREE)
def test_b52_chunks_without_deferring_keep_the_same_in_the_first_layer(policy):
    """Deeper layers see the evictions of the chunks before, in what they attend."""
    one = kept(greedy(patched(policy, 20), prompt(58), 1).cache)
    run = kept(greedy(patched(policy, 20), prompt(58), 1, prefill_chunk_size=10).cache)
    assert run[0] == one[0]
    if policy == "random":
        assert run == one


@every_policy
def test_chunks_without_deferring_keep_the_planned_number(policy):
    run = kept(greedy(patched(policy, 20), prompt(58), 1, prefill_chunk_size=10).cache)
    if "pyramid" not in policy:
        assert [sum(map(len, layer)) for layer in run] == [40, 40, 40]
    assert sum(len(head) for layer in run for head in layer) == 120


@every_policy
def test_three_turns_hold_the_planned_total(policy):
    loop = Loop(patched(policy, 14, seed=5))
    grown = 0
    for turn, length in enumerate((30, 7, 19)):
        token = loop.feed(prompt(length, turn))[:, -1:].argmax(-1)
        assert sum(len(head) for layer in loop.kept() for head in layer) == 14 * 6
        for grown in range(1, 4):
            token = loop.feed(token)[:, -1:].argmax(-1)
            held = sum(len(head) for layer in loop.kept() for head in layer)
            assert held == (14 + grown) * 6
    loop.cache.state.stores[0].validate()


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("policy", RAGGED)
def test_b29_ragged_heads_free_real_pages(policy, page_size):
    model = patched(policy, 40, page_size=page_size)
    cache = greedy(model, prompt(200), 1).cache
    counts = [len(head) for layer in kept(cache) for head in layer]
    assert len(set(counts)) > 1 and sum(counts) == 40 * 6
    report = cache.report()
    pages = sum(-(-count // page_size) for count in counts)
    assert report.pages_used == pages
    assert report.pages_used * 2 * page_size * 16 * 4 <= report.kv_bytes
    (store,) = cache.state.stores
    # What exists beside the pages in use was reserved before heads knew their share.
    assert store.pool.num_pages <= max(pages, 6 * -(-40 // page_size)) + 1


@every_policy
def test_b30_every_step_is_dense_attention_under_the_mask_of_what_is_kept(policy):
    """A prompt, steps, a second turn, steps: the reference is told what is kept."""
    model = tiny_llama(2)
    reference = Reference(model, Full(), 1)
    loop = Loop(sparsekv.patch(model, POLICIES[policy], 10))
    for turn, length in enumerate((45, 17)):
        ids = prompt(length, turn)
        for _ in range(6):
            expected, got = reference.feed(ids), loop.feed(ids)[0]
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
            for layer, heads in enumerate(loop.kept()):
                reference.heads[layer] = [dict.fromkeys(head, 0.0) for head in heads]
            ids = expected[-1:].argmax(-1, keepdim=True)


# ---------------------------------------------------------------------- formulas


class Dense:
    """Queries before RoPE, keys, values and W_O of every layer of a dense prompt, in float64."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        hidden: list[torch.Tensor] = []
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: hidden.append(kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for layer in model.model.layers
        ]
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=ids, **{cache_key(model): cache})
        for hook in hooks:
            hook.remove()
        self.tokens, self.layers = ids.shape[1], []
        self.theta = model.config.rope_parameters["rope_theta"]
        for layer, x, kv in zip(model.model.layers, hidden, cache.layers, strict=True):
            q = layer.self_attn.q_proj(x)[0].unflatten(-1, (4, 16)).transpose(0, 1)
            w_o = layer.self_attn.o_proj.weight.T.unflatten(0, (4, 16))  # [HQ, D, D_model]
            self.layers.append([t.detach().double() for t in (q, kv.keys[0], kv.values[0], w_o)])

    def mean_rotation(self, first: int, count: int) -> torch.Tensor:
        """The mean of R_p, [D, D]."""
        matrices = torch.zeros(count, 16, 16, dtype=torch.float64)
        for i in range(8):
            angle = (first + torch.arange(count)) * self.theta ** (-i / 8)
            matrices[:, i, i] = matrices[:, 8 + i, 8 + i] = angle.cos().double()
            matrices[:, i, 8 + i], matrices[:, 8 + i, i] = -angle.sin(), angle.sin()
        return matrices.mean(0)

    def expected(self, layer: int, policy: Expected) -> torch.Tensor:
        """p_j + epsilon, times |v_j| if wanted: [HK, T]."""
        q, k, v, _ = self.layers[layer]
        turn, s = self.mean_rotation(self.tokens, policy.future), policy.sinks
        p = torch.zeros(4, self.tokens, dtype=torch.float64)
        for h in range(4):
            own, keys = q[h, s:], k[h // 2]
            z = keys @ turn @ own.mean(0) / 4
            if policy.covariance:
                sigma = turn @ own.T.cov(correction=0) @ turn.T
                z += torch.einsum("jd,de,je->j", keys, sigma, keys) / 32
            p[h, s:] = z[s:].softmax(-1)
        score = p.unflatten(0, (2, 2)).mean(1) + policy.epsilon
        return score * v.norm(dim=-1) if policy.value_norm else score

    def projected(self, layer: int) -> torch.Tensor:
        """mean_h |v_j W_O^(h)|_1: [HK, T]."""
        _, _, v, w_o = self.layers[layer]
        norms = [(v[h // 2] @ w_o[h]).abs().sum(-1) for h in range(4)]
        return torch.stack(norms).unflatten(0, (2, 2)).mean(1)


def best(score: torch.Tensor, keep: int, safe: set[int]) -> list[int]:
    order = sorted(set(range(len(score))) - safe, key=lambda j: (-score[j].item(), -j))
    return sorted(safe | set(order[: keep - len(safe)]))


def check_best(got: list[int], score: torch.Tensor, keep: int, safe: set[int]) -> None:
    """`got` are the best, but for scores that fp32 cannot tell apart."""
    assert len(set(got)) == keep and safe <= set(got)
    expected = best(score, keep, safe)
    for wrong in set(got) ^ set(expected):
        last = min(score[j].item() for j in set(expected) - safe)
        assert score[wrong].item() == pytest.approx(last, rel=1e-4)


@pytest.mark.parametrize("policy", ["expected", "expected-mean"])
def test_expected_attention_is_its_formula(policy):
    chosen, ids = POLICIES[policy], prompt(60, 4)
    dense = Dense(tiny_llama(4), ids)
    run = kept(greedy(patched(policy, 15, seed=4), ids, 1).cache)
    safe = set(range(chosen.sinks))
    for layer in range(3):
        for head, score in zip(run[layer], dense.expected(layer, chosen), strict=True):
            check_best(head, score, 15, safe)


def test_criticalkv_is_its_formula():
    chosen, ids = POLICIES["criticalkv-expected"], prompt(60, 4)
    dense = Dense(tiny_llama(4), ids)
    run = kept(greedy(patched("criticalkv-expected", 16, seed=4), ids, 1).cache)
    for layer in range(3):
        scores, norms = dense.expected(layer, chosen.scorer), dense.projected(layer)
        for head in range(2):
            first = best(scores[head], 4 + 3, set(range(4)))  # a quarter of 12
            second = (scores[head] + 1e-4) * norms[head]
            check_best(run[layer][head], second, 16, set(first))


def test_knorm_is_its_formula():
    dense = Dense(tiny_llama(4), prompt(60, 4))
    run = kept(greedy(patched("knorm", 15, seed=4), prompt(60, 4), 1).cache)
    for layer in range(3):
        for head, norms in zip(run[layer], dense.layers[layer][1].norm(dim=-1), strict=True):
            check_best(head, -norms, 15, set())


@pytest.mark.parametrize("policy", ["chunked", "chunked-random"])
def test_chunked_keeps_one_set_a_layer(policy):
    chosen = POLICIES[policy]
    run = kept(greedy(patched(policy, 25), prompt(90), 1).cache)
    for heads in run:
        assert heads[0] == heads[1] and len(heads[0]) == 25
        window = 8 if policy == "chunked" else 0
        chunks = [j // chosen.chunk for j in heads[0] if j < 90 - window]
        size = {c: min(chosen.chunk, 90 - window - c * chosen.chunk) for c in chunks}
        assert sum(chunks.count(c) < size[c] for c in size) <= 1  # all but one are whole


def test_expected_attention_of_a_later_turn_is_of_its_own_queries():
    """After a decode step the moments start anew; between the chunks of a prompt they do not."""
    loop = Loop(patched("expected", 10))
    loop.feed(prompt(20))
    loop.feed(prompt(9, 1))
    (moments,) = loop.cache.state.moments[0].values()
    assert moments.count.tolist() == [29 - 4]
    loop.feed(torch.tensor([[5]]))
    assert not loop.cache.state.moments
    loop.feed(prompt(7, 2))
    (moments,) = loop.cache.state.moments[0].values()
    assert moments.count.tolist() == [7]
    assert not greedy(patched("expected", 10), prompt(20), 1).cache.state.moments


def test_prompts_not_longer_than_the_sinks():
    for tokens, budget in ((1, 1), (3, 8), (4, 2), (5, 1)):
        run = greedy(patched("expected", budget), prompt(tokens), 2)
        assert [len(head) for layer in kept(run.cache) for head in layer] == [
            min(tokens, budget) + 1
        ] * 6


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize("policy", ["expected", "criticalkv-adakv", "chunked"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "qwen2-mixed", "phi3", "granite"])
def test_families(family, policy):
    if family not in FAMILIES:
        pytest.skip("not among the families")
    model = sparsekv.patch(build(family), POLICIES[policy], 12)
    one = greedy(model, prompt(40), 4)
    batch = left_padded(prompt(40), prompt(21, 1))
    run = greedy(model, batch["input_ids"], 4, attention_mask=batch["attention_mask"])
    assert run.tokens[0].tolist() == one.tokens[0].tolist()
    governed = list(one.cache.state.ordinal)
    assert sum(len(kept(one.cache)[i][h]) for i in governed for h in range(2)) == len(
        governed
    ) * 2 * (12 + 3)


class Packed(torch.nn.Module):
    """A projection whose weight is packed."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight = linear, linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_projection_that_cannot_be_read_is_refused():
    for spoil, reason in (
        (lambda o: Packed(o), "expected nn.Linear in o_proj of layer 1 .*got Packed"),
        (lambda o: torch.nn.Linear(32, 64, bias=False), r"expected a weight \[D_model, 64\]"),
        (lambda o: o.to(torch.float8_e4m3fn), "expected a floating-point weight"),
    ):
        model = tiny_llama()
        attention = model.model.layers[1].self_attn
        attention.o_proj = spoil(attention.o_proj)
        with pytest.raises(ValueError, match=reason):
            sparsekv.patch(model, CriticalKV(), 8)
        assert "_sparsekv_patch" not in vars(model)
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.o_proj = Packed(attention.o_proj)
    greedy(sparsekv.patch(model, SnapKV(), 8), prompt(20), 2)  # it needs no projection
    model = build("gpt_neox") if "gpt_neox" in FAMILIES else None
    if model is not None:
        with pytest.raises(ValueError, match=r"expected self_attn[.]o_proj in every full"):
            sparsekv.patch(model, CriticalKV(), 8)


def test_rope_that_cannot_be_undone_is_refused():
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="to undo the rotation of queries, got 'dynamic'"):
        sparsekv.patch(model, Expected(), 8)
    greedy(sparsekv.patch(model, Knorm(), 8), prompt(20), 2)


def test_one_set_a_layer_is_refused_on_a_sharded_model(monkeypatch):
    monkeypatch.setattr("sparsekv.hf.patch.tp_size", lambda model: 2)
    with pytest.raises(
        ValueError, match="policy 'chunked', which has to know all heads of a layer"
    ):
        sparsekv.patch(tiny_llama(), Chunked(), 8)
    sparsekv.patch(tiny_llama(), AdaKV(), 8)


def test_copies_share_the_projections_and_pickles_leave_them():
    loop = Loop(patched("criticalkv", 10))
    loop.feed(prompt(20))
    clone = copy.deepcopy(loop.cache)
    assert clone.state.parts.projections is loop.cache.state.parts.projections
    weight = loop.model.model.layers[1].self_attn.o_proj.weight
    assert loop.cache.state.parts.projections[1].data_ptr() == weight.data_ptr()
    bare = pickle.loads(pickle.dumps(loop.cache.state.parts))
    with pytest.raises(ValueError, match="expected the output projection of layer 1"):
        bare.projections[1]
    model = copy.deepcopy(loop.model)
    weights = sparsekv.new_cache(model).state.parts.projections
    assert weights[1].data_ptr() == model.model.layers[1].self_attn.o_proj.weight.data_ptr()


@every_policy
def test_beams_and_assistants(policy):
    """Beams are rescored under the same cache; an assistant changes nothing."""
    model = patched(policy, 14, seed=6)
    run = greedy(model, prompt(40), 8)
    assisted = greedy(model, prompt(40), 8, assistant_model=tiny_llama(6))
    assert assisted.tokens.tolist() == run.tokens.tolist()
    out = model.generate(
        prompt(40), attention_mask=torch.ones(1, 40), max_new_tokens=5, num_beams=3,
        do_sample=False, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    loop, score, ids = Loop(model), 0.0, prompt(40)
    for token in out.sequences[0, 40:].tolist():
        score += loop.feed(ids)[0, -1].log_softmax(-1)[token].item()
        ids = torch.tensor([[token]])
    assert out.sequences_scores[0].item() == pytest.approx(score / 5, abs=1e-4)
