"""vLLM's CPU attention backend, with sparse layers. It takes the name of the one it extends.

Without settings every class here does what its parent does.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from sparsekv.vllm.built import Built, know_tier, settings_of
from sparsekv.vllm.compaction import Scorer
from sparsekv.vllm.cpu_cache import PackedBlocks
from sparsekv.vllm.pinning import pin_best
from sparsekv.vllm.rows import Step, Tracker, shorten, store_queries
from sparsekv.vllm.spec import PinnedWindowSpec
from sparsekv.vllm.sums import Adder, provide_sums


class SparseCPUBackend(CPUAttentionBackend):
    """CPU_ATTN whose windowed layers are sparse if the user asked for it."""

    tier: ClassVar[int | None] = None  # see know_tier

    @staticmethod
    def get_impl_cls() -> type[SparseCPUImpl]:
        """The layer."""
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUBuilder]:
        """The metadata builder."""
        return SparseCPUBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A windowed layer's spec becomes a sparse one."""
        return Built.spec(super().customize_spec(spec), cls.tier)


class SparseCPUImpl(CPUAttentionBackendImpl):
    """A layer that attends whatever its block table holds, and remembers its newest queries."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
        alibi_slopes: list[float] | None, sliding_window: int | None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        config = get_current_vllm_config()
        settings = Built.note(config)
        self.ring: Tensor | None = None
        self.sums: Tensor | None = None  # of a policy that needs them, see `provide_sums`
        self._config = config if sliding_window is not None else None
        if settings is not None:
            if sliding_window is not None and settings.rows:
                slots = config.scheduler_config.max_num_seqs
                self.ring = torch.zeros(slots, settings.rows, num_heads, head_size)
            sliding_window = None
        heads = (num_heads, head_size, scale, num_kv_heads)
        super().__init__(*heads, alibi_slopes, sliding_window, *args, **kwargs)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """As CPU_ATTN; all layers are there now."""
        super().process_weights_after_loading(act_dtype)
        if self._config is not None:
            know_tier(self, SparseCPUBackend, self._config)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None, output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """As CPU_ATTN; then the queries are kept for the next cut, or added up."""
        inputs = (layer, query, key, value, kv_cache, attn_metadata, output)
        output = super().forward(*inputs, *args, **kwargs)
        step = getattr(attn_metadata, "sparsekv_step", None)
        if self.ring is not None and step is not None:
            store_queries(query.to(self.ring.dtype), self.ring, step)
        adder: Adder | None = getattr(attn_metadata, "sparsekv_adder", None)
        if adder is not None:
            adder.add(query, kv_cache, self)
        return output


class SparseCPUBuilder(CPUAttentionMetadataBuilder):
    """Cuts what must go, then describes to the kernel only what is held."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._tracker: Tracker | None = None
        settings = settings_of(kv_cache_spec, layer_names, vllm_config)
        if settings is not None:
            assert isinstance(kv_cache_spec, PinnedWindowSpec)
            self._scorer = Scorer.of(settings)
            slots = vllm_config.scheduler_config.max_num_seqs
            self._tracker = Tracker(kv_cache_spec.layout, slots)
            size, dim = kv_cache_spec.block_size, kv_cache_spec.head_size
            self._access = PackedBlocks(self.isa, kv_cache_spec.dtype, size, dim)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Metadata of pinned and recent blocks; of everything where the layers are dense."""
        common = common_attn_metadata
        if self._tracker is None:
            return super().build(common_prefix_len, common, fast_build)
        step = self._tracker.step(common)
        if step is None:
            return super().build(common_prefix_len, common, fast_build)
        if self._scorer is not None:
            self._compact(step, common.block_table_tensor)
        table, lengths = shorten(step, self._tracker.layout, common)
        common = common.replace(block_table_tensor=table, seq_lens=lengths)
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.sparsekv_step = step  # type: ignore[attr-defined]
        if self._scorer is not None and not self._scorer.rows:
            metadata.sparsekv_adder = self._adder(step, table, lengths)  # type: ignore[attr-defined]
        return metadata

    def _adder(self, step: Step, table: Tensor, lengths: Tensor) -> Adder:
        assert self._scorer is not None
        rows, size = np.arange(len(step.slots)), self.kv_cache_spec.block_size
        held = lengths.numpy().astype(np.int64)
        return Adder(rows, step.query_start, held, table, size, self._access, self._scorer)

    def _compact(self, step: Step, table: Tensor) -> None:
        """Pin the best tokens of the requests whose blocks must go, in every layer of the group."""
        assert self._tracker is not None and self._scorer is not None
        layout, scorer = self._tracker.layout, self._scorer
        layers = self.vllm_config.compilation_config.static_forward_context
        if not scorer.rows:
            provide_sums(self.layer_names, layers)
        pin_best(step, layout, table, scorer, self._access, self.layer_names, layers)
