"""vLLM's FlashAttention backend for sparse layers, under the name CUSTOM.

`attention_config={"backend_per_kind": {"sliding_window": "CUSTOM"}}` gives it the windowed layers;
full layers keep what vLLM picks. What a captured graph reads, block tables, lengths and slots, lies
in buffers that `build`, which runs eagerly before every replay, fills without waiting for the
device. Cuts are made there, too; a forward pass only keeps its queries.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from sparsekv.kernels.block_tables import shorten_tables, store_queries
from sparsekv.kernels.cut_scores import MAX_ROWS
from sparsekv.kernels.paged_sums import add_attention
from sparsekv.vllm.built import Built, know_tier, names_of_layout, settings_of
from sparsekv.vllm.compaction import Scorer
from sparsekv.vllm.cutting import Cutter
from sparsekv.vllm.plain_cache import PlainBlocks
from sparsekv.vllm.rows import Step, Tracker
from sparsekv.vllm.settings import parse
from sparsekv.vllm.spec import PinnedWindowSpec
from sparsekv.vllm.sums import Adder, provide_sums, readings


class Kept(NamedTuple):
    """What a layer needs to keep its queries, see `store_queries`, or to add up what they attend
    to: `table` and `held` as the kernel has them, and an adder of prompts, None where none is read.
    """

    query_start: Tensor
    lengths: Tensor
    slots: Tensor
    max_query_len: int
    table: Tensor
    held: Tensor
    adder: Adder | None


class SparseFlashBackend(FlashAttentionBackend):
    """FlashAttention over pinned and recent blocks."""

    tier: ClassVar[int | None] = None  # see know_tier

    @staticmethod
    def get_name() -> str:
        """The name that vLLM keeps for a backend of someone else's."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseFlashImpl]:
        """The layer."""
        return SparseFlashImpl

    @staticmethod
    def get_builder_cls() -> type[SparseFlashBuilder]:
        """The metadata builder."""
        return SparseFlashBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A windowed layer's spec becomes a sparse one."""
        return Built.spec(spec, cls.tier)


