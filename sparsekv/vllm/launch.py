"""`sparsekv serve`: the plan in figures, and vLLM's own OpenAI server with the right arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from sparsekv.vllm.arguments import read_config
from sparsekv.vllm.settings import Settings, parse

SERVER = "vllm.entrypoints.openai.api_server"
_TOKENS = (1000, 4000, 16000)
# An argument of ours and the option of the server; those with False are switched off.
_OPTIONS = {
    "hf_overrides": "--hf-overrides",
    "additional_config": "--additional-config",
    "attention_config": "--attention-config",
    "block_size": "--block-size",
    "enable_prefix_caching": "--no-enable-prefix-caching",
}


def command(kwargs: Mapping[str, Any], extra: list[str]) -> list[str]:
    """The server's command line for `llm_kwargs`; extra: options that go to it as they are."""
    line = [sys.executable, "-m", SERVER, "--model", str(kwargs["model"])]
    for name, option in _OPTIONS.items():
        value = kwargs.get(name)
        if value is None:
            continue
        line.append(option)
        if value is not False:
            line.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return [*line, *extra]


def plan(kwargs: Mapping[str, Any]) -> str:
    """What a request will hold, beside dense, in lines for a person."""
    settings = parse(kwargs.get("additional_config"))
    config = read_config(kwargs["model"]).get_text_config()
    if settings is None:
        return f"dense: all {config.num_hidden_layers} layers keep every token"
    layout = settings.layout(kwargs["block_size"])
    sparse = config.num_hidden_layers - settings.full_layers
    pinned = layout.pinned_blocks * layout.block_size
    lines = [
        f"{settings.policy}: {settings.full_layers} layers keep every token, {sparse} keep "
        f"{pinned} pinned and {layout.recent} recent tokens a KV head"
        f"{' and what is generated' if layout.grows else ''}, in blocks of {layout.block_size}",
        "while a prompt is read it is held whole; then, in MiB of KV a request:",
    ]
    block = _token_bytes(config) * layout.block_size
    for tokens in _TOKENS:
        dense = config.num_hidden_layers * -(-tokens // layout.block_size)
        held = _held(settings, layout, config.num_hidden_layers, tokens)
        mib = [blocks * block / 2**20 for blocks in (held, dense)]
        lines.append(
            f"  {tokens:6} tokens: {mib[0]:8.1f}, dense {mib[1]:8.1f}: {dense / held:.1f} times as "
            "many requests in the same memory"
        )
    return "\n".join(lines)


def _held(settings: Settings, layout: Any, layers: int, tokens: int) -> int:
    """Blocks of all layers for a request whose prompt of `tokens` has just been read."""
    full = -(-tokens // layout.block_size)
    sparse = layout.held_blocks(tokens + 1, tokens)
    return settings.full_layers * full + (layers - settings.full_layers) * sparse


def _token_bytes(config: Any) -> int:
    """Bytes of keys and values of one token in one layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 4 if "float32" in str(getattr(config, "dtype", None)) else 2
    return 2 * heads * dim * size
