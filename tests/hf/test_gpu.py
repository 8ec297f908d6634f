"""The whole path on a CUDA device: kernels, cache, policies and generate together."""

from __future__ import annotations

import pytest
import torch
from rig import EVICTING, POLICIES, greedy, kept, left_padded, patched, prompt, tiny_llama

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
