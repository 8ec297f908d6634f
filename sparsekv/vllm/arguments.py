"""What vLLM must be told: the arguments that make layers sparse, from the user's settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparsekv.vllm.register import MODELS
from sparsekv.vllm.settings import DENSE_PREFILL, FULL, KEY, Settings
from sparsekv.vllm.tiers import tier_of

BLOCK_SIZE = 32
# vLLM's model files in which `layer_types` says what window a layer has, and nothing else: in
# others it also decides, say, which layers have rotary embeddings.
_FILES = ("apertus", "granite", "llama", "mistral", "telechat2")
# Whether a version's file reads it; those that build on LlamaAttention do.
_PER_LAYER = ("layer_types", "per_layer_sliding_window")
# vLLM takes windows of these to have sinks of their own, unless told.
_SINKS = {"GraniteForCausalLM": {"attention_sinks": False}}


def llm_kwargs(
    model: str, *, policy: str, budget: int = 1024, full_layers: int = 3,
    recent: int | None = None, prefill: str = DENSE_PREFILL, block_size: int = BLOCK_SIZE,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments for `vllm.LLM`: `LLM(**llm_kwargs(model, policy="snapkv", budget=1024))`.

    model: Hugging Face id or local folder. policy: "streaming", "snapkv", "pyramid",
    "layersplit", "h2o", "tova", or "full": vLLM as it is. budget: tokens a KV head keeps in each
    layer but the first `full_layers`, for "pyramid" on average; recent: those of them that are the
    newest (None: the policy's choice). prefill: "dense" or "chunked", see docs/serving.md. options:
    hyper-parameters of the policy. Raises ValueError, with the reason, for settings or models that
    do not work.
    """
    if policy == FULL:
        return {"model": model}
    settings = Settings(policy, budget, full_layers, recent, prefill, options)
    layout = settings.layout(block_size)
    config = read_config(model)
    layers = sparse_layers(config, settings)
    entry = {"policy": policy, "budget": budget, "full_layers": full_layers, "options": options}
    entry |= {} if recent is None else {"recent": recent}
    entry |= {} if prefill == DENSE_PREFILL else {"prefill": prefill}
    # On a CPU vLLM knows one backend, which the plugin extends under its name.
    choice = {"attention_config": {"backend_per_kind": {"sliding_window": "CUSTOM"}}}
    windows = {"layer_types": layers, "sliding_window": layout.recent}
    return {
        "model": model,
        "hf_overrides": {**windows, **_of_architecture(config)},
        "additional_config": {KEY: entry},
        "enable_prefix_caching": False,
        "block_size": block_size,
        **(choice if torch.cuda.is_available() else {}),
    }


def read_config(model: str) -> Any:
    """The model's configuration; ValueError where there is none to read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"expected a readable model, got {model!r}: {reason}") from error


def sparse_layers(config: Any, settings: Settings) -> list[str]:
    """`layer_types` with the sparse layers called windowed; ValueError if vLLM would not obey."""
    text = config.get_text_config()
    count = int(text.num_hidden_layers)
    if settings.full_layers >= count:
        raise ValueError(f"expected full_layers below {count} layers, got {settings.full_layers}")
    found = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if found or windowed:
        raise ValueError(
            f"expected a model of full-attention layers, got {sorted(found) or 'a sliding window'}:"
            " its own windows and sparse layers would be one and the same to vLLM"
        )
    if getattr(text, "kv_lora_rank", None) is not None:
        raise ValueError("expected no MLA: its cache has no KV heads to choose tokens for")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError("expected no KV sharing: layers would choose tokens for each other")
    if getattr(text, "dual_chunk_attention_config", None):
        raise ValueError("expected no dual chunk attention: it has a backend of its own")
    tier_of(count - 1, count, settings.full_layers, settings.tiers)
    _check_architecture(getattr(config, "architectures", None) or ())
    return settings.layer_types(count)


def _of_architecture(config: Any) -> dict[str, Any]:
    """Overrides that the model's architecture needs: a model of ours in its place, or what vLLM
    must be told about its layers."""
    names = getattr(config, "architectures", None) or ()
    ours = [MODELS[name] for name in names if name in MODELS]
    told = {key: value for name in names for key, value in _SINKS.get(name, {}).items()}
    return told | ({"architectures": ours} if ours else {})


def _check_architecture(architectures: Sequence[str]) -> None:
    """ValueError unless vLLM's model file, or ours, builds each layer as `layer_types` says."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in architectures:
        if name in MODELS:
            return
        entry = ModelRegistry.models.get(name)
        module = getattr(entry, "module_name", None) or ""
        if not name.endswith("ForCausalLM") or module.rpartition(".")[2] not in _FILES:
            continue
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin).read_text(encoding="utf-8")
        if all(word in source for word in _PER_LAYER) or "LlamaAttention" in source:
            return
    raise ValueError(
        "expected a model whose layers take nothing but their window from layer_types in vLLM, one "
        f"of {', '.join([*_FILES, 'qwen2', 'qwen3'])}, got "
        f"{', '.join(architectures) or 'no architecture'}"
    )


def check_installed() -> None:
    """ValueError, saying what to install, where there is no vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name is no package
        raise ValueError("expected vLLM to be installed, got none: pip install 'sparsekv[vllm]'")
