"""Answers to what policies ask about keys and values (`policies/features.py`), fp32 [B, HK, S].

Everything runs over tiles of tokens, so that what exists beside K and V is a few numbers a token
and one tile: below 64 MB for 131072 tokens of an 8B model's layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import upload
from sparsekv.headwise import Keys, Queries, Scores
from sparsekv.kernels.projected_norm import projected_norm
from sparsekv.kernels.similarity import key_similarity
from sparsekv.policies.features import (
    ExpectedProbability,
    Feature,
    GroupMaxWindow,
    KeyAnchor,
    KeyNorm,
    KeySimilarity,
    ProjectedValueNorm,
    ValueNorm,
)

# fp32 numbers in a tile of keys: 8 MiB.
_TILE = 1 << 21
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Source:
    """What the features of one layer are made of.

    keys: those of a row stand in columns pads .. pads + held - 1, in ascending position; what is
    in other columns may be anything.
    pads: int [B], on the host.
    last: the last `rows` queries, post-RoPE; those that a row does not have sit at -1.
    ahead: (mu, Sigma) that an `ExpectedProbability` is made of, see `QueryMoments.ahead`.
    projection: W_O of the layer, [D_model, HQ * D].
    """

    keys: Keys
    pads: np.ndarray
    scores: Scores
    last: Callable[[int], Queries]
    ahead: Callable[[ExpectedProbability], tuple[Tensor, Tensor | None]]
    projection: Callable[[], Tensor]

    def rank(self) -> Tensor:
        """int [B, 1, S]: the index of a column's key in its row; below 0 in padding."""
        column = torch.arange(self.keys.k.shape[2], device=self.keys.k.device)
        return (column - self._pads()[:, None])[:, None]

    def first_column(self, x: Tensor) -> Tensor:
        """x [B, HK, S] by column -> by rank; junk beyond what is held."""
        if not self.pads.any():
            return x
        column = torch.arange(x.shape[-1], device=x.device) + self._pads()[:, None]
        index = column.clamp_max(x.shape[-1] - 1)[:, None]
        return x.gather(-1, index.expand_as(x))

    def _pads(self) -> Tensor:
        return upload(self.pads.astype(np.int64), self.keys.k.device)


@torch.no_grad()
def compute(feature: Feature, source: Source) -> Tensor:
    """The answer to one question, fp32 [B, HK, S] by rank.

    Raises:
        ValueError: a feature that the runtime does not know.
    """
    if type(feature) not in _ANSWERS:
        known = ", ".join(cls.__name__ for cls in _ANSWERS)
        raise ValueError(f"expected a feature of {known}, got {feature!r}")
    return _ANSWERS[type(feature)](feature, source)


