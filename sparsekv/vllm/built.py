"""The engine whose layers were built last in this process.

vLLM asks a backend, a class, to adjust a layer's cache spec and does not say for which engine: when
it does, right after the model was built, no configuration is current. So layers leave theirs here.
Builders, which are given a configuration, refuse a spec that does not fit it.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from sparsekv.vllm.layout import Layout
from sparsekv.vllm.refusals import check
from sparsekv.vllm.settings import Settings, parse
from sparsekv.vllm.spec import PinnedWindowSpec
from sparsekv.vllm.tiers import tier_of


class Built:
    """Settings, block size and most tokens of a chunk of the engine built last; None: dense."""

    settings: ClassVar[Settings | None] = None
    block_size: ClassVar[int] = 0
    chunk: ClassVar[int] = 0

    @classmethod
    def note(cls, config: Any) -> Settings | None:
        """Called by each layer as it is built: its settings, if they fit the rest of `config`."""
        settings = parse(config.additional_config)
        if settings is not None:
            check(config, settings)
            _check_layers(config.model_config.hf_text_config, settings)
        cls.settings, cls.block_size = settings, config.cache_config.block_size
        # All of a step: a single request may have it, whatever long_prefill_token_threshold says.
        cls.chunk = config.scheduler_config.max_num_batched_tokens
        return settings

    @classmethod
    def spec(cls, spec: Any, tier: int | None) -> Any:
        """A windowed layer's spec as a sparse one, if the engine has settings."""
        from vllm.v1.kv_cache_interface import SlidingWindowSpec

        if cls.settings is None or type(spec) is not SlidingWindowSpec:
            return spec
        if tier is None and cls.settings.tiers > 1:
            raise ValueError("expected layers that know their tier, got one not yet loaded")
        chunk = cls.chunk if cls.settings.chunked else 0
        return PinnedWindowSpec.of(spec, cls.settings, cls.block_size, tier or 0, chunk)


def _check_layers(config: Any, settings: Settings) -> None:
    """ValueError unless the model was told which of its layers are sparse, as `llm_kwargs` does."""
    told, count = list(getattr(config, "layer_types", None) or ()), config.num_hidden_layers
    if told != settings.layer_types(count):
        raise ValueError(
            f"expected hf_overrides with the layer_types of llm_kwargs, {settings.full_layers} "
            f"full and {count - settings.full_layers} sparse layers, got "
            f"{sorted(set(told)) or 'none'}: other overrides belong beside them, not in their place"
        )


def know_tier(impl: Any, backend: type, config: Any) -> None:
    """Called by a sparse layer's implementation once the model is loaded: gives the layer a backend
    of its tier, so that the backend, a class, knows which layers it is asked about."""
    settings = parse(config.additional_config)
    if settings is None or settings.tiers == 1:
        return
    for name, layer in _layers(config):
        if layer.impl is impl:
            layer.attn_backend = _of_tier(backend, _tier(name, settings, config))


@functools.cache
def _of_tier(backend: type, tier: int) -> type:
    return type(f"{backend.__name__}{tier}", (backend,), {"tier": tier})


def _tier(name: str, settings: Settings, config: Any) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    layers = config.model_config.hf_text_config.num_hidden_layers
    return tier_of(extract_layer_index(name), layers, settings.full_layers, settings.tiers)


def names_of_layout(layout: Layout, config: Any) -> list[str]:
    """The sparse layers of this layout, in the model's order: one group of vLLM's, or several."""
    settings = parse(config.additional_config)
    if settings is None:
        return []
    names = [n for n, layer in _layers(config) if hasattr(layer.impl, "together")]
    tiers = [_tier(name, settings, config) if settings.tiers > 1 else 0 for name in names]
    layouts = settings.layouts(layout.block_size)
    return [name for name, tier in zip(names, tiers, strict=True) if layouts[tier] == layout]


def _layers(config: Any) -> list[tuple[str, Any]]:
    found = config.compilation_config.static_forward_context.items()
    return [(name, layer) for name, layer in found if hasattr(layer, "impl")]


def settings_of(spec: Any, names: list[str], config: Any) -> Settings | None:
    """The settings of a builder's layers, None: dense. ValueError if spec is another engine's."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    settings = parse(config.additional_config)
    if not isinstance(spec, SlidingWindowSpec):
        return None
    found = spec.layout if isinstance(spec, PinnedWindowSpec) else None
    for name in names:
        wanted = None
        if settings is not None:
            tier = _tier(name, settings, config) if settings.tiers > 1 else 0
            wanted = settings.layout(spec.block_size, tier)
        if wanted != found:
            raise ValueError(
                f"expected {name} to be {wanted}, got {found}: two engines in one process?"
            )
    return settings
