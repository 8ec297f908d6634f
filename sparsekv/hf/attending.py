"""A cache that stores nothing: each layer attends by a function of ours.

What stands before the tokens of a forward, and which of these are padding, is that function's
business: the model is told their positions and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from sparsekv.device import device_of
from sparsekv.headwise import Scores
from sparsekv.hf.attention import KEY_MARK, OWN_CACHE
from sparsekv.hf.cache import PassingLayer
from sparsekv.hf.check import layer_specs

# (layer, q [B, HQ, T, D], k and v [B, HK, T, D], scores, window) -> [B, T, HQ, D]
Attend = Callable[[int, Tensor, Tensor, Tensor, Scores, int | None], Tensor]


class AttendingCache(Cache):
    """For one forward of a patched model, without an attention mask, with position_ids."""

    def __init__(self, model: PreTrainedModel, attend: Attend) -> None:
        specs = enumerate(layer_specs(model))
        super().__init__(layers=[_Layer(i, spec.window, attend) for i, spec in specs])


class _Layer(PassingLayer):
    """One layer of an `AttendingCache`. window: of its model's config."""

    def __init__(self, layer: int, window: int | None, attend: Attend) -> None:
        super().__init__()
        self.layer, self.window, self.by = layer, window, attend

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the key so that the attention function finds this layer, and return both."""
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
        """What the function says."""
        # It may keep the key, from which the mark would lead back to the function: a cycle that no
        # garbage collection finds, since tensors are referred to from C++, too.
        delattr(k, KEY_MARK)
        with device_of(q):
            return self.by(self.layer, q, k, v, scores, self.window)

    def get_seq_length(self) -> int:
        """Nothing is stored."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, the mark of our caches)."""
        return query_length, OWN_CACHE
