"""The truth of these tests: every layer's softmax matrix, T x T, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "recorded"


@dataclass(frozen=True)
class Layer:
    """p [HQ, T, T] over the tokens, sink [HQ, T] what a learned sink took; v [HK, T, D], w_o.

    stream [T, D_model] behind the layer.
    """

    p: Tensor
    sink: Tensor
    v: Tensor
    w_o: Tensor
    window: int | None
    stream: list[Tensor]

    @property
    def kv_heads(self) -> int:
        return len(self.v)

    def by_kv_head(self, values: Tensor) -> Tensor:
        """Mean over the heads of a group, [HQ, ...] -> [HK, ...]."""
        return values.unflatten(0, (self.kv_heads, -1)).mean(1)


def record(model: Any, ids: Tensor) -> list[Layer]:
    """The layers of one dense forward of ids [1, T]."""
    layers: list[Layer] = []
    sliding = getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None)

    def attention(module, q, k, v, mask, scaling=None, softcap=None, s_aux=None, **kwargs):
        layer = module.layer_idx
        q, k, v = q[0].double(), k[0].double(), v[0].double()
        group, tokens = len(q) // len(k), q.shape[1]
        x = q @ k.repeat_interleave(group, 0).transpose(1, 2)
        x = x * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        age = torch.arange(tokens)[:, None] - torch.arange(tokens)
        slides = kinds is None or kinds[layer] == "sliding_attention"
        window = sliding if slides else None
        hidden = (age < 0) | (age >= (window or tokens))
        x = x.masked_fill(hidden, -math.inf)
        sink = torch.full((len(q), tokens, 1), -math.inf, dtype=torch.float64)
        if s_aux is not None:
            sink = s_aux.double()[:, None, None].expand(-1, tokens, 1)
        p = torch.cat([x, sink], -1).softmax(-1)
        w_o = module.o_proj.weight.detach().double()
        layers.append(Layer(p[..., :-1], p[..., -1], v, w_o, window, []))
        out = p[..., :-1] @ v.repeat_interleave(group, 0)
        return out.transpose(0, 1)[None].to(model.dtype), None

    def behind(module, args, output):
        layers[module.self_attn.layer_idx].stream.append(output[0].double())

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    handles = [layer.register_forward_hook(behind) for layer in model.model.layers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    model.set_attn_implementation(before)
    return layers
