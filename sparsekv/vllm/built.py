"""The engine whose layers were built last in this process.

vLLM asks a backend, a class, to adjust a layer's cache spec and does not say for which engine: when
it does, right after the model was built, no configuration is current. So layers leave theirs here.
Builders, which are given a configuration, refuse a spec that does not fit it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sparsekv.vllm.refusals import check
from sparsekv.vllm.settings import Settings, parse
from sparsekv.vllm.spec import PinnedWindowSpec


class Built:
    """Settings and block size of the engine built last; None: its layers are dense."""

    settings: ClassVar[Settings | None] = None
    block_size: ClassVar[int] = 0

    @classmethod
    def note(cls, config: Any) -> Settings | None:
        """Called by each layer as it is built: its settings, if they fit the rest of `config`."""
        settings = parse(config.additional_config)
        if settings is not None:
            check(config, settings)
        cls.settings, cls.block_size = settings, config.cache_config.block_size
        return settings

    @classmethod
    def spec(cls, spec: Any) -> Any:
        """A windowed layer's spec as a sparse one, if the engine has settings."""
        from vllm.v1.kv_cache_interface import SlidingWindowSpec

        if cls.settings is None or type(spec) is not SlidingWindowSpec:
            return spec
        return PinnedWindowSpec.of(spec, cls.settings, cls.block_size)


def settings_of(spec: Any, config: Any) -> Settings | None:
    """The settings of a builder's layers, None: dense. ValueError if spec is another engine's."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    settings = parse(config.additional_config)
    if not isinstance(spec, SlidingWindowSpec):
        return None
    wanted = settings.layout(spec.block_size) if settings is not None else None
    found = spec.layout if isinstance(spec, PinnedWindowSpec) else None
    if wanted != found:
        raise ValueError(f"expected layers of {wanted}, got {found}: two engines in one process?")
    return settings
