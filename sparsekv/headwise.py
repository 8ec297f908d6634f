"""Attention of many queries over keys that differ per KV head.

After eviction every (row, KV head) holds its own tokens, so each becomes a sequence of the varlen
kernels with G query heads and one KV head, and visibility is decided by position, not by order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekv.kernels.prefill import prefill_attention
from sparsekv.policies.base import Need
from sparsekv.statistics import statistic


@dataclass(frozen=True)
class Scores:
    """How logits are made: x = softmax_scale * q.k, then softcap; sinks [HQ] join the softmax."""

    softmax_scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Queries:
    """q [B, HQ, T, D] at positions int32 [B, T]; the real ones are the last lengths [B]."""

    q: Tensor
    positions: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Keys:
    """k, v [B, HK, S, D] at positions int32 [B, HK, S]; the first held [B, HK] are real."""

    k: Tensor
    v: Tensor
    positions: Tensor
    held: Tensor


def headwise_attention(
    queries: Queries, keys: Keys, scores: Scores, window: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, T, HQ, D] and lse fp32 [B, HQ, T], sinks included."""
    batch, heads, _, dim = keys.k.shape
    flat, lengths, geometry = _sequences(queries, keys, scores, window)
    out, lse = prefill_attention(flat, *_flat_keys(keys), *lengths, **geometry)
    tokens, group = queries.q.shape[2], flat.shape[1]
    lse = lse.view(group, batch, heads, tokens).permute(1, 2, 0, 3).flatten(1, 2)
    out = out.view(batch, heads, tokens, group, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    if scores.sinks is None:
        return out, lse
    # The kernel's sinks are per head of a sequence; here they differ between sequences.
    with_sink = torch.logaddexp(lse, scores.sinks.float()[:, None])
    share = torch.exp(lse - with_sink).transpose(1, 2)[..., None]
    return (out * share).to(out.dtype), with_sink


def headwise_columns(
    queries: Queries,
    keys: Keys,
    lse: Tensor,
    need: Need,
    scores: Scores,
    window: int | None,
    layer: int,
) -> Tensor:
    """The statistic `need` over the given queries, fp32 [B, HK, S]. lse fp32 [B, HQ, T].

    layer: of the noise. "count" wants keys in ascending position, what is not held beyond them.
    """
    batch, heads, slots, _ = keys.k.shape
    flat, lengths, geometry = _sequences(queries, keys, scores, window)
    flat_lse = lse.unflatten(1, (heads, -1)).permute(2, 0, 1, 3).flatten(1).contiguous()

    def seen() -> Tensor:
        at = queries.positions[:, None].expand(-1, heads, -1).contiguous()
        found = torch.searchsorted(keys.positions.contiguous(), at, right=True)
        return torch.minimum(found, keys.held[..., None])

    own = replace(need, group="mean") if need.group == "layer_mean" else need
    sequence = torch.arange(batch * heads, dtype=torch.int32, device=flat.device)
    columns = statistic(
        own, flat, _flat_keys(keys)[0], flat_lse, lengths, seen, layer, geometry,
        first_heads=sequence % heads * flat.shape[1],
    ).view(batch, heads, slots)  # fmt: skip
    if need.group == "layer_mean":
        columns = columns.mean(1, keepdim=True).expand(-1, heads, -1)
    return columns


def _flat_keys(keys: Keys) -> tuple[Tensor, Tensor]:
    return tuple(x.flatten(0, 2)[:, None] for x in (keys.k, keys.v))  # type: ignore[return-value]


def _sequences(queries: Queries, keys: Keys, scores: Scores, window: int | None):
    """Flat queries [B*HK*T, G, D], the positional lengths arguments, the keyword arguments."""
    batch, heads, slots, dim = keys.k.shape
    tokens = queries.q.shape[2]
    flat = (
        queries.q.unflatten(1, (heads, -1))
        .transpose(2, 3)
        .reshape(-1, queries.q.shape[1] // heads, dim)
    )
    used = queries.lengths.int().repeat_interleave(heads)
    sequence = torch.arange(batch * heads + 1, dtype=torch.int32, device=flat.device)
    start = sequence * tokens
    start[:-1] += tokens - used
    lengths = (start, sequence * slots, tokens, slots)
    geometry = {
        "softmax_scale": scores.softmax_scale,
        "softcap": scores.softcap,
        "window": window,
        "seqused_q": used,
        "seqused_k": keys.held.flatten().int(),
        "positions_q": queries.positions.int().repeat_interleave(heads, 0).flatten(),
        "positions_k": keys.positions.flatten().int(),
    }
    return flat, lengths, geometry
