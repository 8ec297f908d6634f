"""The entry point of `vllm.general_plugins`: vLLM calls `register` once in every process."""

from __future__ import annotations

from sparsekv.vllm import compat

CPU_BACKEND = "sparsekv.vllm.cpu.SparseCPUBackend"
GPU_BACKEND = "sparsekv.vllm.gpu.SparseFlashBackend"
# Models of ours, by the name of vLLM's that each stands for.
MODELS = {
    "Qwen2ForCausalLM": "SparseQwen2ForCausalLM",
    "Qwen3ForCausalLM": "SparseQwen3ForCausalLM",
}


def register() -> None:
    """Make the sparse spec, its manager, the backends and the models known, to be asked for."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from sparsekv.vllm.spec import PinnedWindowManager, PinnedWindowSpec

    # The registry fills itself only while it is empty: ours must not be the first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PinnedWindowSpec, PinnedWindowManager, PinnedWindowSpec)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    else:
        register_backend(AttentionBackendEnum.CUSTOM, GPU_BACKEND)
    for name in MODELS.values():
        ModelRegistry.register_model(name, f"sparsekv.vllm.qwen:{name}")
    compat.apply()
