"""Qwen2, Qwen2.5 and dense Qwen3 for vLLM, with layers windowed as `layer_types` says.

vLLM's own files for them build all layers alike. Its Llama takes any kind of layer, Qwen3's too,
and builds Qwen2's but for the biases: so these models are vLLM's Llama with layers of Qwen.
`register` makes them known under the names of the classes, `llm_kwargs` asks for them by name.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
)
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import extract_layer_index


class Qwen2Attention(LlamaAttention):
    """Llama's, with biases for queries, keys and values alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"bias": True, "bias_o_proj": False}))


class SparseQwen2Layer(LlamaDecoderLayer):
    """A layer of Qwen2; `LlamaAttention` reads its window from `layer_types`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix, attn_layer_type=Qwen2Attention)


class SparseQwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SparseQwen2Layer)


class SparseQwen3Layer(Qwen3DecoderLayer):
    """vLLM's layer of Qwen3, given the window that `layer_types` says."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        windowed = config.layer_types[extract_layer_index(prefix)] == "sliding_attention"
        super().__init__(
            config,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=prefix,
            per_layer_sliding_window=config.sliding_window if windowed else None,
        )


class SparseQwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3, not its mixtures of experts."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SparseQwen3Layer)
