"""Damage: how far a layer's output moves when its later queries lose all but k keys of a prompt.

    d_hi(k) = |W_h (o_i(k) - o_i)|^2

i: the queries behind the prompt; o_i(k): attention over the k best keys of the prompt and all keys
behind it, a learned sink included; W_h: the output projection's columns of KV head h's queries.

All k of a grid cost one attention: the keys between two grid points are attended by themselves, by
the prefill kernel, and joined with what is there by the log-sum-exp,

    o <- (exp(lse) o + exp(lse') o') / exp(lse'')        lse'' = log(exp(lse) + exp(lse'))

so that the grid is walked once from its smallest count to all keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsekv.hf.watch import Attended, attention
from sparsekv.kernels.prefill import prefill_attention


def damage(seen: Attended, order: Tensor, slots: np.ndarray, w_o: Tensor) -> Tensor:
    """d fp32 [HK, F, K] for counts `slots` int [K]; order int64 [HK, n]: the prompt's keys, best
    first.

    w_o [D_model, HQ * D] as nn.Linear keeps it.
    """
    heads, tokens = order.shape
    true = _by_head(seen.out[tokens:], heads).float()
    weights = w_o.float().unflatten(1, (heads, -1)).permute(1, 2, 0)  # [HK, G D, D_model]
    q = _by_head(seen.q[tokens:], heads)
    index = order[..., None].expand(-1, -1, seen.k.shape[-1])
    joined = _behind(seen, tokens, heads)
    found, before = [], 0
    for count in slots.tolist():
        own = index[:, before:count]
        best = [x[:tokens].transpose(0, 1).gather(1, own) for x in (seen.k, seen.v)]
        joined = _join(joined, _over(seen, q, best[0], best[1]))
        before = count
        error = (joined[0] - true).flatten(2) @ weights  # [HK, F, D_model]
        found.append(error.square().sum(-1))
    return torch.stack(found, -1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[F, HQ, D] -> [HK, F, G, D]."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1)


def _behind(seen: Attended, tokens: int, heads: int) -> tuple[Tensor, Tensor]:
    """Attention over the keys behind the prompt and the sink: out [HK, F, G, D], lse [HK, F, G]."""
    q, k, v = (x[tokens:].transpose(0, 1)[None] for x in (seen.q, seen.k, seen.v))
    out, lse = attention(q, k, v, seen.scores)
    return _by_head(out, heads).float(), _by_head(lse.T[..., None], heads)[..., 0]


def _over(seen: Attended, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of q [HK, F, G, D] over keys [HK, s, D] of its own head; as `_behind`, no sink."""
    heads, rows, group, dim = q.shape
    sequence = torch.arange(heads + 1, dtype=torch.int32, device=q.device)
    out, lse = prefill_attention(
        q.reshape(-1, group, dim), k.reshape(-1, 1, dim), v.reshape(-1, 1, dim),
        sequence * rows, sequence * k.shape[1], rows, k.shape[1], causal=False,
        softmax_scale=seen.scores.softmax_scale, softcap=seen.scores.softcap,
    )  # fmt: skip
    return out.view(heads, rows, group, dim).float(), lse.T.reshape(heads, rows, group)


def _join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both."""
    lse = torch.logaddexp(one[1], other[1])
    shares = [torch.exp(part[1] - lse)[..., None] for part in (one, other)]
    return one[0] * shares[0] + other[0] * shares[1], lse
