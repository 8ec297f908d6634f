"""What vLLM must be told: the arguments that make layers sparse, from the user's settings."""

from __future__ import annotations

from typing import Any

import torch

from sparsekv.vllm.settings import FULL, KEY, Settings

BLOCK_SIZE = 32


def llm_kwargs(
    model: str, *, policy: str, budget: int, full_layers: int = 3, recent: int | None = None,
    block_size: int = BLOCK_SIZE, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments for `vllm.LLM`: `LLM(**llm_kwargs(model, policy="snapkv", budget=1024))`.

    model: Hugging Face id or local folder. policy "full": vLLM as it is. options: hyper-parameters
    of the policy. Raises ValueError, with the reason, for settings or models that do not work.
    """
    if policy == FULL:
        return {"model": model}
    settings = Settings(policy, budget, full_layers, recent, options)
    layout = settings.layout(block_size)
    layers = num_layers(model)
    entry = {"policy": policy, "budget": budget, "full_layers": full_layers, "options": options}
    entry |= {} if recent is None else {"recent": recent}
    kinds = ["full_attention"] * full_layers + ["sliding_attention"] * (layers - full_layers)
    # On a CPU vLLM knows one backend, which the plugin extends under its name.
    choice = {"attention_config": {"backend_per_kind": {"sliding_window": "CUSTOM"}}}
    return {
        **(choice if torch.cuda.is_available() else {}),
        "model": model,
        "hf_overrides": {"layer_types": kinds, "sliding_window": layout.recent},
        "additional_config": {KEY: entry},
        "enable_prefix_caching": False,
        "block_size": block_size,
    }


def num_layers(model: str) -> int:
    """Decoder layers of a model, from its configuration."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers)