class SparseFlashImpl(FlashAttentionImpl):
    """A layer that attends whatever its block table holds, and keeps its newest queries."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
        alibi_slopes: list[float] | None, sliding_window: int | None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        self._config = config = get_current_vllm_config()
        settings = Built.note(config)
        if settings is None:
            raise ValueError("expected additional_config['sparsekv'] with backend CUSTOM, got none")
        if settings.rows > MAX_ROWS:
            raise ValueError(
                f"expected at most {MAX_ROWS} queries that vote on a GPU, got {settings.rows}"
            )
        self.cutter: Cutter | None = None  # of all layers like this one, at the first of them
        self.ring: Tensor | None = None
        self.sums: Tensor | None = None  # of a policy that needs them, see `provide_sums`
        self.reduction: Any = getattr(settings.method, "group", "mean")
        if settings.rows:
            shape = (config.scheduler_config.max_num_seqs, settings.rows, num_heads, head_size)
            self.ring = torch.zeros(shape, dtype=config.model_config.dtype)
        heads = (num_heads, head_size, scale, num_kv_heads)
        super().__init__(*heads, alibi_slopes, None, *args, **kwargs)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """As FlashAttention; all layers are there now."""
        super().process_weights_after_loading(act_dtype)
        know_tier(self, SparseFlashBackend, self._config)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """As FlashAttention; then the queries are kept for the next cut, or added up."""
        inputs = (layer, query, key, value, kv_cache, attn_metadata, output)
        output = super().forward(*inputs, *args, **kwargs)
        if attn_metadata is None:
            return output
        kept: Kept = attn_metadata.sparsekv_kept
        if self.ring is not None:
            store_queries(
                query, self.ring, kept.query_start, kept.lengths, kept.slots,
                max_query_len=kept.max_query_len,
            )  # fmt: skip
        if self.sums is not None:
            self._add_up(query, kv_cache, self.sums, kept)
        return output

    def _add_up(self, query: Tensor, cache: Tensor, sums: Tensor, kept: Kept) -> None:
        """Single queries by one launch that a graph can hold; prompts, which none holds, after."""
        add_attention(
            query, cache[..., : self.head_size], sums, kept.query_start, kept.held, kept.slots,
            kept.table, softmax_scale=self.scale, softcap=self.logits_soft_cap or None,
            reduction=self.reduction,
        )  # fmt: skip
        if kept.adder is not None:
            kept.adder.add(query, cache, self)


class SparseFlashBuilder(FlashAttentionMetadataBuilder):
    """Cuts what must go, then describes to the kernel only what is held."""

    supports_update_block_table = False  # tables are rewritten group by group

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """As FlashAttention; prompts in no graph where all their queries are added up."""
        settings = parse(vllm_config.additional_config)
        if settings is not None and settings.scored and not settings.rows:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = settings_of(kv_cache_spec, layer_names, vllm_config)
        if settings is None or not isinstance(kv_cache_spec, PinnedWindowSpec):
            raise ValueError(f"expected sparse layers with backend CUSTOM, got {kv_cache_spec}")
        self._layout, self._scorer = kv_cache_spec.layout, Scorer.of(settings)
        self._cutter: Cutter | None = None
        self._access = PlainBlocks()
        seqs = vllm_config.scheduler_config.max_num_seqs
        self._tracker = Tracker(self._layout, seqs)
        rows = max(seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        # Row 0: first recent blocks, row 1: slots.
        self._sent = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._table: Tensor | None = None  # as wide as vLLM's, which the first step shows

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """Metadata of pinned and recent blocks."""
        common = common_attn_metadata
        step = self._tracker.step(common)
        if step is not None and self._scorer is not None:
            cutter = self._shared_cutter(self._scorer)
            cutter.ask(step, common.block_table_tensor, self.layer_names)
        return self._describe(common, step, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashAttentionMetadata:
        """Metadata of rows that are no requests; the buffers are those of every later step."""
        metadata = self._describe(common_attn_metadata, None, False)
        if self._scorer is not None:
            cutter = self._shared_cutter(self._scorer)
            if not self._scorer.rows:
                provide_sums(cutter.names, self._layers)
            cutter.warm_up(self.vllm_config.model_config.max_model_len)
        return metadata

    def _describe(self, common: Any, step: Step | None, fast_build: bool) -> FlashAttentionMetadata:
        table, rows = common.block_table_tensor, common.num_reqs
        if self._scorer is not None and not self._scorer.rows:
            provide_sums(self.layer_names, self._layers)
        if self._table is None:
            shape = (len(self._lengths), table.shape[1])
            self._table = torch.zeros(shape, dtype=torch.int32, device=table.device)
        self._send(step, rows)
        lengths, most = common.seq_lens[:rows], common.max_seq_len
        shorten_tables(
            table[:rows], lengths, self._sent[0, :rows], self._table, self._lengths,
            pinned=self._layout.pinned_blocks, block_size=self._layout.block_size,
        )  # fmt: skip
        if step is not None:
            gone = (step.now - self._layout.pinned_blocks) * self._layout.block_size
            most = int((step.lengths - gone).max())
        short = common.replace(
            block_table_tensor=self._table[:rows], seq_lens=self._lengths[:rows], max_seq_len=most
        )
        metadata = super().build(0, short, fast_build)
        if hasattr(metadata, "sliding_window"):  # 0.26 takes it from the spec, later from the layer
            metadata.sliding_window = (-1, -1)
        slots = self._sent[1, :rows]
        start = common.query_start_loc[: rows + 1]
        table, held = short.block_table_tensor, short.seq_lens
        adder = self._adder(step, table)
        kept = Kept(start, lengths, slots, common.max_query_len, table, held, adder)
        metadata.sparsekv_kept = kept
        return metadata

    def _adder(self, step: Step | None, table: Tensor) -> Adder | None:
        """What adds up the step's prompts, rows of several queries; None where there are none."""
        if step is None or self._scorer is None or self._scorer.rows:
            return None
        prompts = np.flatnonzero(np.diff(step.query_start) > 1)
        size = self._layout.block_size
        held = step.lengths - (step.now - self._layout.pinned_blocks) * size
        parts = tuple(readings(prompts, step.query_start, held, table, size))
        return Adder(parts, self._access, self._scorer) if parts else None

    def _send(self, step: Step | None, rows: int) -> None:
        """First recent blocks and slots to the device; rows without a request: P and -1."""
        values = np.empty((2, rows), dtype=np.int32)
        values[0], values[1] = self._layout.pinned_blocks, -1
        if step is not None:
            values[0, : len(step.now)], values[1, : len(step.now)] = step.now, step.slots
        sent = torch.from_numpy(values)
        if self._sent.is_cuda:
            sent = sent.pin_memory()  # kept by the allocator until the copy is done
        self._sent[:, :rows].copy_(sent, non_blocking=True)

    def _shared_cutter(self, scorer: Scorer) -> Cutter:
        """What cuts the layers of this group, together with those of others of its layout."""
        if self._cutter is None:
            names = names_of_layout(self._layout, self.vllm_config)
            first: SparseFlashImpl = self._layers[names[0]].impl
            if first.cutter is None:
                first.cutter = Cutter(self._layout, scorer, names, self._layers)
            self._cutter = first.cutter
        return self._cutter

    @property
    def _layers(self) -> dict[str, Any]:
        return self.vllm_config.compilation_config.static_forward_context
