"""Gates of DuoAttention measured on text, against explicit masks in float64."""

from __future__ import annotations

import math

import pytest
import torch
from families import build
from rig import Loop, greedy, kept, prompt, tiny_llama
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import sparsekv
from sparsekv.policies import Duo

SINKS, RECENT = 3, 5


def explicit_gates(model, texts: list[Tensor], sinks: int, recent: int) -> Tensor:
    """The formula, layer by layer, from the model's own queries, keys and values."""
    sums: dict[int, list[Tensor]] = {}

    def attention(module, q, k, v, mask, **kwargs):
        q, k, v = q[0].double(), k[0].double(), v[0].double()
        group, tokens = len(q) // len(k), q.shape[1]
        i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
        dense = j <= i
        streaming = dense & ((j < sinks) | (i - j < recent))
        logits = q @ k.repeat_interleave(group, 0).transpose(1, 2) * q.shape[-1] ** -0.5
        values = v.repeat_interleave(group, 0)
        outs = [
            logits.masked_fill(~visible, -math.inf).softmax(-1) @ values
            for visible in (dense, streaming)
        ]
        late = slice(sinks + recent, None)
        both = [
            x[:, late].square().sum((1, 2)).view(len(k), group).sum(1)
            for x in (outs[0] - outs[1], outs[0])
        ]
        sums.setdefault(module.layer_idx, []).append(torch.stack(both))
        return outs[0].transpose(0, 1)[None].to(
            mask.dtype if mask is not None else torch.float32
        ), None

    AttentionInterface.register("explicit", attention)
    AttentionMaskInterface.register("explicit", lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation("explicit")
    with torch.no_grad():
        for ids in texts:
            model(ids)
    model.set_attn_implementation(before)
    totals = torch.stack([torch.stack(sums[layer]).sum(0) for layer in sorted(sums)])
    return totals[:, 0] / totals.sum(1)


@pytest.mark.parametrize("sinks", [SINKS, 0])
def test_gates_are_those_of_the_formula(sinks):
    model, texts = tiny_llama(3), [prompt(40, 1), prompt(23, 2)]
    expected = explicit_gates(model, texts, sinks, RECENT)
    policy = sparsekv.calibrate_duo(model, texts, sinks=sinks, recent=RECENT, sparsity=0.25)
    torch.testing.assert_close(torch.tensor(policy.gates).double(), expected, atol=1e-5, rtol=1e-4)
    assert (policy.sparsity, policy.sinks, policy.recent) == (0.25, sinks, RECENT)
    assert expected.min() > 0.01 and expected.max() < 1.0


def test_a_head_that_misses_nothing_streams():
    """Nothing that KV head 0 does not see could have changed what it says."""
    model = tiny_llama(5)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data[:16] = 0.0
    policy = sparsekv.calibrate_duo(model, [prompt(40, 1)], sinks=SINKS, recent=RECENT)
    assert all(gates[0] == 0.0 < gates[1] for gates in policy.gates)
    assert policy.retrieval_heads() == ((False, True),) * 3


def test_the_model_is_left_as_it_was():
    model = tiny_llama()
    before = greedy(model, prompt(20)).tokens
    model.train()
    sparsekv.calibrate_duo(model, prompt(40)[0][None], sinks=SINKS, recent=RECENT)
    assert model.training and not hasattr(model, "_sparsekv_patch")
    assert torch.equal(greedy(model.eval(), prompt(20)).tokens, before)
    sparsekv.patch(model, "streaming", 8)
    sparsekv.calibrate_duo(model, [prompt(40)], sinks=SINKS, recent=RECENT)
    assert len(kept(greedy(model, prompt(20)).cache)[0][0]) == 8


def test_gates_serve():
    model = tiny_llama()
    policy = sparsekv.calibrate_duo(model, [prompt(60)], sinks=2, recent=6)
    loop = Loop(sparsekv.patch(model, policy, 64))
    loop.feed(prompt(40))
    held = loop.cache.state.stores[0].lens[:, 0]
    assert sorted(held.flatten().tolist()) == [8, 8, 8, 40, 40, 40]


def test_sliding_layers_have_no_gates():
    model = build("gemma3")
    policy = sparsekv.calibrate_duo(model, [prompt(40)], sinks=SINKS, recent=RECENT)
    loop = Loop(sparsekv.patch(model, policy, 16))
    loop.feed(prompt(40))
    assert len(policy.gates) == len(loop.cache.state.ordinal)


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(c) % 126 for c in text]}


def test_texts():
    model, text = tiny_llama(), "the quick brown fox jumps over it"
    settings = {"sinks": SINKS, "recent": RECENT}
    ids = torch.tensor(Tokenizer()(text)["input_ids"])
    policies = [
        sparsekv.calibrate_duo(model, [text], tokenizer=Tokenizer(), **settings),
        sparsekv.calibrate_duo(model, [ids], **settings),
        sparsekv.calibrate_duo(model, [ids[None]], **settings),
    ]
    assert policies[0] == policies[1] == policies[2] and isinstance(policies[0], Duo)
    with pytest.raises(ValueError, match="expected a tokenizer"):
        sparsekv.calibrate_duo(model, [text], **settings)
    with pytest.raises(ValueError, match="expected texts of more than 8 tokens"):
        sparsekv.calibrate_duo(model, [ids[:8]], **settings)
    with pytest.raises(ValueError, match="expected a list of texts, got a str"):  # no letters
        sparsekv.calibrate_duo(model, text, tokenizer=Tokenizer())
    with pytest.raises(ValueError, match="expected at least one text"):
        sparsekv.calibrate_duo(model, [])
