"""Attention by head, from kernels, against the matrices themselves."""

from __future__ import annotations

import csv

import pytest
import torch
from eager import record
from families import build
from rig import greedy, prompt, tiny_llama

import sparsekv
from sparsekv.diagnose import attention, massive
from sparsekv.diagnose.attention_files import write_attention
from sparsekv.diagnose.heads import describe, head_columns
from sparsekv.headwise import Scores
from sparsekv.hf.watch import Attended, watch
from sparsekv.hf.watch import attention as attend

SINKS, RECENT, TOP = 3, 9, (1, 5, 20, 1000)


def expected(layer, tokens):
    """(sink share, locality, entropy, spread, mass) of one layer, as the definitions say."""
    rows = slice(SINKS + RECENT, tokens)
    i, j = torch.arange(tokens)[rows, None], torch.arange(tokens)
    p, sink = layer.p[:, rows], layer.sink[:, rows]
    columns = p.sum(1).sort(-1, descending=True).values
    mass = [columns[:, :k].sum(-1) / columns.sum(-1) for k in TOP]
    entropy = torch.special.entr(p).sum(-1) + torch.special.entr(sink)
    seen = (p > 0).sum(-1) + (sink > 0)
    return (
        p[..., :SINKS].sum(-1).mean(-1),
        (p * (i - j < RECENT)).sum(-1).mean(-1),
        entropy.mean(-1),
        (entropy / seen.double().log()).mean(-1),
        torch.stack(mass, -1),
    )


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "gpt_oss", "mistral-window", "qwen3"]
)
def test_every_figure_is_its_definition(family):
    """Grouped heads, softcap, learned sinks, windows longer and shorter than `recent`."""
    model, ids = build(family), prompt(50, 1)
    table = attention(model, ids, sinks=SINKS, recent=RECENT, top=TOP)
    layers = record(model, ids)
    assert table.windows == tuple(layer.window for layer in layers) and table.tokens == 50
    for i, layer in enumerate(layers):
        got = (table.sink_share, table.locality, table.entropy, table.spread, table.mass)
        for value, truth in zip(got, expected(layer, 50), strict=True):
            torch.testing.assert_close(value[i].double(), truth, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)])
def test_heads_stand_in_their_order(heads):
    """Query head h reads KV head h // G, and is number h."""
    size = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    model = tiny_llama(3, hidden_size=16 * heads[0], **size)
    layers, seen = record(model, prompt(30)), []
    watch(model, prompt(30), lambda x: seen.append(head_columns(x, 20, None)))
    for columns, layer in zip(seen, layers, strict=True):
        torch.testing.assert_close(columns.double(), layer.p[:, -20:].sum(1), atol=1e-5, rtol=1e-4)


def test_a_model_that_looks_at_one_place():
    """All on the first token, all on oneself, evenly on everything."""
    tokens, dim = 40, 16
    q = torch.zeros(tokens, 3, dim)
    k = torch.zeros(tokens, 3, dim)
    k[0, 0, 0] = q[:, 0, 0] = 60.0  # head 0: the first key
    angle = torch.arange(tokens)
    one_hot = torch.nn.functional.one_hot(angle % dim, dim).float() * 60.0
    q[:, 1], k[:, 1] = one_hot, one_hot  # head 1: every 16th token, itself included
    scores = Scores(0.25)
    out, lse = attend(*(x.transpose(0, 1)[None] for x in (q, k, k)), scores)
    seen = Attended(0, q, k, k, out, lse, scores, None)
    share, near, entropy, spread, mass = describe(seen, 1, 8, (1, 40))
    rows = torch.arange(9.0, 40.0)
    torch.testing.assert_close(
        share, torch.stack([torch.ones(()), share[1], (1 / (rows + 1)).mean()])
    )
    torch.testing.assert_close(near[0], torch.zeros(()))
    torch.testing.assert_close(near[1], (1 / (rows // 16 + 1)).mean())
    torch.testing.assert_close(near[2], (8 / (rows + 1)).mean())
    torch.testing.assert_close(entropy, torch.stack([
        torch.zeros(()), (rows // 16 + 1).log().mean(), (rows + 1).log().mean()
    ]), atol=1e-5, rtol=1e-5)  # fmt: skip
    torch.testing.assert_close(spread[2], torch.ones(()))
    assert mass[0].tolist() == pytest.approx([1.0, 1.0]) and mass[2, 0] < 0.1


def test_the_model_is_left_as_it_was():
    model = tiny_llama()
    before = greedy(model, prompt(20)).tokens
    model.train()
    attention(model, prompt(40), sinks=2, recent=4)
    assert model.training and not hasattr(model, "_sparsekv_patch")
    assert torch.equal(greedy(model.eval(), prompt(20)).tokens, before)
    sparsekv.patch(model, "streaming", 8)
    attention(model, prompt(40), sinks=2, recent=4)
    assert sparsekv.new_cache(model).state.policy.name == "streaming"


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    table = attention(build("gemma2"), prompt(60), sinks=SINKS, recent=RECENT, top=TOP)
    files = write_attention(table, tmp_path)
    endings = ["heads.csv", "layers.csv", "heads.png", "layers.png"]
    assert [file.name for file in files] == [f"attention_{ending}" for ending in endings]
    rows = list(csv.DictReader(files[0].open()))
    assert len(rows) == 4 * 4 and [row["window"] for row in rows[::4]] == ["24", "", "24", ""]
    assert float(rows[5]["mass_of_20"]) == pytest.approx(float(table.mass[1, 1, 2]), abs=1e-5)
    means = list(csv.DictReader(files[1].open()))
    assert float(means[3]["entropy"]) == pytest.approx(float(table.entropy[3].mean()), abs=1e-5)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[2:])


@pytest.mark.parametrize("settings", [{"sinks": -1}, {"recent": 0}, {"top": (0,)}, {"recent": 40}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ValueError, match=r"expected .*, got "):
        attention(tiny_llama(), prompt(30), **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_gpu_measures_the_same(family):
    model, ids = build(family), prompt(200, 1)
    truth = attention(model, ids, sinks=SINKS, recent=RECENT, top=TOP)
    found = attention(model.cuda(), ids, sinks=SINKS, recent=RECENT, top=TOP)
    for name in ("sink_share", "locality", "entropy", "spread", "mass"):
        torch.testing.assert_close(getattr(found, name), getattr(truth, name), atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
def test_a_long_layer_needs_64_mb_beside_its_inputs():
    """32768 tokens of a layer of an 8B model: 32 query heads on 8 KV heads of 128."""
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = (torch.randn(1, heads, 32768, 128, **kind) for heads in (32, 8, 8))
    scores = Scores(128**-0.5)
    out, lse = attend(q, k, v, scores)
    flat = (x[0].transpose(0, 1) for x in (q, k, v))
    seen = Attended(0, *flat, out, lse, scores, None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    described = describe(seen, 4, 64, (16, 256, 4096))
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
    assert all(x.isfinite().all() for x in described)


def test_texts_beyond_the_model_are_refused():
    """What is measured behind the last position that a model knows says nothing about it."""
    model, ids = tiny_llama(), prompt(60)
    model.config.max_position_embeddings = 50
    message = "expected a text of at most 50 tokens, the positions that the model knows, got 60"
    measured = (
        lambda: attention(model, ids, sinks=1, recent=4),
        lambda: massive(model, ids),
        lambda: sparsekv.calibrate_duo(model, [ids], sinks=1, recent=4),
    )
    for measure in measured:
        with pytest.raises(ValueError, match=message):
            measure()
