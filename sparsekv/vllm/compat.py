"""What vLLM 0.26 lacks of the hooks that 0.32 has, put there; on 0.32 and later nothing is done."""

from __future__ import annotations

import functools
from typing import Any, ClassVar


class RequestRows:
    """The rows of the runner's request table that the step being prepared is about."""

    current: ClassVar[Any] = None


def apply() -> None:
    """Where vLLM does not: call `customize_spec`, number requests in CommonAttentionMetadata."""
    from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

    if not hasattr(AttentionBackend, "customize_spec"):
        _customize_specs()
    if "req_idx" not in CommonAttentionMetadata.__dataclass_fields__ and not hasattr(
        CommonAttentionMetadata, "req_idx"
    ):
        CommonAttentionMetadata.req_idx = property(lambda self: RequestRows.current)
        _number_requests()


def _customize_specs() -> None:
    from vllm.model_executor.layers.attention.attention import Attention

    original = Attention.get_kv_cache_spec
    if getattr(original, "sparsekv", False):
        return

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        customize = getattr(self.get_attn_backend(), "customize_spec", None)
        return spec if customize is None or spec is None else customize(spec)

    get_kv_cache_spec.sparsekv = True  # type: ignore[attr-defined]
    Attention.get_kv_cache_spec = get_kv_cache_spec


def _number_requests() -> None:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    original = DefaultModelState.prepare_attn

    @functools.wraps(original)
    def prepare_attn(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        RequestRows.current = input_batch.idx_mapping_np
        try:
            return original(self, input_batch, *args, **kwargs)
        finally:
            RequestRows.current = None

    DefaultModelState.prepare_attn = prepare_attn
