"""PyramidInfer through a model: against a model run layer by layer, its work, its refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from families import build
from rig import Loop, greedy, kept, prompt, tiny_llama
from torch.utils.flop_counter import FlopCounterMode

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.hf.traced import CompiledForward
from sparsekv.policies import PyramidInfer
from sparsekv.pruning import cut_due
from sparsekv.steady import advance, hold

LAYERS = 4


def policy(**changes):
    small = {"decay": 0.5, "sinks": 2, "min_context": 2, "exceed": 6}
    return PyramidInfer(**{**small, **changes})


def llama(seed=0):
    return tiny_llama(seed, num_hidden_layers=LAYERS)


class LayerByLayer:
    """The paper on a Llama: one row, full matrices, hidden states gathered by hand."""

    def __init__(self, model, chosen, counts):
        self.inner, self.head, self.policy, self.counts = model.model, model.lm_head, chosen, counts
        self.k, self.v, self.places = {}, {}, [[] for _ in counts]

    def projected(self, layer, x, places):
        attention = self.inner.layers[layer].self_attn
        shape = (x.shape[0], -1, attention.head_dim)
        q, k, v = (
            getattr(attention, name)(x).view(shape).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        cos, sin = (t[0] for t in self.inner.rotary_emb(x[None], torch.tensor([places])))

        def turned(t):
            low, high = t.chunk(2, -1)
            return t * cos + torch.cat([-high, low], -1) * sin

        return turned(q), turned(k), v

    @torch.no_grad()
    def feed(self, ids, places):
        """Logits of the last token of ids [T] at places."""
        hidden, prompt_of = self.inner.embed_tokens(ids), len(places) > 1
        for layer, block in enumerate(self.inner.layers):
            q, k, v = self.projected(layer, block.input_layernorm(hidden), places)
            if not prompt_of:
                k, v = torch.cat([self.k[layer], k], 1), torch.cat([self.v[layer], v], 1)
            self.k[layer], self.v[layer] = k, v
            self.places[layer] += places
            group, n = q.shape[0] // k.shape[0], len(places)
            logits = q @ k.repeat_interleave(group, 0).transpose(-1, -2) / q.shape[-1] ** 0.5
            seen = torch.ones(n, k.shape[1], dtype=torch.bool).tril(k.shape[1] - n)
            probs = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            out = (probs @ v.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
            hidden = hidden + block.self_attn.o_proj(out)
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
            if prompt_of and layer + 1 < LAYERS:
                tail = self.policy.tail(len(ids))
                context = n - tail
                rows = probs.mean(0)[-tail:, :context]
                scores = self.policy.weights(tail) @ rows
                scores[: self.policy.sinks] = torch.inf
                best = scores.topk(self.counts[layer + 1] - tail).indices.sort().values.tolist()
                left = [*best, *range(context, n)]
                hidden, places = hidden[left], [places[i] for i in left]
        return self.head(self.inner.norm(hidden[-1]))


@pytest.mark.parametrize("tokens", [40, 57])
@pytest.mark.parametrize("chosen", [policy(), policy(sinks=0, distance_weight=3.0, interval=2)])
def test_a_prompt_is_the_model_run_layer_by_layer(tokens, chosen):
    model, ids = llama(), prompt(tokens)
    counts = chosen.layer_tokens(LAYERS, tokens, 12)
    reference = LayerByLayer(copy.deepcopy(model), chosen, counts)
    expected = reference.feed(ids[0], list(range(tokens)))
    loop = Loop(sparsekv.patch(model, chosen, 12))
    logits = loop.feed(ids)
    torch.testing.assert_close(logits[0, -1], expected, atol=1e-4, rtol=1e-4)
    assert loop.kept() == [[places] * 2 for places in reference.places]
    assert [len(places[0]) for places in loop.kept()] == list(counts)
    seen = torch.tensor([t in reference.places[-1] for t in range(tokens)])
    assert logits[0, seen].isfinite().all() and logits[0, ~seen].isnan().all()
    loop.cache.state.stores[0].validate()
    for step in range(5):  # before any cut a step is dense over what each layer holds
        token = int(expected.argmax())
        expected = reference.feed(torch.tensor([token]), [tokens + step])
        got = loop.feed(torch.tensor([[token]]))[0, -1]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_generated_tokens_are_cut_in_windows():
    """Each window once; the prompt stays, but for its last token, which is in the first window."""
    chosen, tokens = policy(), 40
    loop = Loop(sparsekv.patch(llama(), chosen, 12))
    loop.feed(prompt(tokens))
    before = [set(heads[0]) for heads in loop.kept()]
    recent = chosen.tail(tokens) - 1
    for step in range(1, 40):
        loop.feed(prompt(1, seed=step))
        windows = max(0, (step - recent) // chosen.exceed)
        for layer, heads in enumerate(loop.kept()):
            assert heads[0] == heads[1]
            held = set(heads[0])
            assert before[layer] - {tokens - 1} <= held
            edge = tokens - 1 + windows * chosen.exceed
            assert set(range(edge, tokens + step)) <= held
            for window in range(windows):
                start = tokens - 1 + window * chosen.exceed
                left = held & set(range(start, start + chosen.exceed))
                assert len(left) == chosen.generated(layer, LAYERS)
    loop.cache.state.stores[0].validate()


def test_a_prompt_costs_what_its_layers_see():
    """FLOPs of all projections and MLPs are those of sum(counts) tokens; the budget pays for it."""
    model, ids = llama(), prompt(400)
    chosen = PyramidInfer(min_context=0)
    counts = chosen.layer_tokens(LAYERS, 400, 360)
    assert LAYERS * 359 < sum(counts) <= LAYERS * 360

    def flops():
        """FLOPs of all linear layers in a prompt's generate."""
        with FlopCounterMode(display=False) as counter:
            greedy(model, ids, 1)
        return counter.get_flop_counts()["Global"][torch.ops.aten.mm]

    dense = flops()
    sparsekv.patch(model, chosen, 360)
    pruned = flops()
    head = 2 * 64 * 128  # the last token's logits
    assert (pruned - head) * LAYERS * 400 == (dense - head) * sum(counts)


