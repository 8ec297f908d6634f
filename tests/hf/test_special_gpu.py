"""Page selection, extra passes and pruned hidden states on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from rig import greedy, kept, prompt, tiny_llama
from test_extra_passes import Letters

import sparsekv
from sparsekv.policies import KVzip, PyramidInfer, Quest

pytestmark = pytest.mark.gpu
_PROMPT, _NEW = 150, 40
CASES = {
    "quest": (Quest(dense_layers=1), 64),
    "quest-in-budget": (Quest(dense_layers=0), 1000),
    "kvzip": (KVzip(Letters(), chunk=64), 40),
    "kvzip-uniform": (KVzip(Letters(), chunk=64, uniform=True), 0.3),
    "pyramidinfer": (PyramidInfer(decay=0.5, min_context=8, recent=0.1, exceed=6), 40),
}


def _run(case: str, device: str, dtype: torch.dtype, patching: dict | None = None, **kwargs):
    policy, budget = CASES[case]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
    model = tiny_llama(head_dim=64, **heads).to(device, dtype)
    sparsekv.patch(model, policy, budget, **(patching or {}))
    return greedy(model, prompt(_PROMPT).to(device), new=_NEW, **kwargs)


@pytest.mark.parametrize("case", CASES)
def test_fp32_on_the_gpu_equals_the_reference_on_the_cpu(case):
    gpu, cpu = (_run(case, device, torch.float32) for device in ("cuda", "cpu"))
    assert (gpu.tokens.cpu() == cpu.tokens).all()
    assert kept(gpu.cache) == kept(cpu.cache)
    torch.testing.assert_close(gpu.logits.cpu(), cpu.logits, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("case", CASES)
def test_graph_replays_equal_ordinary_steps(case, kv_dtype):
    """Pages are chosen inside a captured step, windows are cut between two."""
    patching = {"kv_dtype": kv_dtype}
    replayed = _run(case, "cuda", torch.bfloat16, patching)
    ordinary = _run(case, "cuda", torch.bfloat16, patching, disable_compile=True)
    assert replayed.cache.state.steady is not None and ordinary.cache.state.steady is None
    assert (replayed.logits == ordinary.logits).all()
    assert kept(replayed.cache) == kept(ordinary.cache)
    for store in replayed.cache.state.stores:
        store.validate()


@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_equal_ordinary_steps(case):
    compiled = _run(case, "cuda", torch.float32, {"compile": "decode"})
    ordinary = _run(case, "cuda", torch.float32, disable_compile=True)
    assert (compiled.tokens == ordinary.tokens).all()
    assert kept(compiled.cache) == kept(ordinary.cache)
    torch.testing.assert_close(compiled.logits, ordinary.logits, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_five_runs_are_bitwise_equal(case):
    runs = [_run(case, "cuda", torch.bfloat16) for _ in range(5)]
    assert all((run.logits == runs[0].logits).all() for run in runs)
    assert all(kept(run.cache) == kept(runs[0].cache) for run in runs)
