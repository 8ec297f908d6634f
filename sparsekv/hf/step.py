"""A decode step that torch.compile can trace whole: norms, RoPE and MLP fuse, attention is one op.

Tracing must not see a cache that counts and evicts. So the traced forward gets a `StepCache`, which
hands K and V through and answers every question about lengths with a constant; its mask is an empty
tensor, by which the attention function knows to call the opaque op `sparsekv::decode_step`. When
the compiled code runs, the op finds the real cache in the context that `CompiledStep` opened.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from sparsekv.headwise import Scores
from sparsekv.hf.attention import STEP_CACHE
from sparsekv.hf.cache import SparseCache, SparseLayer
from sparsekv.hf.compat import cache_key

_RUNNING: ContextVar[SparseCache] = ContextVar("the cache of the compiled step that runs")
_OP = "sparsekv::decode_step"


def register_step() -> None:
    """Define the op, once a process."""
    if hasattr(torch.ops.sparsekv, "decode_step"):
        return
    torch.library.custom_op(_OP, _decode_step, mutates_args=())
    torch.library.register_fake(_OP, _empty_output)


def _decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention and eviction of one layer. q [B, HQ, 1, D], k and v [B, HK, 1, D]."""
    own = cast(SparseLayer, _RUNNING.get().layers[layer])
    return own.attend(q, k, v, None, Scores(softmax_scale, softcap, sinks), window)


def _empty_output(q: Tensor, *args: Any) -> Tensor:
    batch, heads, tokens, head_dim = q.shape
    return q.new_empty(batch, tokens, heads, head_dim)


class StepLayer(CacheLayerMixin):
    """One layer of a `StepCache`."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to find."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """A constant: a model that needs the length is told it by position_ids."""
        return 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(a constant, the mark of this cache)."""
        return query_length, STEP_CACHE

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class StepCache(Cache):
    """What the traced forward takes for its cache."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[StepLayer() for _ in range(num_layers)])


class CompiledStep:
    """The decode forward of a model, compiled once for every batch size.

    Calls run the op's Python, so they are made to be captured in a CUDA graph, not to be fast.
    warm: batch sizes that have been compiled.
    """

    def __init__(self, **options: Any) -> None:
        register_step()
        self.warm: set[int] = set()
        self._step = torch.compile(_forward, fullgraph=True, dynamic=False, **options)

    def __call__(self, model: PreTrainedModel, inputs: dict[str, Any], cache: SparseCache) -> Any:
        """One step of all layers of `cache`; the output carries `cache`."""
        key = cache_key(model)
        traced = inputs | {key: StepCache(len(cache.layers)), "use_cache": True}
        token = _RUNNING.set(cache)
        try:
            output = self._step(model, traced)
        finally:
            _RUNNING.reset(token)
        self.warm.add(len(inputs["input_ids"]))
        output[key] = cache
        return output


def _forward(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    """What is traced. The model is an argument: a copy of a patched model runs its own weights."""
    return model.forward(**inputs, return_dict=True)
