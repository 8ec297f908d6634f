"""What the decode tests share: queries, a float64 oracle, error bounds, the merge of parts."""

from __future__ import annotations

import math

import torch
from paged_problems import DEVICE, Paged, values
from torch import Tensor


def queries(seed: int, cache: Paged, group: int, dist: str = "normal") -> Tensor:
    gen = torch.Generator().manual_seed(seed + 1)
    B, HK, _, D = cache.k.shape
    return values(dist, (B, HK * group, D), gen).to(cache.k.dtype).to(DEVICE)


def arguments(q: Tensor, cache: Paged) -> tuple[Tensor, ...]:
    return q, cache.k_pages, cache.v_pages, cache.block_table, cache.lens


def oracle(q, cache, *, softmax_scale, softcap=None, sinks=None, window=None, q_positions=None):
    """(out, lse, p [B, HQ, S], max |logit|) in float64, one head at a time, from the dense copy."""
    B, HQ, D = q.shape
    G, S = HQ // cache.k.shape[1], cache.k.shape[2]
    out = torch.zeros(B, HQ, D, dtype=torch.float64)
    lse = torch.full((B, HQ), -torch.inf, dtype=torch.float64)
    p = torch.zeros(B, HQ, S, dtype=torch.float64)
    top = 0.0
    for b, h in ((b, h) for b in range(B) for h in range(HQ)):
        n = int(cache.lens[b, h // G])
        slots = torch.arange(n)
        if window is not None:
            pos = cache.pos[b, h // G, :n].cpu()
            slots = slots[int(q_positions[b]) - pos < window]
        if len(slots) == 0:
            continue
        k = cache.k[b, h // G].cpu().double()[slots]
        x = (k * q[b, h].cpu().double()).sum(-1) * softmax_scale
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        logits = x if sinks is None else torch.cat([x, sinks[h : h + 1].cpu().double()])
        lse[b, h] = torch.logsumexp(logits, 0)
        p[b, h, slots] = torch.exp(x - lse[b, h])
        out[b, h] = p[b, h, slots] @ cache.v[b, h // G].cpu().double()[slots]
        top = max(top, float(logits.abs().max()))
    return out, lse, p, top


def assert_close(got, want, dtype: torch.dtype) -> None:
    """The error model of kernels.md section 7, growing with the largest logit."""
    out, lse, top = got[0].cpu().double(), got[1].cpu().double(), want[3]
    assert torch.isfinite(out).all()
    bound = {torch.float32: 5e-6 * (1 + top / 10), torch.float16: 1e-3, torch.bfloat16: 8e-3}
    scale = want[0].norm().clamp(min=1e-2 * math.sqrt(out.numel()))
    assert (out - want[0]).norm() <= bound[dtype] * scale
    empty = want[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert ((lse - want[1])[~empty].abs() <= 2e-6 * (1 + top)).all()


def reduce_group(p: Tensor, probs: str, heads: int) -> Tensor:
    if probs == "none":
        return p
    grouped = p.unflatten(1, (heads, -1))
    return grouped.amax(2) if probs == "max" else getattr(grouped, probs)(2)


def assert_probs(got: Tensor, want: Tensor) -> None:
    """Relative error of fp16, plus what fp16 cannot hold (half its smallest subnormal a head)."""
    assert got.shape == want.shape and got.dtype == torch.float32
    assert ((got.cpu().double() - want).abs() <= 1e-3 * want + 1e-6).all()


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a union of keys from attention over its parts."""
    lse = torch.logsumexp(torch.stack(lses), 0)
    safe = lse.masked_fill(lse == -torch.inf, 0)
    weights = [torch.exp(part - safe)[..., None] for part in lses]
    return sum(w * o for w, o in zip(weights, outs, strict=True)), lse
