"""What sparse layers cannot be combined with, and why; checked when the model is built."""

from __future__ import annotations

from typing import Any

from sparsekv.vllm.settings import Settings


def check(config: Any, settings: Settings) -> None:
    """Raise ValueError if `config`, a VllmConfig, asks for what does not go with sparse layers."""
    for wrong, wanted, reason in _findings(config, settings):
        if wrong:
            raise ValueError(f"expected {wanted} with sparsekv {settings.policy}: {reason}")


def _findings(config: Any, settings: Settings) -> list[tuple[bool, str, str]]:
    cache, model = config.cache_config, config.model_config
    quantised = settings.scored and cache.cache_dtype not in ("auto", "bfloat16", "float16")
    connector = config.kv_transfer_config is not None
    return [
        (
            bool(cache.enable_prefix_caching),
            "enable_prefix_caching=False",
            "pinned blocks no longer hold the tokens that their hash names",
        ),
        (connector, "no KV connector", "it would send blocks whose tokens have changed"),
        (
            config.speculative_config is not None,
            "no speculative decoding",
            "rejected tokens would already have pushed others out",
        ),
        (bool(model.use_mla), "no MLA", "its cache has no KV heads to choose tokens for"),
        *_ranks(config.parallel_config, settings),
        (
            bool(cache.kv_sharing_fast_prefill),
            "kv_sharing_fast_prefill=False",
            "layers that share a cache would choose tokens for each other",
        ),
        (
            quantised,
            "an unquantised KV cache",
            f"scores are computed from its keys as they are, got {cache.cache_dtype}",
        ),
        (
            settings.chunked and not config.scheduler_config.enable_chunked_prefill,
            "chunked prefill, for prefill='chunked',",
            "a prompt that is read in one step is held whole",
        ),
        (
            bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
            "the hybrid KV cache manager",
            "without it every layer holds every block",
        ),
    ]


def _ranks(parallel: Any, settings: Settings) -> list[tuple[bool, str, str]]:
    local = settings.method.tensor_parallel == "local"
    return [
        (
            bool(parallel.enable_dbo),
            "enable_dbo=False",
            "groups of layers share what a whole step asks for",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "decode_context_parallel_size=1",
            "a rank would see a part of each request only",
        ),
        (
            not local and parallel.tensor_parallel_size > 1,
            "tensor_parallel_size=1",
            "all heads of a layer vote for its tokens, and a rank has a part of them",
        ),
    ]
