"""The attention and mask functions that transformers calls for a patched model.

A key tensor that a `SparseCache` has seen carries the cache layer it belongs to; any other key
(another cache class, use_cache=False, training) is attended densely, as the caller asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparsekv.headwise import Scores

NAME = "sparsekv"
KEY_MARK = "_sparsekv_layer"
WINDOW_MARK = "_sparsekv_window"
# The kv_offset by which the mask function knows that the cache is ours: no column is negative.
OWN_CACHE = -1
# The same for the cache of a traced forward, see `sparsekv.hf.traced`: its padding mask has a third
# axis, and one axis where there is no padding.
TRACED_CACHE = -2
# Arguments of other attention variants that would change the result if they were ignored.
_UNSUPPORTED = ("position_bias", "indices", "block_indices", "sinks", "cu_seq_lens_q")


def register() -> None:
    """Make "sparsekv" known to transformers. Harmless to repeat; models are not touched."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, HQ, T, D], key and value [B, HK, T, D] -> [B, T, HQ, D].

    Raises:
        ValueError: an attention variant that is not supported, or a mask that is no padding mask.
    """
    given = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if given:
        raise ValueError(f"expected plain causal attention, got {', '.join(given)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = s_aux.to_local() if hasattr(s_aux, "to_local") else s_aux  # type: ignore[union-attr]
    if attention_mask is not None and attention_mask.ndim in (1, 3):
        mask = attention_mask[0] if attention_mask.ndim == 3 else None
        return torch.ops.sparsekv.attend(
            query, key, value, mask, module.layer_idx, scale, softcap, sliding_window, sinks
        ), None
    scores = Scores(scale, softcap, sinks)
    causal = kwargs.get("is_causal")
    inputs = (query, key, value, attention_mask)
    return _attend(module, *inputs, scores, sliding_window, dropout, causal), None


@torch.compiler.disable
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scores: Scores,
    sliding_window: int | None,
    dropout: float,
    is_causal: bool | None,
) -> Tensor:
    """By the cache that the key is marked with, or densely. Returns [B, T, HQ, D]."""
    layer = getattr(key, KEY_MARK, None)
    if layer is not None:
        if not getattr(module, "is_causal", True) or is_causal is False:
            raise ValueError("expected causal attention, got bidirectional attention")
        window = sliding_window or getattr(attention_mask, WINDOW_MARK, None)
        return layer.attend(query, key, value, attention_mask, scores, window)
    if scores.softcap is None and scores.sinks is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout,
            scaling=scores.softmax_scale, is_causal=is_causal,
        )[0]  # fmt: skip
    return _dense(query, key, value, attention_mask, scores)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores: Scores,
) -> Tensor:
    """Dense attention with softcap and sinks, which SDPA cannot do. Returns [B, T, HQ, D]."""
    scale, softcap, sinks = scores.softmax_scale, scores.softcap, scores.sinks
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    visible = visible.tril(k.shape[-2] - q.shape[-2]) if mask is None else mask
    if visible.dtype == torch.bool:
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    else:
        logits = logits + visible
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[-2], 1)
        logits = torch.cat([logits, sink.to(logits.dtype)], dim=-1)
    probs = logits.float().softmax(-1).to(v.dtype)[..., : k.shape[-2]]
    return torch.matmul(probs, v).transpose(1, 2).contiguous()


def attention_mask(
    *,
    q_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """For our cache the 2-D padding mask itself; for any other what SDPA would get.

    Decode steps hand theirs on, too, so that a mask which hides cached tokens is refused. That is
    one wait for the device a step, and none where there is no mask: in steps that `generate`
    captures in a CUDA graph.

    Raises:
        ValueError: a custom mask function. The mask itself is checked by `real_lengths`.
    """
    if kv_offset == TRACED_CACHE:
        none = torch.empty(0, dtype=torch.bool, device=kwargs.get("device"))
        return none if attention_mask is None else attention_mask[None]
    if kv_offset != OWN_CACHE:
        return sdpa_mask(
            q_length=q_length, kv_offset=kv_offset, attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, **kwargs,
        )  # fmt: skip
    if use_vmap or not allow_is_causal_skip:
        raise ValueError("expected a plain causal mask, got a custom mask function")
    if attention_mask is not None and kwargs.get("local_size") is not None:
        # Models that build a sliding mask need not pass the window on; `self_test` asks for it.
        # A view: the mask of the full layers may be the same object.
        attention_mask = attention_mask.view_as(attention_mask)
        setattr(attention_mask, WINDOW_MARK, kwargs["local_size"])
    return attention_mask
