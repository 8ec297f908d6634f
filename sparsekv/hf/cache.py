"""`SparseCache`: a transformers cache whose layers hand K/V to the paged sparse state.

`update` returns the new K/V untouched; the attention function writes, attends and evicts. Lengths
that transformers sees are columns seen, padding included, never columns kept: positions, slicing
and masks all depend on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sparsekv.attention import attend, rollback
from sparsekv.headwise import Scores
from sparsekv.hf.attention import KEY_MARK, OWN_CACHE
from sparsekv.hf.gradients import needs_gradients, refuse_backward
from sparsekv.parts import ModelParts
from sparsekv.plan import LayerSpec
from sparsekv.policies.base import Policy
from sparsekv.report import CacheReport, make_report
from sparsekv.rope import SinkShift
from sparsekv.state import SparseState


class PassingLayer(CacheLayerMixin):
    """A cache layer that hands K and V on to the attention function and holds no tensors."""

    is_sliding = False  # our mask is the padding mask in sliding layers too
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to find."""

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class UnreadError(ValueError):
    """The attention function of a layer did not come for the K and V that the cache returned."""


@dataclass
class _Handover:
    """Between the layers of a cache. unread: the one that has returned K and V last, if its
    attention has not come yet."""

    unread: int | None = None


class SparseLayer(PassingLayer):
    """One layer of a `SparseCache`; the state has the tensors."""

    is_croppable = True

    def __init__(self, state: SparseState, layer: int, handover: _Handover | None = None) -> None:
        super().__init__()
        self.state, self.layer, self.handover = state, layer, handover or _Handover()
        self.told_window: int | None = None  # what the model itself said last, for `self_test`

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Record that the layer is in use; pages are found when its attention runs."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the key so that the attention function finds this layer, and return both.

        Raises:
            UnreadError: what a layer before it returned was attended by another function.
        """
        if self.handover.unread is not None:
            raise UnreadError(
                "expected attention by sparsekv, got another function, which does not know what is "
                "cached: a SparseCache works with a patched model, and after "
                "model.set_attn_implementation it has to be patched again"
            )
        self.handover.unread = self.layer
        self.is_initialized = True
        self.batch_size = key_states.shape[0]
        setattr(key_states, KEY_MARK, self)
        return key_states, value_states

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scores: Scores,
        window: int | None,
    ) -> Tensor:
        """See `sparsekv.attention.attend`; `window` is what the model says, checked."""
        self.handover.unread = None
        expected = self.state.layers[self.layer].window
        if window is not None and window != expected:
            raise ValueError(f"expected a sliding window of {expected}, got {window}")
        self.told_window = window
        if not needs_gradients(q, k, v):
            return attend(self.state, self.layer, q, k, v, mask, scores)
        with torch.no_grad():
            out = attend(self.state, self.layer, q, k, v, mask, scores)
        return refuse_backward(out, q)

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.state.seen[self.layer]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, the mark of our caches)."""
        return self.get_seq_length() + query_length, OWN_CACHE

    def reset(self) -> None:
        """Nothing of its own; `SparseCache.reset` resets the state."""

    def offload(self) -> None:
        """Pages stay where they are."""

    def prefetch(self) -> None:
        """Pages stay where they are."""


class SparseCache(Cache):
    """Paged KV cache under a policy. Made by `sparsekv.new_cache` or by a patched `generate`."""

    def __init__(
        self,
        policy: Policy,
        budget: int | float,
        layers: Sequence[LayerSpec],
        *,
        page_size: int = 16,
        sink_shift: SinkShift | None = None,
        kv_dtype: str | None = None,
        defer_eviction: bool = False,
        parts: ModelParts | None = None,
    ) -> None:
        self.state = SparseState(
            policy, budget, layers, page_size=page_size, sink_shift=sink_shift,
            kv_dtype=kv_dtype, defer_eviction=defer_eviction, parts=parts,
        )  # fmt: skip
        self.handover = _Handover()
        super().__init__(
            layers=[SparseLayer(self.state, i, self.handover) for i in range(len(layers))]
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As every cache.

        Raises:
            ValueError: a layer that the model of this cache does not have.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"expected a cache of this model, made by sparsekv.new_cache, got one of "
                f"{len(self.layers)} layers for layer {layer_idx}"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def report(self) -> CacheReport:
        """Tokens seen and kept, bytes that exist, pages. Printable; `.to_dict()` for JSON."""
        return make_report(self.state)

    def kept_positions(self, layer: int, row: int = 0, head: int = 0) -> list[int]:
        """Original token columns (padding counted) still cached, ascending.

        Raises:
            ValueError: a layer, row or KV head that the cache does not have.
        """
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"expected a layer in 0 .. {len(self.layers) - 1}, got {layer}")
        if not self.state.tokens.size:
            return []
        store, local = self.state.store(layer)
        rows, heads = store.lens[local].shape
        for name, value, number in (("row", row, rows), ("head", head, heads)):
            if not 0 <= value < number:
                limit = ">= 0" if value < 0 else f"below {number}"
                raise ValueError(f"expected {name} {limit}, got {value}")
        count = int(store.lens[local, row, head])
        positions = store.view(local, "positions")[row, head, :count]
        return sorted(self.state.columns(row, positions.cpu().numpy()).tolist())

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.handover.unread = None
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a fork of old row beam_idx[i]; pages are shared until written."""
        self.state.select_rows(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.state.select_rows(np.repeat(np.arange(len(self.state.tokens)), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of `indices`, a bool mask or row numbers."""
        rows = torch.arange(len(self.state.tokens), device=indices.device)[indices]
        self.state.select_rows(rows.cpu().numpy())

    def activate_past_recording(self) -> None:
        """From now on remember drafts, so that `crop` can take them back exactly."""
        self.state.recording = True

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Whether drafts are remembered."""
        return self.state.recording

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last -tokens_to_remove columns; 0 accepts every draft.

        Raises:
            ValueError: a positive number other than the length seen (an absolute length, in the
                old convention), or tokens that were not recorded.
        """
        number = int(tokens_to_remove)
        if number > 0:  # transformers < 5.20 passes the length to keep
            number -= self.get_seq_length()
        if number > 0:
            raise ValueError(f"expected at most {self.get_seq_length()} columns to keep")
        rollback(self.state, -number)
