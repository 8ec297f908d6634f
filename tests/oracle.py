"""Attention written the obvious way, in float64: the truth that kernels and references answer to.

Independent of the package: one dense matrix per sequence, one mask written from its definition.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def sequences(t: dict[str, Any]) -> list[tuple[slice, slice]]:
    """(query slice, key slice) of every sequence of a packed problem."""
    slices = []
    for side in ("q", "k"):
        starts, used = t[f"cu_seqlens_{side}"].tolist(), t.get(f"seqused_{side}")
        lengths = [e - s for s, e in pairwise(starts)] if used is None else used.tolist()
        slices.append([slice(s, s + n) for s, n in zip(starts[:-1], lengths, strict=True)])
    return list(zip(*slices, strict=True))


def dense_logits(t: dict[str, Any], sq: slice, sk: slice) -> Tensor:
    """Logits [HQ, nq, nk] of one sequence after scale, softcap and mask (-inf)."""
    q, k = t["q"][sq].cpu().double(), t["k"][sk].cpu().double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    x = torch.einsum("ihd,jhd->hij", q, k) * t["softmax_scale"]
    if t.get("softcap") is not None:
        x = t["softcap"] * torch.tanh(x / t["softcap"])
    if t.get("positions_q") is not None:
        i, j = t["positions_q"][sq].cpu()[:, None], t["positions_k"][sk].cpu()[None]
    else:
        i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None]
        if t.get("align", "right") == "right":
            i = i + k.shape[0] - q.shape[0]
    seen = torch.ones(x.shape[1:], dtype=torch.bool)
    if t.get("causal", True):
        seen &= j <= i
    if t.get("window") is not None:
        seen &= i - j < t["window"]
    return x.masked_fill(~seen, -torch.inf)


def row_lse(t: dict[str, Any], x: Tensor) -> Tensor:
    """lse [HQ, nq] of logits [HQ, nq, nk], sink included; -inf where no key is seen."""
    empty = (x == -torch.inf).all(-1)
    if t.get("sinks") is not None:
        sink = t["sinks"].cpu().double()[:, None, None].expand(*x.shape[:2], 1)
        x = torch.cat([x, sink], -1)
    return torch.logsumexp(x, -1).masked_fill(empty, -torch.inf)


def attention(t: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, float]:
    """(out, lse, sum_j p |v_j| shaped like out, max |finite logit|) of a packed problem."""
    out = torch.zeros(t["q"].shape, dtype=torch.float64)
    weight, top = torch.zeros_like(out), 0.0
    lse = torch.full((out.shape[1], out.shape[0]), -torch.inf, dtype=torch.float64)
    for sq, sk in sequences(t):
        x = dense_logits(t, sq, sk)
        lse[:, sq] = row_lse(t, x)
        p = probabilities(x, lse[:, sq])
        v = t["v"][sk].cpu().double().repeat_interleave(x.shape[0] // t["v"].shape[1], dim=1)
        out[sq] = torch.einsum("hij,jhd->ihd", p, v)
        weight[sq] = torch.einsum("hij,jhd->ihd", p, v.abs())
        top = max(top, float(x.masked_fill(x == -torch.inf, 0).abs().amax())) if x.numel() else top
    return out, lse, weight, top


def probabilities(x: Tensor, lse: Tensor) -> Tensor:
    """p [HQ, nq, nk]; rows with lse = -inf are 0."""
    return (x - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp()