@pytest.mark.parametrize("budget", [40, 1.0, 1000])
@pytest.mark.parametrize("decay", [None, 0.2])
def test_within_the_budget_a_prompt_is_dense(budget, decay, model):
    ids = prompt(40)
    dense = greedy(model, ids, 8)
    sparsekv.patch(model, policy(decay=decay), budget)
    run = greedy(model, ids, 8)
    assert torch.equal(run.tokens, dense.tokens)
    full = greedy(sparsekv.patch(model, "full"), ids, 1)
    assert torch.equal(run.logits[0], full.logits[0])


@pytest.mark.parametrize("chosen", [policy(), PyramidInfer(min_context=0, exceed=6)])
def test_rows_of_a_batch_are_those_of_single_prompts(chosen):
    """The rows drop different tokens; their counts are the same."""
    model = sparsekv.patch(llama(), chosen, 40)
    rows = [prompt(44, seed) for seed in (1, 2, 3)]
    together = greedy(model, torch.cat(rows), 24)
    for i, row in enumerate(rows):
        alone = greedy(model, row, 24)
        assert torch.equal(together.tokens[i], alone.tokens[0])
        torch.testing.assert_close(together.logits[:, i], alone.logits[:, 0], atol=1e-4, rtol=1e-4)
        assert kept(together.cache, i) == kept(alone.cache)
    assert kept(together.cache, 0) != kept(together.cache, 1)


def test_a_second_prompt_knows_nothing_of_the_first(model):
    sparsekv.patch(model, policy(), 12)
    cache = sparsekv.new_cache(model)
    fresh = greedy(model, prompt(50, 5), 20)
    loop = Loop(model, cache)
    loop.generate(prompt(33, 6), 20)
    cache.reset()
    assert loop.generate(prompt(50, 5), 20)[0] == fresh.tokens[0].tolist()
    assert greedy(model, prompt(50, 5), 20).tokens.tolist() == fresh.tokens.tolist()


def test_memory_is_what_the_layers_see():
    model = sparsekv.patch(llama(), PyramidInfer(min_context=0), 0.9)
    report = greedy(model, prompt(400), 1).cache.report()
    counts = PyramidInfer(min_context=0).layer_tokens(LAYERS, 400, 360)
    assert [layer.mean for layer in report.layers] == list(counts)
    assert report.pages_used == 2 * sum(-(-n // 16) for n in counts) and report.ratio < 0.95


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_steady_steps_equal_ordinary_steps(kv_dtype):
    """Cuts come between steps that could be captured; those append and add rows only."""
    model = sparsekv.patch(llama(), policy(), 12, kv_dtype=kv_dtype)
    ordinary, steady = Loop(model), Loop(model)
    for loop in (ordinary, steady):
        loop.feed(prompt(40))
    ids = prompt(30, seed=9)
    for i in range(30):
        if i in (1, 16):
            hold(steady.cache.state, 15 if i == 1 else 20)
        expected = ordinary.feed(ids[:, i : i + 1])
        state = steady.cache.state
        state.capturing = True
        got = steady.feed(ids[:, i : i + 1])
        state.capturing = False
        before = [
            (store.block_table.clone(), store.pool.k_pages.data_ptr()) for store in state.stores
        ]
        cut_due(state)
        for store, (table, memory) in zip(state.stores, before, strict=True):
            assert i < 1 or torch.equal(store.block_table, table)
            assert store.pool.k_pages.data_ptr() == memory
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert kept(steady.cache) == kept(ordinary.cache)


def test_a_replayed_step_is_counted_and_cut():
    """What `advance` and `cut_due` leave on the host is what a step leaves."""
    loop = Loop(sparsekv.patch(llama(), policy(), 12))
    loop.feed(prompt(40))
    hold(loop.cache.state, 30)
    for token in prompt(30, seed=9)[0]:
        counted = copy.deepcopy(loop.cache.state)
        advance(counted)
        cut_due(counted)
        loop.feed(token.view(1, 1))
        assert (counted.stores[0].lens == loop.cache.state.stores[0].lens).all()


def test_a_traced_step_equals_an_ordinary_one():
    """The hooks of the layers are no obstacle to compile="decode"."""
    model = sparsekv.patch(llama(), policy(), 12, compile="decode")
    loops, step = [Loop(model), Loop(model)], CompiledForward("aot_eager")
    for loop in loops:
        loop.feed(prompt(40))
    for i, token in enumerate(prompt(16, seed=9)[0]):
        inputs = {"input_ids": token.view(1, 1), "position_ids": torch.tensor([[40 + i]])}
        with torch.no_grad():
            traced = step.step(model, inputs, loops[1].cache)
        expected = loops[0].feed(token.view(1, 1))
        torch.testing.assert_close(traced.logits, expected, atol=2e-5, rtol=2e-5)
    assert loops[0].kept() == loops[1].kept()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "granite", "mixtral", "olmo2"])
