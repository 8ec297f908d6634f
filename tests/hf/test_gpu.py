"""The whole path on a CUDA device: kernels, cache, policies and generate together."""

from __future__ import annotations

import pytest
import torch
from rig import EVICTING, POLICIES, greedy, kept, left_padded, patched, prompt, tiny_llama

import sparsekv
from sparsekv.hf.compat import cache_key, output_cache
from sparsekv.policies import H2O

pytestmark = pytest.mark.gpu
_PROMPT, _NEW, _BUDGET = 150, 24, 40


def _model(dtype: torch.dtype):
    return tiny_llama(head_dim=64, num_attention_heads=8, num_key_value_heads=2).to("cuda", dtype)


def _run(model, policy: str, budget: int = _BUDGET, **kwargs):
    patched(model, policy, budget)
    return greedy(model, prompt(_PROMPT).to(model.device), new=_NEW, **kwargs)


@pytest.mark.parametrize("policy", POLICIES)
def test_fp32_on_the_gpu_equals_the_reference_on_the_cpu(policy):
    """Kernels against references, with every eviction decision in between."""
    gpu = _run(_model(torch.float32), policy)
    cpu = _run(_model(torch.float32).cpu(), policy)
    assert (gpu.tokens.cpu() == cpu.tokens).all()
    assert kept(gpu.cache) == kept(cpu.cache)
    torch.testing.assert_close(gpu.logits.cpu(), cpu.logits, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", POLICIES)
def test_twenty_runs_are_bitwise_equal(policy, dtype):
    """No atomics, no races: one result."""
    model = _model(dtype)
    first = _run(model, policy)
    assert torch.isfinite(first.logits).all()
    for _ in range(20):
        again = greedy(model, prompt(_PROMPT).cuda(), new=_NEW)
        assert (again.logits == first.logits).all()
        assert kept(again.cache) == kept(first.cache)


@pytest.mark.parametrize("budget", [_BUDGET, _PROMPT + 10, 1000])
@pytest.mark.parametrize("policy", POLICIES)
def test_graph_replays_equal_ordinary_steps(policy, budget):
    """B60: budgets that are in use at once, in the middle of decoding, and never."""
    model = _model(torch.bfloat16)
    replayed = _run(model, policy, budget)
    ordinary = _run(model, policy, budget, disable_compile=True)
    assert replayed.cache.state.steady is not None
    assert ordinary.cache.state.steady is None
    assert (replayed.logits == ordinary.logits).all()
    assert kept(replayed.cache) == kept(ordinary.cache)
    for store in replayed.cache.state.stores:
        store.validate()


@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_replays_equal_ordinary_steps(policy):
    """patch(compile=True): in fp32 the same tokens and kept sets; runs repeat bitwise."""
    model = patched(_model(torch.float32), policy, _PROMPT + 10, compile=True)
    ids = prompt(_PROMPT).cuda()
    first, again = greedy(model, ids, new=_NEW), greedy(model, ids, new=_NEW)
    assert model.__dict__["_sparsekv_patch"].compiled.is_warm(model, 1)
    ordinary = _run(model, policy, _PROMPT + 10, disable_compile=True)
    assert (first.logits == again.logits).all()
    assert (first.tokens == ordinary.tokens).all()
    assert kept(first.cache) == kept(ordinary.cache)
    torch.testing.assert_close(first.logits, ordinary.logits, atol=2e-3, rtol=2e-3)


class _Untraceable(torch.nn.Linear):
    """A head that dynamo cannot follow."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_model_that_cannot_be_compiled_is_captured_as_it_is():
    """One warning with the reason, and the tokens of the uncompiled graph."""
    model = _model(torch.bfloat16)
    model.lm_head.__class__ = _Untraceable
    patched(model, "h2o", _BUDGET, compile=True)
    ids = prompt(_PROMPT).cuda()
    with pytest.warns(UserWarning, match="without torch.compile"):
        run = greedy(model, ids, new=_NEW)
    ordinary = _run(model, "h2o", disable_compile=True)
    assert run.cache.state.steady is not None
    assert (run.logits == ordinary.logits).all()


class _Syncing(H2O):
    """H2O that waits for the device in every step, which a graph cannot."""

    def observe(self, layer, phase, state, columns, positions):
        assert bool(columns.isfinite().any())
        return state + columns

    def decay(self, layer):
        return None


def test_a_step_that_cannot_be_captured_runs_as_always():
    """One warning that names the reason, and the same tokens."""
    model = sparsekv.patch(_model(torch.bfloat16), _Syncing(), _BUDGET)
    ids = prompt(_PROMPT).cuda()
    with pytest.warns(UserWarning, match="without a CUDA graph") as caught:
        warned = greedy(model, ids, new=_NEW)
    assert sum("CUDA graph" in str(warning.message) for warning in caught) == 1
    model.generate(ids, max_new_tokens=2, do_sample=True)  # random numbers still work
    ordinary = _run(model, "h2o", disable_compile=True)
    assert (warned.logits == ordinary.logits).all()
    assert kept(warned.cache) == kept(ordinary.cache)


@pytest.mark.parametrize("policy", EVICTING)
def test_graph_in_a_padded_sampled_batch(policy):
    """Sampling, padding and a second turn on the same cache."""
    model = patched(_model(torch.float32), policy, _BUDGET)
    batch = {
        name: x.cuda() for name, x in left_padded(prompt(150, seed=1), prompt(90, seed=2)).items()
    }
    runs = []
    for disable in (False, True):
        torch.manual_seed(0)
        options = {"do_sample": True, "max_new_tokens": 12, "disable_compile": disable}
        first = model.generate(**batch, **options, return_dict_in_generate=True)
        cache = output_cache(first)
        mask = torch.ones_like(first.sequences)
        mask[:, : batch["attention_mask"].shape[1]] = batch["attention_mask"]
        more = torch.cat([first.sequences, prompt(9, seed=3).cuda().expand(2, -1)], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 9)], dim=1)
        again = {cache_key(model): cache, "attention_mask": mask}
        runs.append(model.generate(more, **again, **options))
        cache.state.stores[0].validate()
    assert (runs[0] == runs[1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_is_as_close_to_fp64_as_sdpa(dtype):
    """Half precision: our logits err at most twice as much as transformers' own attention."""
    ids = prompt(_PROMPT).cuda()
    exact = _model(torch.float64).cpu()(ids.cpu()).logits
    model = _model(dtype)
    theirs = model(ids).logits.cpu().double()
    patched(model, "full", 1)
    ours = greedy(model, ids, new=1).logits[0].cpu().double()
    error = (ours - exact[:, -1]).abs().max()
    assert error <= 2 * (theirs - exact).abs().max() + 1e-3


@pytest.mark.parametrize("policy", EVICTING)
def test_left_padded_rows_equal_their_single_runs(policy):
    """fp32, so that tokens can be compared."""
    model = patched(_model(torch.float32), policy, _BUDGET)
    rows = [prompt(n, seed=n) for n in (150, 97, 61)]
    batch = {name: x.cuda() for name, x in left_padded(*rows).items()}
    together = greedy(model, batch.pop("input_ids"), new=_NEW, **batch).tokens
    for row, tokens in zip(rows, together, strict=True):
        assert (greedy(model, row.cuda(), new=_NEW).tokens[0] == tokens).all()


@pytest.mark.parametrize("policy", EVICTING)
def test_beams_and_chunks_run(policy):
    """Copy-on-write and position-ordered chunks on the device; the tables stay valid."""
    model = patched(_model(torch.float32), policy, _BUDGET)
    ids = prompt(_PROMPT).cuda()
    for kwargs in ({"num_beams": 3}, {"prefill_chunk_size": 64}):
        cpu = greedy(model.cpu(), ids.cpu(), new=8, **kwargs).sequences
        run = greedy(model.cuda(), ids, new=8, **kwargs)
        assert (run.sequences.cpu() == cpu).all()
        for store in run.cache.state.stores:
            store.validate()
