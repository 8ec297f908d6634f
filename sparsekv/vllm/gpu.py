"""vLLM's FlashAttention backend for sparse layers, under the name CUSTOM.

`attention_config={"backend_per_kind": {"sliding_window": "CUSTOM"}}` gives it the windowed layers;
full layers keep what vLLM picks. What a captured graph reads, block tables, lengths and slots, lies
in buffers that `build`, which runs eagerly before every replay, fills without waiting for the
device. Cuts are made there, too; a forward pass only keeps its queries.
"""

from __future__ import annotations

import copy
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

from sparsekv.kernels.block_tables import store_queries
from sparsekv.kernels.cut_scores import MAX_ROWS
from sparsekv.kernels.paged_sums import add_attention
from sparsekv.vllm.built import Built, know_tier, names_of_layout, settings_of
from sparsekv.vllm.compaction import Scorer
from sparsekv.vllm.cutting import Cutter
from sparsekv.vllm.layout import Ints
from sparsekv.vllm.plain_cache import PlainBlocks
from sparsekv.vllm.rows import Step
from sparsekv.vllm.settings import parse
from sparsekv.vllm.spec import PinnedWindowSpec
from sparsekv.vllm.sums import Adder, provide_sums
from sparsekv.vllm.together import Together


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
        self.together: Together | None = None  # of all layers like this one, at the first of them
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
        self._together: Together | None = None
        self._access = PlainBlocks()
        self._table: Tensor | None = None  # as wide as vLLM's, which the first step shows

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """Metadata of pinned and recent blocks."""
        return self._describe(common_attn_metadata, fast_build, real=True)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashAttentionMetadata:
        """Metadata of rows that are no requests; the buffers are those of every later step."""
        metadata = self._describe(common_attn_metadata, False, real=False)
        together = self._shared()
        if together.cutter is not None and not together.cutter.warm:
            if not together.cutter.scorer.rows:
                provide_sums(together.names, self._layers)
            together.cutter.warm_up(self.vllm_config.model_config.max_model_len)
        return metadata

    def _describe(self, common: Any, fast_build: bool, *, real: bool) -> FlashAttentionMetadata:
        together, rows = self._shared(), common.num_reqs
        if self._scorer is not None and not self._scorer.rows:
            provide_sums(self.layer_names, self._layers)
        table = self._room(common.block_table_tensor.shape[1], together)
        first = together.enter(common, self.layer_names, table, real)
        if first:
            together.metadata = self._of_all(common, together, fast_build)
        metadata = copy.copy(together.metadata)
        metadata.block_table, metadata.slot_mapping = table[:rows], common.slot_mapping
        metadata.sparsekv_kept = Kept(
            common.query_start_loc[: rows + 1], common.seq_lens[:rows], together.sent[1, :rows],
            common.max_query_len, metadata.block_table, together.lengths[:rows],
            self._adder(together.step, metadata.block_table),
        )  # fmt: skip
        return metadata

    def _room(self, columns: int, together: Together) -> Tensor:
        """For the group's blocks that are held, int32 [most rows, M]; the same in every step."""
        if self._table is None:
            shape = (len(together.lengths), columns)
            self._table = torch.zeros(shape, dtype=torch.int32, device=together.lengths.device)
        return self._table

    def _of_all(self, common: Any, together: Together, fast_build: bool) -> FlashAttentionMetadata:
        """What FlashAttention makes of the step, the same for every group but for its blocks."""
        step, rows, most = together.step, common.num_reqs, common.max_seq_len
        if step is not None:
            most = int(self._held(step).max())
        short = common.replace(seq_lens=together.lengths[:rows], max_seq_len=most)
        metadata = super().build(0, short, fast_build)
        if hasattr(metadata, "sliding_window"):  # 0.26 takes it from the spec, later from the layer
            metadata.sliding_window = (-1, -1)
        return metadata

    def _held(self, step: Step) -> Ints:
        """Tokens that each request holds in a layer after the step."""
        return step.lengths - (step.now - self._layout.pinned_blocks) * self._layout.block_size

    def _adder(self, step: Step | None, table: Tensor) -> Adder | None:
        """What adds up the step's prompts, rows of several queries; None where there are none."""
        if step is None or self._scorer is None or self._scorer.rows:
            return None
        prompts = np.flatnonzero(np.diff(step.query_start) > 1)
        if not len(prompts):
            return None
        held, size = self._held(step), self._layout.block_size
        return Adder(prompts, step.query_start, held, table, size, self._access, self._scorer)

    def _shared(self) -> Together:
        """What the group shares with the others of its layout; the first layer of all keeps it."""
        if self._together is None:
            names = names_of_layout(self._layout, self.vllm_config)
            first: SparseFlashImpl = self._layers[names[0]].impl
            if first.together is None:
                layers, config = [self._layers[name] for name in names], self.vllm_config
                scorer = self._scorer
                cutter = None if scorer is None else Cutter(self._layout, scorer, layers)
                seqs = config.scheduler_config.max_num_seqs
                rows = max(seqs, config.compilation_config.max_cudagraph_capture_size or 0)
                first.together = Together(self._layout, names, cutter, seqs, rows, self.device)
            self._together = first.together
        return self._together

    @property
    def _layers(self) -> dict[str, Any]:
        return self.vllm_config.compilation_config.static_forward_context
