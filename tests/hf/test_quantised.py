"""`kv_dtype`: a patched model generates what the reference does with rounded keys and values.

The models are float64, so that what is rounded is the same number on both sides.
"""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from rig import POLICIES, Loop, greedy, left_padded, prompt, tiny_llama
from torch import Tensor

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.kernels._quant import KV_FORMATS
from sparsekv.policies import H2O, Streaming
from sparsekv.steady import addresses, hold

# Re-rotated sinks are rounded once more: see `test_shifted_sinks`.
EXACT = [name for name in POLICIES if name != "streaming-cache"]
formats = pytest.mark.parametrize("kv_dtype", KV_FORMATS)


def double_llama(seed: int = 0, **config):
    return tiny_llama(seed, **config).double()


def pair(policy: str, kv_dtype: str, budget: int | float = 12, seed: int = 0):
    model = double_llama(seed)
    reference = Reference(model, POLICIES[policy], budget, kv_dtype=kv_dtype)
    return reference, Loop(sparsekv.patch(model, POLICIES[policy], budget, kv_dtype=kv_dtype))


def check_feed(reference: Reference, loop: Loop, ids: Tensor) -> Tensor:
    """Feed both, compare logits and kept sets, return the greedy token [1, 1]."""
    expected, got = reference.feed(ids), loop.feed(ids)[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert loop.kept() == reference.kept()
    return expected[-1:].argmax(-1, keepdim=True)


@formats
@pytest.mark.parametrize("policy", EXACT)
def test_steps_and_turns(policy: str, kv_dtype: str) -> None:
    """A prompt, decode steps, a second turn as a chunk, more steps."""
    reference, loop = pair(policy, kv_dtype)
    for length, steps in ((37, 20), (9, 6)):
        token = check_feed(reference, loop, prompt(length, steps))
        for _ in range(steps):
            token = check_feed(reference, loop, token)
    loop.cache.state.stores[0].validate()


@formats
def test_it_is_not_the_plain_cache(kv_dtype: str) -> None:
    """The prompt's own logits are exact; those after it differ, and not by much."""
    runs = []
    for form in (None, kv_dtype):
        loop = Loop(sparsekv.patch(double_llama(), "snapkv", 24, kv_dtype=form))
        runs.append([loop.feed(ids)[0, -1] for ids in prompt(40).split([39, 1], dim=1)])
    assert torch.equal(runs[0][0], runs[1][0])
    error = (runs[0][1] - runs[1][1]).norm() / runs[0][1].norm()
    assert 1e-5 < error < {"int8": 0.05, "fp8_e4m3": 0.2, "fp8_e5m2": 0.4, "int4": 0.6}[kv_dtype]


@formats
def test_generate(kv_dtype: str) -> None:
    model = double_llama(7)
    reference = Reference(model, H2O(), 16, remember=False, kv_dtype=kv_dtype)
    sparsekv.patch(model, H2O(), 16, kv_dtype=kv_dtype)
    run = greedy(model, prompt(40, 7), 12)
    tokens, logits = reference.generate(prompt(40, 7), 12)
    assert run.tokens[0].tolist() == tokens
    torch.testing.assert_close(run.logits[:, 0].double(), logits, atol=1e-4, rtol=0)
    text = torch.cat([run.sequences, prompt(9, 8)], 1)  # a second turn with the whole text
    second = greedy(model, text, 8, **{cache_key(model): run.cache})
    assert second.tokens[0].tolist() == reference.generate(text[:, 51:], 8)[0]


@formats
def test_a_padded_batch_is_its_rows(kv_dtype: str) -> None:
    model = sparsekv.patch(double_llama(), "h2o", 12, kv_dtype=kv_dtype)
    rows = [prompt(length, length) for length in (31, 18, 25)]
    batch = left_padded(*rows)
    run = greedy(model, batch["input_ids"], 10, attention_mask=batch["attention_mask"])
    for got, ids in zip(run.tokens, rows, strict=True):
        assert got.tolist() == greedy(model, ids, 10).tokens[0].tolist()


@formats
@pytest.mark.parametrize("policy", ["full", "h2o", "snapkv"])
def test_forks_copy_their_scales(policy: str, kv_dtype: str) -> None:
    """Row copies that go on with other tokens: each is what it would be alone."""
    model = sparsekv.patch(double_llama(), POLICIES[policy], 14, kv_dtype=kv_dtype)
    forked, tails = Loop(model), prompt(16, 5).view(2, 8)
    forked.feed(prompt(30))
    forked.cache.batch_repeat_interleave(2)
    forked.cache.reorder_cache(torch.tensor([1, 0]))
    got = torch.stack([forked.feed(ids[:, None])[:, -1] for ids in tails.T])
    for row, tail in enumerate(tails):
        alone = Loop(model)
        alone.feed(prompt(30))
        want = torch.stack([alone.feed(token.view(1, 1))[0, -1] for token in tail])
        torch.testing.assert_close(got[:, row], want, atol=1e-9, rtol=0)
    forked.cache.state.stores[0].validate()


@formats
def test_beams_run(kv_dtype: str) -> None:
    """With a budget above the text, quantised beams are those of a cache that holds everything."""
    runs = []
    for policy in ("full", "h2o"):
        model = sparsekv.patch(double_llama(), policy, 100, kv_dtype=kv_dtype)
        out = model.generate(
            prompt(30), attention_mask=torch.ones(1, 30, dtype=torch.long),
            max_new_tokens=10, num_beams=3, do_sample=False,
        )  # fmt: skip
        runs.append(out.tolist())
    assert runs[0] == runs[1]


@formats
@pytest.mark.parametrize("policy", EXACT)
def test_drafts_taken_back_leave_no_trace(policy: str, kv_dtype: str) -> None:
    """Snapshot, restore and replay: scales go where their pages go."""
    model = sparsekv.patch(double_llama(), POLICIES[policy], 14, kv_dtype=kv_dtype)
    plain, drafted = Loop(model), Loop(model)
    plain.feed(prompt(30))
    drafted.feed(prompt(30))
    drafted.cache.activate_past_recording()
    ids = prompt(20, 3)
    for start in range(0, 20, 5):  # two of five drafts are taken back and fed again
        drafted.feed(torch.cat([ids[:, start : start + 3], prompt(2, start)], 1))
        drafted.cache.crop(-2)
        drafted.feed(ids[:, start + 3 : start + 5])
        drafted.cache.crop(0)
        for token in ids[0, start : start + 5]:
            plain.feed(token.view(1, 1))
        assert drafted.kept() == plain.kept()
    last = prompt(1, 4)
    torch.testing.assert_close(drafted.feed(last), plain.feed(last), atol=1e-9, rtol=0)


@formats
@pytest.mark.parametrize("policy", POLICIES)
def test_steady_steps(policy: str, kv_dtype: str) -> None:
    """What a graph captures: the same steps on memory that stays in place, scales included."""
    model = sparsekv.patch(double_llama(), POLICIES[policy], 44, kv_dtype=kv_dtype)
    ordinary, steady = Loop(model), Loop(model)
    for loop in (ordinary, steady):
        loop.feed(prompt(40))
    hold(steady.cache.state, 12)
    before = addresses(steady.cache.state)
    pool = steady.cache.state.stores[0].pool
    assert pool.k_scales.data_ptr() in before and pool.v_scales.data_ptr() in before
    for token in prompt(12, seed=9)[0]:
        want = ordinary.feed(token.view(1, 1))
        torch.testing.assert_close(steady.feed(token.view(1, 1)), want, atol=1e-9, rtol=0)
        assert addresses(steady.cache.state) == before


@formats
def test_shifted_sinks(kv_dtype: str) -> None:
    """Moved sinks are rounded from the same keys in every step: the error does not add up."""
    policy = Streaming(positions="cache")
    loop = Loop(sparsekv.patch(double_llama(), policy, 12, kv_dtype=kv_dtype))
    loop.feed(prompt(30))
    state, sinks = loop.cache.state, torch.arange(4).expand(1, 2, 4)
    store, local = state.store(0)
    written = store.gather(local, sinks)[0]
    for token in prompt(40, 9)[0]:
        loop.feed(token.view(1, 1))
    assert torch.equal(state.true_sinks[0], written)
    moved = state.sink_shift.rotate(written, torch.tensor([70 - 12]))
    error = (store.gather(local, sinks)[0] - moved).abs()
    step = {"int8": 1 / 254, "int4": 1 / 14, "fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8}[kv_dtype]
    assert (error <= 1.01 * step * moved.abs().amax(-1, keepdim=True)).all()


@formats
def test_report_counts_bytes_that_exist(kv_dtype: str) -> None:
    """K, V and their scales; dense bytes are those of the model's dtype."""
    run = greedy(sparsekv.patch(tiny_llama(), "h2o", 16, kv_dtype=kv_dtype), prompt(40), 8)
    report, pool = run.cache.report(), run.cache.state.stores[0].pool
    vectors = (pool.num_pages + 1) * pool.page_size * 2
    width = 8 if kv_dtype == "int4" else 16
    assert report.kv_bytes == vectors * (width + 4)
    tensors = (pool.k_pages, pool.v_pages, pool.k_scales, pool.v_scales)
    assert report.kv_bytes == sum(x.nbytes for x in tensors)
    assert report.dense_bytes == 3 * 2 * 47 * 2 * 16 * 4
    assert report.kv_dtype == report.to_dict()["kv_dtype"] == kv_dtype
    assert f"held in {kv_dtype} with its scales" in str(report)


def test_plain_caches_have_no_scales() -> None:
    run = greedy(sparsekv.patch(tiny_llama(), "h2o", 16), prompt(40), 8)
    pool = run.cache.state.stores[0].pool
    assert pool.k_scales is None and pool.v_scales is None
    assert run.cache.report().kv_dtype is None


@pytest.mark.parametrize("kv_dtype", ["int3", "fp8", "bfloat16", ""])
def test_unknown_names_leave_the_model_as_it_was(kv_dtype: str) -> None:
    model = tiny_llama()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="expected kv_dtype to be None or one of"):
        sparsekv.patch(model, "h2o", 16, kv_dtype=kv_dtype)
    assert model.config._attn_implementation == before
    sparsekv.patch(model, "h2o", 16, kv_dtype="int8")
    with pytest.raises(ValueError, match="expected kv_dtype to be None or one of"):
        sparsekv.patch(model, "snapkv", 8, kv_dtype=kv_dtype)
    assert sparsekv.new_cache(model).state.kv_dtype == "int8"


def test_int4_needs_a_head_dim_that_halves() -> None:
    model = tiny_llama(head_dim=24)
    with pytest.raises(ValueError, match="multiple of 16 for int4, got 24"):
        sparsekv.patch(model, "h2o", 16, kv_dtype="int4")
    assert greedy(sparsekv.patch(model, "h2o", 16, kv_dtype="int8"), prompt(20), 4).cache


def test_e4m3_needs_a_gpu_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekv.kernels._quant.arch_of", lambda device: "sm80")
    with pytest.raises(ValueError, match=r"capability >= 8.9 for fp8_e4m3"):
        sparsekv.patch(tiny_llama(), "h2o", 16, kv_dtype="fp8_e4m3")
    sparsekv.patch(tiny_llama(), "h2o", 16, kv_dtype="fp8_e5m2")
