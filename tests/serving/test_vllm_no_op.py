"""Installed and asked for nothing, the plugin leaves vLLM as it is: its specs and managers; on a
GPU its backends, on a CPU subclasses of its backend that hold nothing of ours."""

from __future__ import annotations

import pytest
from engines import generate, needs_vllm

pytestmark = needs_vllm

STOCK = {
    "manager": ["vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager"],
    "spec": ["vllm.v1.kv_cache_interface.FullAttentionSpec"],
}
# The one CPU backend that vLLM knows, extended under its name.
OURS = {
    "backend": ["sparsekv.vllm.cpu.SparseCPUBackend"],
    "builder": ["sparsekv.vllm.cpu.SparseCPUBuilder"],
    "impl": ["sparsekv.vllm.cpu.SparseCPUImpl"],
}


@pytest.mark.slow
def test_an_engine_that_is_asked_for_nothing() -> None:
    out = generate((40,), 4, {"policy": "full"})
    assert out["classes"] == {**STOCK, **OURS, "state": []}
    asked = generate((40,), 4, {"policy": "streaming", "budget": 64})["classes"]
    assert asked["spec"] != STOCK["spec"] and asked["manager"] != STOCK["manager"]
    assert asked["state"] == ["sparsekv.vllm.rows.Tracker"]


def test_what_is_beside_vllm_on_a_cpu() -> None:
    """Each of the three classes is its parent and the methods named here."""
    from vllm.v1.attention.backends import cpu_attn

    from sparsekv.vllm import cpu

    backend, impl = cpu.SparseCPUBackend, cpu.SparseCPUImpl
    assert backend.__bases__ == (cpu_attn.CPUAttentionBackend,)
    assert impl.__bases__ == (cpu_attn.CPUAttentionBackendImpl,)
    assert cpu.SparseCPUBuilder.__bases__ == (cpu_attn.CPUAttentionMetadataBuilder,)
    assert backend.get_name() == cpu_attn.CPUAttentionBackend.get_name()
    stays = {"forward", "__init__", "process_weights_after_loading"}
    assert {name for name in vars(impl) if callable(getattr(impl, name))} == stays


def test_what_is_registered_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of the name that vLLM keeps for others; none of its own is replaced."""
    from vllm import platforms
    from vllm.v1.attention.backends import registry
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from sparsekv.vllm.register import GPU_BACKEND, register

    said = []
    monkeypatch.setattr(type(platforms.current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(registry, "register_backend", lambda *args: said.append(args))
    register()
    assert said == [(registry.AttentionBackendEnum.CUSTOM, GPU_BACKEND)]
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=None)
    assert KVCacheSpecRegistry.get_manager_class(spec, None) is FullAttentionManager
