"""Every supported model family in miniature: random weights, a window shorter than the prompt."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from rig import VOCABULARY
from transformers import PreTrainedModel

WINDOW, LAYERS = 24, 4
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)

_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2}

# name -> (configuration class, what differs from _BASE, layers with a sliding window)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "llama": ("LlamaConfig", {}, []),
    "mistral": ("MistralConfig", {"sliding_window": None}, []),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}, [0, 1, 2, 3]),
    "qwen2": ("Qwen2Config", {}, []),
    "qwen2-mixed": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        [2, 3],
    ),
    # No sliding_window argument reaches the attention of these two; the window is in the config.
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 32, "use_sliding_window": True,
         "sliding_window": WINDOW, "layer_types": _ALTERNATING},
        [0, 2],
    ),
    "phimoe": (
        "PhimoeConfig",
        {**_EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW},
        [0, 1, 2, 3],
    ),
    "qwen3": ("Qwen3Config", {}, []),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
        [],
    ),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, []),
    "gemma": ("GemmaConfig", {}, []),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24,
         "layer_types": _ALTERNATING},
        [0, 2],
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 24},
        [0, 2],
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}, []),
    "phi3-window": ("Phi3Config", {"sliding_window": WINDOW}, [0, 1, 2, 3]),
    "gpt_oss": (
        "GptOssConfig",
        {**_EXPERTS, "sliding_window": WINDOW, "num_local_experts": 4,
         "layer_types": _ALTERNATING},
        [0, 2],
    ),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.11}, []),
    "olmo2": ("Olmo2Config", {}, []),
    "cohere2": (
        "Cohere2Config",
        {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "logit_scale": 1.0},
        [0, 2],
    ),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": False},
        [],
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}, []),
}  # fmt: skip


def tiny(config: str, **changes: Any) -> PreTrainedModel:
    """A causal LM of a configuration class, from `_BASE` and what differs."""
    made = getattr(transformers, config)(**{**_BASE, **changes})
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()


def build(family: str, **changes: Any) -> PreTrainedModel:
    """The tiny model of a family, eager attention, weights from a fixed seed."""
    config, differs, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = tiny(config, **{**differs, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(4.0, 1.0)  # large enough to take a share
    return model


def sliding_layers(family: str) -> list[int]:
    """Layers that see WINDOW tokens only."""
    return FAMILIES[family][2]
