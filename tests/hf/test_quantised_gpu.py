"""Quantised caches on a CUDA device: graphs, repeats, beams, and the CPU reference."""

from __future__ import annotations

import pytest
import torch
from rig import POLICIES, greedy, kept, patched, prompt, tiny_llama

from sparsekv.kernels._common import arch_of
from sparsekv.kernels._quant import formats_of, kv_format

pytestmark = pytest.mark.gpu
_PROMPT, _NEW, _BUDGET = 150, 24, 40
FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8", "int4"]
formats = pytest.mark.parametrize("kv_dtype", FORMATS)


@pytest.fixture(autouse=True)
def served(kv_dtype: str) -> None:
    """e4m3 needs compute capability 8.9."""
    if kv_format(kv_dtype) not in formats_of(arch_of(torch.device("cuda"))):
        pytest.skip(f"no {kv_dtype} on this GPU")


def _model(dtype: torch.dtype):
    return tiny_llama(head_dim=64, num_attention_heads=8, num_key_value_heads=2).to("cuda", dtype)


@formats
@pytest.mark.parametrize("budget", [_BUDGET, _PROMPT + 10])
@pytest.mark.parametrize("policy", POLICIES)
def test_graph_replays_equal_ordinary_steps(policy: str, budget: int, kv_dtype: str) -> None:
    model = patched(_model(torch.bfloat16), policy, budget, kv_dtype=kv_dtype)
    ids = prompt(_PROMPT).cuda()
    replayed = greedy(model, ids, new=_NEW)
    again = greedy(model, ids, new=_NEW)
    ordinary = greedy(model, ids, new=_NEW, disable_compile=True)
    assert replayed.cache.state.steady is not None and ordinary.cache.state.steady is None
    assert torch.isfinite(replayed.logits).all()
    for other in (again, ordinary):
        assert (replayed.logits == other.logits).all()
        assert kept(replayed.cache) == kept(other.cache)
    for store in replayed.cache.state.stores:
        store.validate()


@formats
@pytest.mark.parametrize("policy", ["full", "h2o", "snapkv"])
def test_one_step_equals_the_reference_on_the_cpu(policy: str, kv_dtype: str) -> None:
    """fp32: a prompt and one step, before roundings that fall the other way add up."""
    ids = prompt(_PROMPT)
    runs = []
    for device in ("cuda", "cpu"):
        model = patched(_model(torch.float32).to(device), policy, _BUDGET, kv_dtype=kv_dtype)
        runs.append(greedy(model, ids.to(device), new=2))
    step = {"int8": 1 / 127, "int4": 1 / 7, "fp8_e4m3": 1 / 8, "fp8_e5m2": 1 / 4}[kv_dtype]
    gpu, cpu = (run.logits[:, 0].cpu() for run in runs)
    torch.testing.assert_close(gpu[0], cpu[0], atol=2e-3, rtol=2e-3)
    assert (gpu[1] - cpu[1]).norm() <= step * cpu[1].norm()


@formats
def test_beams_and_chunks_run(kv_dtype: str) -> None:
    """Copied pages take their scales along; the tables stay valid."""
    model = patched(_model(torch.bfloat16), "h2o", _BUDGET, kv_dtype=kv_dtype)
    for kwargs in ({"num_beams": 3}, {"prefill_chunk_size": 64}):
        run = greedy(model, prompt(_PROMPT).cuda(), new=8, **kwargs)
        again = greedy(model, prompt(_PROMPT).cuda(), new=8, **kwargs)
        assert (run.sequences == again.sequences).all()
        for store in run.cache.state.stores:
            store.validate()
