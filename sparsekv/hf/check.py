"""Which models a patch can serve: what the config says, then a forward that proves it.

A model is refused with the reason; nothing is left to run dense, masked or uncompressed in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparsekv.hf.cache import UnreadError
from sparsekv.hf.compat import cache_key, tp_size
from sparsekv.plan import LayerSpec
from sparsekv.rope import Rotary

_TEST_TOKENS = 8
_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies do not depend on the length


def known_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model knows; None: its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_positions(model: PreTrainedModel, tokens: int) -> None:
    """Raise ValueError for a text beyond the positions that the model knows: what is measured there
    says nothing about it."""
    most = known_positions(model)
    if most is not None and tokens > most:
        raise ValueError(
            f"expected a text of at most {most} tokens, the positions that the model knows, got "
            f"{tokens}"
        )


def check_config(model: PreTrainedModel) -> None:
    """Raise ValueError for what the config alone rules out."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a transformers PreTrainedModel, got {type(model).__name__}")
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"expected a decoder-only model, got the encoder-decoder {name}")
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ValueError(f"expected a text-only decoder, got {name} with a {type(text).__name__}")
    if not hasattr(model, "lm_head") or not model.can_generate():
        raise ValueError(f"expected a causal language model that can generate, got {name}")
    for field in ("kv_lora_rank", "qk_rope_head_dim"):
        if getattr(config, field, None):
            raise ValueError(f"expected K and V in the cache, got latents ({field}) in {name}")
    if getattr(config, "num_kv_shared_layers", 0) or "reuse" in (
        getattr(config, "kv_sharing_modes", None) or ()
    ):
        raise ValueError(f"expected every layer to have its own K and V, got KV sharing in {name}")
    unknown = set(layer_types(config)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"expected full_attention and sliding_attention layers, got {sorted(unknown)}"
        )
    ranks = tp_size(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % ranks:
        raise ValueError(
            f"expected the KV heads to divide among {ranks} tensor-parallel ranks, got {heads}"
        )


def layer_types(config: Any) -> list[str]:
    """The attention type of every layer, as transformers itself infers it."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)[: config.num_hidden_layers]
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"] * config.num_hidden_layers
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"] * config.num_hidden_layers
    return ["full_attention"] * config.num_hidden_layers


def layer_specs(model: PreTrainedModel) -> list[LayerSpec]:
    """Window and expected device of every layer of the model as it is placed now."""
    config = model.config
    devices = _layer_devices(model)
    return [
        LayerSpec(config.sliding_window if kind == "sliding_attention" else None, devices[i])
        for i, kind in enumerate(layer_types(config))
    ]


def _layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Where each layer runs. Offloaded weights sit on "meta"; their hook knows the device."""
    devices = [model.device] * model.config.num_hidden_layers
    for module in model.modules():
        layer, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if not isinstance(layer, int) or layer >= len(devices) or weight is None:
            continue
        place = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if place is None:
            place = weight.device
        devices[layer] = (
            torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        )
    return devices


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode; then each module is again as it was, which need not be as the model was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def self_test(model: PreTrainedModel, cache: Any) -> None:
    """Run eight equal tokens through a patched model and see what its attention did.

    Raises:
        ValueError: a layer whose attention did not get the K and V that the cache returned, a
            window that only the config knows, or the reason why an attention cannot run.
    """
    name = type(model).__name__
    ids = torch.ones(1, _TEST_TOKENS, dtype=torch.long, device=model.device)
    # A layer that is bypassed is found below, whether or not another one notices.
    with evaluating(model), suppress(UnreadError):
        forward = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": True}
        model(**forward, **{cache_key(model): cache})
    bypassed = [i for i, seen in enumerate(cache.state.seen) if seen != _TEST_TOKENS]
    if bypassed:
        raise ValueError(
            f"expected the attention of {name} to use the K and V that the cache returns, got "
            f"others in layers {bypassed}"
        )
    sliding = [layer for layer in cache.layers if cache.state.layers[layer.layer].window]
    if sliding and not any(layer.told_window for layer in sliding):
        raise ValueError(
            f"expected {name} to apply the sliding window of its config, got neither a sliding "
            "mask nor a sliding_window argument"
        )


def rotary_frequencies(model: PreTrainedModel, purpose: str) -> torch.Tensor:
    """inv_freq fp32 [R/2] of the full-attention layers. purpose: what for, "to ...", in errors.

    Raises:
        ValueError: rotary embeddings whose frequencies depend on the length, or none found.
    """
    name = type(model).__name__
    for module in model.modules():
        for prefix in ("full_attention_", ""):
            inv_freq = getattr(module, f"{prefix}inv_freq", None)
            if not isinstance(inv_freq, torch.Tensor):
                continue
            kind = getattr(module, f"{prefix}rope_type", None) or getattr(module, "rope_type", "")
            kind = kind.get("full_attention", "") if isinstance(kind, dict) else kind
            if kind not in _ROTARY_TYPES:
                raise ValueError(
                    f"expected rotary embeddings of a type in {_ROTARY_TYPES} {purpose}, got "
                    f"{kind!r} in {name}"
                )
            return inv_freq.detach().float().cpu()
    raise ValueError(f"expected rotary embeddings {purpose}, got none in {name}")


def check_rotation(cache: Any, rotary: Rotary, purpose: str) -> None:
    """After `self_test` of a cache: equal tokens have keys R_p k_0 in all layers.

    Raises:
        ValueError: a layer that rotates otherwise (interleaved, by other angles, or not at all).
    """
    state = cache.state
    for layer in state.ordinal:
        store, local = state.store(layer)
        slots = torch.arange(_TEST_TOKENS, device=store.seqlens.device)
        k = store.gather(local, slots.expand(*store.lens[local].shape, -1))[0].float()
        turned = rotary.turn(k[0, :, :1].expand_as(k[0]), slots)  # [HK, 8, D]
        error = (turned - k[0]).norm() / k[0].norm().clamp_min(1e-20)
        if error > 0.02:
            raise ValueError(
                f"expected rotate-half RoPE in every full-attention layer {purpose}, got something "
                f"else in layer {layer}"
            )