def _tiles(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the token axis of x [B, HK, S, D], each with its tile in fp32."""
    step = max(1, _TILE // (x.shape[0] * x.shape[1] * x.shape[3]))
    for start in range(0, x.shape[2], step):
        at = slice(start, start + step)
        yield at, x[:, :, at].float()


def _norms(x: Tensor) -> Tensor:
    """|x|_2 of [B, HK, S, D] over the last axis."""
    out = x.new_empty(x.shape[:3], dtype=torch.float32)
    for at, tile in _tiles(x):
        out[..., at] = torch.linalg.vector_norm(tile, dim=-1)
    return out


def _key_norm(feature: KeyNorm, source: Source) -> Tensor:
    return source.first_column(_norms(source.keys.k))


def _value_norm(feature: ValueNorm, source: Source) -> Tensor:
    return source.first_column(_norms(source.keys.v))


def _key_anchor(feature: KeyAnchor, source: Source) -> Tensor:
    k, rank = source.keys.k, source.rank()
    held = source.keys.held[..., None]
    norms = _norms(k).clamp_min(_TINY)
    inside = (rank >= 0) & (rank < held)
    anchor = k.new_zeros(*k.shape[:2], 1, k.shape[3], dtype=torch.float32)
    for at, tile in _tiles(k):
        own = torch.where(inside[..., at, None], tile, 0.0)  # what is not held may be NaN
        anchor += torch.matmul(1 / norms[..., None, at].nan_to_num(1.0), own)
    anchor /= torch.linalg.vector_norm(anchor, dim=-1, keepdim=True).clamp_min(_TINY)
    out = torch.empty_like(norms)
    for at, tile in _tiles(k):
        out[..., at] = torch.matmul(tile, anchor.transpose(-1, -2))[..., 0]
    return source.first_column(out.div_(norms))


def _projected_value_norm(feature: ProjectedValueNorm, source: Source) -> Tensor:
    v = source.keys.v
    return source.first_column(projected_norm(v, source.projection().to(v.dtype)))


def _key_similarity(feature: KeySimilarity, source: Source) -> Tensor:
    keys = source.keys
    offsets = upload(source.pads.astype(np.int32), keys.k.device) if source.pads.any() else None
    return key_similarity(keys.k, keys.held.contiguous(), feature.threshold, offsets=offsets)


def _expected_probability(feature: ExpectedProbability, source: Source) -> Tensor:
    k, rank = source.keys.k, source.rank()
    heads, c = k.shape[1], source.scores.softmax_scale
    mu, sigma = source.ahead(feature)
    mu = mu.unflatten(1, (heads, -1))[..., None]  # [B, HK, G, D, 1]
    group = mu.shape[2]
    inside = (rank >= 0) & (rank < source.keys.held[..., None])
    visible = inside & (source.keys.positions >= feature.sinks)
    z = k.new_empty(k.shape[0], heads, group, k.shape[2], dtype=torch.float32)
    lse = z.new_full(z.shape[:3], -torch.inf)
    for at, tile in _tiles(k):
        for h in range(group):
            logits = c * torch.matmul(tile, mu[:, :, h])[..., 0]
            if sigma is not None:
                spread = torch.matmul(tile, sigma.unflatten(1, (heads, -1))[:, :, h])
                logits += 0.5 * c * c * spread.mul_(tile).sum(-1)
            z[:, :, h, at] = logits.masked_fill_(~visible[..., at], -torch.inf)
        lse = torch.logaddexp(lse, z[..., at].logsumexp(-1))
    out = z.new_zeros(k.shape[:3])
    for h in range(group):
        # A row of sinks only has nothing to spread over, and lse = -inf.
        z[:, :, h].sub_(lse[:, :, h, None].clamp_min(torch.finfo(torch.float32).min)).exp_()
        out += z[:, :, h]
    return source.first_column(out.div_(group))


def _group_max_window(feature: GroupMaxWindow, source: Source) -> Tensor:
    k, rank = source.keys.k, source.rank()
    queries = source.last(feature.rows)
    q = queries.q.float().unflatten(1, (k.shape[1], -1))  # [B, HK, G, R, D]
    older = (rank >= 0) & (rank < (source.keys.held - feature.rows)[..., None])  # [B, HK, S]
    real = (queries.positions >= 0)[:, None, :, None]  # [B, 1, R, 1]
    lse = q.new_full((*k.shape[:2], q.shape[3]), -torch.inf)
    for at, tile in _tiles(k):
        x = _group_max(q, tile, older[..., at], source.scores)
        lse = torch.logaddexp(lse, x.logsumexp(-1))
    lse = lse.clamp_min(torch.finfo(torch.float32).min)[..., None]
    out = q.new_zeros(k.shape[:3])
    for at, tile in _tiles(k):
        p = _group_max(q, tile, older[..., at], source.scores).sub_(lse).exp_()
        out[..., at] = torch.where(real, p, 0.0).sum(2)
    return source.first_column(out / real.sum(2).clamp_min(1))


def _group_max(q: Tensor, k: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """max_h x_hij over the group: q [B, HK, G, R, D], k [B, HK, t, D] -> [B, HK, R, t]."""
    largest = torch.matmul(q[:, :, 0], k.transpose(-1, -2))
    for h in range(1, q.shape[2]):
        torch.maximum(largest, torch.matmul(q[:, :, h], k.transpose(-1, -2)), out=largest)
    largest *= scores.softmax_scale
    if scores.softcap is not None:
        largest = scores.softcap * torch.tanh(largest / scores.softcap)
    return largest.masked_fill_(~visible[:, :, None], -torch.inf)


_ANSWERS: Mapping[type[Feature], Callable[[Any, Source], Tensor]] = MappingProxyType(
    {
        KeyNorm: _key_norm,
        KeyAnchor: _key_anchor,
        ValueNorm: _value_norm,
        ProjectedValueNorm: _projected_value_norm,
        ExpectedProbability: _expected_probability,
        GroupMaxWindow: _group_max_window,
        KeySimilarity: _key_similarity,
    }
)
