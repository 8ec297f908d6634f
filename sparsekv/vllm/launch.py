"""`sparsekv serve`: the plan in figures, and vLLM's own OpenAI server with the right arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv.options import json_object
from sparsekv.vllm.arguments import read_config
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.settings import Settings, parse
from sparsekv.vllm.tiers import padded

SERVER = "vllm.entrypoints.openai.api_server"
_TOKENS = (1000, 4000, 16000)
_WHILE_READ = {
    False: "it is held whole",
    True: "that and up to two chunks (--max-num-batched-tokens) of it are held",
}
# An argument of ours and the option of the server; those with False are switched off.
_OPTIONS = {
    "hf_overrides": "--hf-overrides",
    "additional_config": "--additional-config",
    "attention_config": "--attention-config",
    "block_size": "--block-size",
    "enable_prefix_caching": "--no-enable-prefix-caching",
}


def command(kwargs: Mapping[str, Any], extra: list[str]) -> list[str]:
    """The server's command line for `llm_kwargs`; extra: options that go to it as they are, but
    that JSON beside ours becomes one with it.

    Raises:
        ValueError: options of ours set otherwise.
    """
    line = [sys.executable, "-m", SERVER, "--model", str(kwargs["model"])]
    for name, option in _OPTIONS.items():
        value = kwargs.get(name)
        if value is None:
            continue
        if isinstance(value, Mapping):
            given, extra = _taken(option, extra)
            value = json.dumps(_merged(option, value, given))
        line += [option] if value is False else [option, str(value)]
    return [*line, *extra]


def _taken(option: str, extra: list[str]) -> tuple[list[str], list[str]]:
    """(values of a JSON option in `extra`, the rest of it)."""
    names, values, rest = {option, "--" + option[2:].replace("-", "_")}, [], []
    words = iter(extra)
    for word in words:
        name, equals, value = word.partition("=")
        if name.partition(".")[0] not in names:
            rest.append(word)
        elif "." in name:
            raise ValueError(f"expected {option} as one JSON object, got {word}")
        else:
            values.append(value if equals else next(words, ""))
    return values, rest


def _merged(option: str, ours: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    merged = dict(ours)
    for text in given:
        more = json_object(text, option)
        if both := sorted(key for key in more if key in ours and more[key] != ours[key]):
            raise ValueError(f"expected {option} without {', '.join(both)}, which sparsekv sets")
        merged |= more
    return merged


def plan(kwargs: Mapping[str, Any]) -> str:
    """What a request will hold, beside dense, in lines for a person."""
    settings = parse(kwargs.get("additional_config"))
    config = read_config(kwargs["model"]).get_text_config()
    if settings is None:
        return f"dense: all {config.num_hidden_layers} layers keep every token"
    layouts = settings.layouts(kwargs["block_size"])
    size, grows = layouts[0].block_size, layouts[0].grows
    share = (config.num_hidden_layers - settings.full_layers) // len(layouts)
    tiers = [f"{share} keep {t.pinned_blocks * size} pinned and {t.recent} recent" for t in layouts]
    lines = [
        f"{settings.policy}: {settings.full_layers} layers keep every token, {', '.join(tiers)} "
        f"tokens a KV head{' and what is generated' if grows else ''}, in blocks of {size}",
        f"while a prompt is read {_WHILE_READ[settings.chunked]}; then, in MiB of KV a request:",
    ]
    block = _token_bytes(config) * size
    for tokens in _TOKENS:
        dense = config.num_hidden_layers * -(-tokens // size)
        held = _held(settings, layouts, config.num_hidden_layers, tokens)
        mib = [blocks * block / 2**20 for blocks in (held, dense)]
        lines.append(
            f"  {tokens:6} tokens: {mib[0]:8.1f}, dense {mib[1]:8.1f}: {dense / held:.1f} times as "
            "many requests in the same memory"
        )
    return "\n".join(lines)


def _held(settings: Settings, layouts: Sequence[Layout], layers: int, tokens: int) -> int:
    """Blocks of all layers for a request whose prompt of `tokens` has just been read."""
    counts = [settings.full_layers] if settings.full_layers else []
    full = [-(-tokens // layouts[0].block_size) for _ in counts]
    counts += [(layers - settings.full_layers) // len(layouts)] * len(layouts)
    sparse = [layout.held_blocks(tokens + 1, tokens) for layout in layouts]
    return sum(n * held for n, held in zip(padded(counts), full + sparse, strict=True))


def _token_bytes(config: Any) -> int:
    """Bytes of keys and values of one token in one layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 4 if "float32" in str(getattr(config, "dtype", None)) else 2
    return 2 * heads * dim * size
