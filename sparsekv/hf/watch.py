"""`watch`: one text through a model with dense attention, and every layer shown to a function.

What measures a model (gates, sink shares, plans) needs the queries and keys of its attention after
RoPE. The function gets those of one layer at a time, beside its output and log-sum-exp; nothing is
cached, so a long text costs what its forward costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.device import device_of
from sparsekv.headwise import Scores
from sparsekv.hf.cache import SparseCache, SparseLayer
from sparsekv.hf.check import evaluating, layer_specs
from sparsekv.hf.compat import cache_key, tp_size
from sparsekv.hf.patch import is_patched, patch, unpatch
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.policies import Full


@dataclass(frozen=True)
class Attended:
    """What one layer attended: q [T, HQ, D], k and v [T, HK, D] of one row, after RoPE.

    out [T, HQ, D] and lse fp32 [HQ, T] of causal attention; a sink logit of the model is inside.
    window: tokens that a query of a sliding layer sees, itself included, or None.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scores: Scores
    window: int | None

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """cu_seqlens and longest sequences, for the packed kernels."""
        tokens = self.q.shape[0]
        cu = torch.tensor([0, tokens], dtype=torch.int32, device=self.q.device)
        return cu, cu, tokens, tokens

    @property
    def geometry(self) -> dict[str, Any]:
        """Keyword arguments that all of these kernels take."""
        return {
            "softmax_scale": self.scores.softmax_scale,
            "softcap": self.scores.softcap,
            "window": self.window,
        }


@torch.no_grad()
def watch(model: PreTrainedModel, ids: Tensor, see: Callable[[Attended], None]) -> None:
    """Run ids int64 [1, T] through the model densely; see(...) is called layer by layer.

    A patch on the model stays, or does not appear; so does its training mode.

    Raises:
        ValueError: a sharded model, one that `patch` refuses, or ids of another shape.
    """
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise ValueError(f"expected ids of one text [1, T], got {list(ids.shape)}")
    if tp_size(model) > 1:
        raise ValueError(f"expected an unsharded model, got one on {tp_size(model)} ranks")
    fresh = not is_patched(model)
    if fresh:
        patch(model, "full")
    try:
        with evaluating(model):
            cache = {cache_key(model): _WatchedCache(model, see)}
            model(input_ids=ids.to(model.device), use_cache=True, logits_to_keep=1, **cache)
    finally:
        if fresh:
            unpatch(model)


class _WatchedCache(SparseCache):
    """Attends densely and keeps nothing."""

    def __init__(self, model: PreTrainedModel, see: Callable[[Attended], None]) -> None:
        super().__init__(Full(), 1, layer_specs(model))
        self.layers = [_WatchedLayer(self.state, i, see) for i in range(len(self.layers))]


class _WatchedLayer(SparseLayer):
    """One layer of a `_WatchedCache`."""

    def __init__(self, state: Any, layer: int, see: Callable[[Attended], None]) -> None:
        super().__init__(state, layer)
        self.see = see

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scores: Scores,
        window: int | None,
    ) -> Tensor:
        self.state.seen[self.layer] += q.shape[2]
        own = self.state.layers[self.layer].window
        with device_of(q):
            out, lse = attention(q, k, v, scores, window=own)
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            self.see(Attended(self.layer, q, k, v, out, lse, scores, own))
        return out[None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, *, sink: bool = True, **more: Any
) -> tuple[Tensor, Tensor]:
    """out [Tq, HQ, D] and lse [HQ, Tq] of one row, q [1, HQ, Tq, D], k and v [1, HK, Tk, D].

    sink: a sink logit of the model takes part. more: of `prefill_attention`.
    """
    tokens_q, tokens_k = q.shape[2], k.shape[2]
    cu_q, cu_k = (
        torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (tokens_q, tokens_k)
    )
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    with device_of(q):
        return prefill_attention(
            flat[0], flat[1], flat[2], cu_q, cu_k, tokens_q, tokens_k,
            softmax_scale=scores.softmax_scale, softcap=scores.softcap,
            sinks=scores.sinks if sink else None, **more,
        )  # fmt: skip