def test_families_lose_hidden_states(family):
    """In every family rows and counts are as planned, and nothing is left on the model."""
    model = build(family)
    plain = copy.deepcopy(model)
    sparsekv.patch(model, policy(), 12)
    run = greedy(model, prompt(40), 4)
    counts = policy().layer_tokens(LAYERS, 40, 12)
    assert [layer.max for layer in run.cache.report().layers] == [n + 3 for n in counts]
    sparsekv.unpatch(model)
    assert model.__dict__.keys() == plain.__dict__.keys()
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.model.layers)
    assert torch.equal(greedy(model, prompt(40), 4).tokens, greedy(plain, prompt(40), 4).tokens)


def test_other_caches_and_copies_of_the_model():
    """A dense cache is dense under the hooks; a copy of a patched model can be patched anew."""
    model, plain = sparsekv.patch(llama(), policy(), 12), llama()
    expected = Loop.dense(plain).feed(prompt(40))
    torch.testing.assert_close(Loop.dense(model).feed(prompt(40)), expected, atol=1e-5, rtol=1e-5)
    other = copy.deepcopy(model)
    assert torch.equal(greedy(other, prompt(40)).tokens, greedy(model, prompt(40)).tokens)
    sparsekv.patch(other, "full")
    assert torch.equal(greedy(other, prompt(40)).tokens, greedy(plain, prompt(40)).tokens)
    run = greedy(model, prompt(40), 1)
    assert run.cache.report().layers[-1].max == policy().layer_tokens(LAYERS, 40, 12)[-1]


def test_what_cannot_be_right_is_refused(model):
    sparsekv.patch(model, policy(), 12)
    ids, name = prompt(40), cache_key(model)
    mask = torch.ones_like(ids).expand(2, -1).clone()
    mask[0, :3] = 0
    with pytest.raises(ValueError, match=r"rows of one length without padding .* got \[37, 40\]"):
        greedy(model, ids.expand(2, -1), attention_mask=mask)
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match=r"allows \w+ generation, got 'pyramidinfer': "):
            greedy(model, ids, **options)
    with pytest.raises(ValueError, match="got a part of a prompt, a second turn or drafts"):
        greedy(model, ids, prefill_chunk_size=15)
    first = greedy(model, ids)
    turn = torch.cat([first.sequences, prompt(7, 3)], 1)
    with pytest.raises(ValueError, match="got a part of a prompt, a second turn or drafts"):
        greedy(model, turn, **{name: first.cache})
    with pytest.raises(ValueError, match="expected compile=False or 'decode'"):
        sparsekv.patch(model, policy(), 12, compile=True)
    assert greedy(model, ids).tokens.tolist() == first.tokens.tolist()
    sparsekv.patch(model, PyramidInfer(), 12)
    with pytest.raises(
        ValueError,
        match=r"expected a budget of at least 40 tokens a layer for a prompt of 40, got 12",
    ):
        greedy(model, ids)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3"])
def test_models_with_windows_are_refused(family):
    model = build(family)
    before = (model.config._attn_implementation, set(model.__dict__))
    with pytest.raises(ValueError, match="full-attention layers only to prune hidden states"):
        sparsekv.patch(model, policy(), 12)
    assert (model.config._attn_implementation, set(model.__dict__)) == before


def test_row_weights_are_made_once_a_prompt(monkeypatch):
    """Several layers prune; none waits for an upload of its own."""
    made, weights = [], PyramidInfer.weights

    def counted(self, rows):
        made.append(rows)
        return weights(self, rows)

    monkeypatch.setattr(PyramidInfer, "weights", counted)
    model = sparsekv.patch(llama(), policy(), 10)
    made.clear()
    for tokens in (30, 40):
        greedy(model, prompt(tokens), new=2)
    assert made == [policy().tail(tokens) for tokens in (30, 40)]
