"""The decode-time policies on a CUDA device: graph replays, compressions between them, fp32."""

from __future__ import annotations

import pytest
import torch
from rig import greedy, kept, prompt, tiny_llama
from zoo import EXAMPLES

import sparsekv

pytestmark = pytest.mark.gpu
NAMES = ["tova", "scissorhands", "keyformer", "keydiff", "rkv", "duo"]
_PROMPT, _NEW, _BUDGET = 150, 24, 40


def _run(dtype: torch.dtype, device: str, name: str, budget: int = _BUDGET, **kwargs):
    model = tiny_llama(head_dim=64, num_attention_heads=8, num_key_value_heads=2)
    sparsekv.patch(model.to(device, dtype), EXAMPLES[name](3, 2), budget)
    return greedy(model, prompt(_PROMPT).to(device), new=_NEW, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_fp32_on_the_gpu_equals_the_reference_on_the_cpu(name):
    gpu, cpu = (_run(torch.float32, device, name) for device in ("cuda", "cpu"))
    assert (gpu.tokens.cpu() == cpu.tokens).all()
    assert kept(gpu.cache) == kept(cpu.cache)
    torch.testing.assert_close(gpu.logits.cpu(), cpu.logits, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("budget", [_BUDGET, _PROMPT + 10, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_graph_replays_equal_ordinary_steps(name, budget):
    """Budgets that are in use at once, in the middle of decoding, and never."""
    replayed = _run(torch.bfloat16, "cuda", name, budget)
    ordinary = _run(torch.bfloat16, "cuda", name, budget, disable_compile=True)
    assert replayed.cache.state.steady is not None
    assert ordinary.cache.state.steady is None
    assert (replayed.logits == ordinary.logits).all()
    assert kept(replayed.cache) == kept(ordinary.cache)
    for store in replayed.cache.state.stores:
        store.validate()


@pytest.mark.parametrize("name", NAMES)
def test_runs_are_bitwise_equal(name):
    first = _run(torch.bfloat16, "cuda", name)
    assert torch.isfinite(first.logits).all()
    for _ in range(5):
        again = _run(torch.bfloat16, "cuda", name)
        assert (again.logits == first.logits).all()
        assert kept(again.cache) == kept(first.cache)


def test_calibration_on_the_gpu_equals_the_cpu():
    models = [tiny_llama(head_dim=64).to(device) for device in ("cuda", "cpu")]
    gates = [
        torch.tensor(sparsekv.calibrate_duo(m, [prompt(90)], sinks=3, recent=20).gates)
        for m in models
    ]
    torch.testing.assert_close(gates[0], gates[1], atol=1e-3, rtol=1e-3)
