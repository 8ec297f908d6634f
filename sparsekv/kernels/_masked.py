"""Packed sequences: argument checks, and for the references their masked logits in plain torch.

Sequence n holds the tokens cu[n] .. cu[n] + used[n]. Rows are walked in chunks only to bound
memory: each chunk comes with every key that any of its rows can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ._common import (
    DTYPES,
    check_dtype,
    check_heads,
    check_last_contiguous,
    check_shape,
    padded_head_dim,
)

Align = Literal["left", "right"]
MAX_TOKEN_STRIDE = 1 << 24  # elements; offsets inside a tile of up to 128 tokens are 32-bit
_CHUNK_ELEMENTS = 1 << 20  # logits held at a time: 4 MB in fp32, best of 0.5 to 16 MB on a CPU


@dataclass(frozen=True)
class Mask:
    """Visibility rule. Without positions, key j of nk is seen by query i of nq at i (+ nk - nq)."""

    causal: bool = True
    align: Align = "right"
    window: int | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None

    def check(self, num_q: int, num_k: int) -> None:
        """Raise ValueError for a rule that makes no sense; num_q, num_k: packed token counts."""
        if self.align not in ("left", "right"):
            raise ValueError(f"expected align to be 'left' or 'right', got {self.align!r}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"expected window >= 1 or None, got {self.window}")
        if (self.positions_q is None) != (self.positions_k is None):
            raise ValueError("expected both positions_q and positions_k or neither, got one")
        if self.positions_q is not None and self.positions_k is not None:
            if not self.causal:
                raise ValueError("expected causal=True with positions, got causal=False")
            for name, value, size in (
                ("positions_q", self.positions_q, num_q),
                ("positions_k", self.positions_k, num_k),
            ):
                check_shape(name, value, [size])
                check_dtype(name, value, torch.int32)
                check_last_contiguous(name, value)


def check_packed(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    softcap: float | None,
) -> None:
    """Raise ValueError unless q [Tq, HQ, D], k [Tk, HK, D] and the lengths fit together."""
    check_shape("q", q, [None, None, None])
    check_shape("k", k, [None, None, q.shape[2]])
    check_heads(q.shape[1], k.shape[1])
    padded_head_dim(q.shape[2])
    check_dtype("q", q, *DTYPES, *(() if q.is_cuda else (torch.float64,)))
    check_dtype("k", k, q.dtype)
    check_last_contiguous("q", q)
    check_last_contiguous("k", k)
    if k.stride(0) >= MAX_TOKEN_STRIDE:
        raise ValueError(f"expected k.stride(0) < {MAX_TOKEN_STRIDE}, got {k.stride(0)}")
    sequences = cu_seqlens_q.shape[0] - 1
    for name, x, size in (
        ("cu_seqlens_q", cu_seqlens_q, sequences + 1),
        ("cu_seqlens_k", cu_seqlens_k, sequences + 1),
        ("seqused_q", seqused_q, sequences),
        ("seqused_k", seqused_k, sequences),
    ):
        if x is not None:
            check_shape(name, x, [size])
            check_dtype(name, x, torch.int32)
            check_last_contiguous(name, x)  # an expanded view would be read beyond its end
    if softmax_scale <= 0:
        raise ValueError(f"expected softmax_scale > 0, got {softmax_scale}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"expected softcap > 0 or None, got {softcap}")


def spans(cu_seqlens: Tensor, seqused: Tensor | None) -> list[tuple[int, int]]:
    """(start, length) of every sequence as Python integers; reads the tensors (a sync on a GPU)."""
    cu = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(cu)]
    if seqused is not None:
        lengths = seqused.tolist()
    return list(zip(cu, lengths, strict=False))


def logit_chunks(
    q: Tensor,
    k: Tensor,
    span_q: tuple[int, int],
    span_k: tuple[int, int],
    mask: Mask,
    *,
    softmax_scale: float,
    softcap: float | None,
    rows: int | None = None,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (query slice, key slice, logits [HK, G, r, s]) over one sequence; masked = -inf.

    q [Tq, HQ, D] and k [Tk, HK, D] are packed; the slices index them. rows: only the last rows.
    fp32 logits (float64 for float64 inputs). Chunks without a visible key are not yielded.
    """
    (start_q, nq), (start_k, nk) = span_q, span_k
    heads, kv_heads = q.shape[1], k.shape[1]
    step = max(16, _CHUNK_ELEMENTS // max(1, heads * nk))
    first = 0 if rows is None else max(0, nq - rows)
    for r0 in range(first, nq, step):
        r1 = min(r0 + step, nq)
        pos_q, pos_k, lo, hi = _positions(mask, span_q, span_k, r0, r1, q.device)
        if hi <= lo:
            continue
        sq, sk = slice(start_q + r0, start_q + r1), slice(start_k + lo, start_k + hi)
        tile_q = _up(q[sq]).mul(softmax_scale).unflatten(1, (kv_heads, -1))
        logits = torch.einsum("rhgd,shd->hgrs", tile_q, _up(k[sk]))
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        logits.masked_fill_(~_visible(mask, pos_q, pos_k), -torch.inf)
        yield sq, sk, logits


def _positions(
    mask: Mask, span_q: tuple[int, int], span_k: tuple[int, int], r0: int, r1: int, device
) -> tuple[Tensor, Tensor, int, int]:
    """Positions of rows r0..r1 and of the keys lo..hi that they can see at most."""
    (start_q, nq), (start_k, nk) = span_q, span_k
    if mask.positions_q is not None and mask.positions_k is not None:
        pos_q = mask.positions_q[start_q + r0 : start_q + r1]
        return pos_q, mask.positions_k[start_k : start_k + nk], 0, nk
    shift = nk - nq if mask.align == "right" else 0
    hi = min(nk, r1 + shift) if mask.causal else nk
    lo = 0 if mask.window is None else max(0, r0 + shift - mask.window + 1)
    pos_q = torch.arange(r0 + shift, r1 + shift, device=device)
    return pos_q, torch.arange(lo, max(lo, hi), device=device), lo, hi


def _visible(mask: Mask, pos_q: Tensor, pos_k: Tensor) -> Tensor:
    """bool [r, s]: a window W shows the query itself and W - 1 older keys."""
    age = pos_q[:, None] - pos_k[None, :]
    seen = age >= 0 if mask.causal else torch.ones_like(age, dtype=torch.bool)
    return seen if mask.window is None else seen & (age < mask.window)


def _up(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
