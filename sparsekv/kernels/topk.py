"""Top-k of ragged rows: which slots stay when a budget is applied.

For row r with n = seqlens[r] valid scores x_0 .. x_{n-1} and quota c = min(k[r], n):

    i before j   iff   (class_i, x_i, i) > (class_j, x_j, j),   class = 1 if protected else 0
    index[r]     =     the first c slots of that order, written in ascending slot order, then -1

So equal scores keep the highest slot, a protected slot beats every score (+inf included), NaN
counts as -inf and -0.0 equals 0.0. The result is a total order: nothing depends on scheduling.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _check(scores: Tensor, seqlens: Tensor, k: Tensor | int, protected: Tensor | None) -> None:
    if scores.ndim != 2 or scores.dtype != torch.float32:
        raise ValueError(
            f"expected scores fp32 [R, S], got {scores.dtype} with shape {tuple(scores.shape)}"
        )
    rows = scores.shape[0]
    for name, x in (("seqlens", seqlens), ("k", k)):
        if isinstance(x, Tensor) and (x.shape != (rows,) or x.dtype != torch.int32):
            raise ValueError(f"expected {name} int32 [{rows}], got {x.dtype} {tuple(x.shape)}")
    if isinstance(k, int) and k < 0:
        raise ValueError(f"expected k >= 0, got {k}")
    if protected is not None and (protected.shape != scores.shape or protected.dtype != torch.bool):
        raise ValueError(
            f"expected protected bool {tuple(scores.shape)}, "
            f"got {protected.dtype} {tuple(protected.shape)}"
        )


def _width(scores: Tensor, k: Tensor | int, max_k: int | None) -> int:
    """Columns of the answer: k itself, or for a k per row `max_k` (default S)."""
    width = k if isinstance(k, int) else scores.shape[1]
    if max_k is not None and max_k < 0:
        raise ValueError(f"expected max_k >= 0, got {max_k}")
    return width if max_k is None else min(width, max_k)


def select_topk_reference(
    scores: Tensor,
    seqlens: Tensor,
    k: Tensor | int,
    *,
    protected: Tensor | None = None,
    max_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`select_topk` by two stable sorts: by score, then by class."""
    _check(scores, seqlens, k, protected)
    rows, slots = scores.shape
    width = _width(scores, k, max_k)
    lens = seqlens.clamp(0, slots)
    count = lens.clamp(max=k) if isinstance(k, int) else torch.minimum(lens, k)
    count = count.clamp(0, width)

    valid = torch.arange(slots, device=scores.device) < lens[:, None]  # [R, S]
    rank = valid.to(torch.int8) if protected is None else valid.to(torch.int8) * (1 + protected)
    # Highest slot first, so that a stable sort resolves ties in its favour.
    value = torch.where(scores.isnan(), -torch.inf, scores).flip(1)
    order = value.sort(dim=1, descending=True, stable=True).indices
    rank = rank.flip(1).gather(1, order)
    order = order.gather(1, rank.sort(dim=1, descending=True, stable=True).indices)
    slot = slots - 1 - order[:, :width]  # [R, min(K, S)], best first

    kept = torch.arange(slot.shape[1], device=scores.device) < count[:, None]
    slot = torch.where(kept, slot, slots).sort(dim=1).values
    index = scores.new_full((rows, width), -1, dtype=torch.int32)
    index[:, : slot.shape[1]] = torch.where(slot == slots, -1, slot).to(torch.int32)
    return index, count


def select_topk(
    scores: Tensor,
    seqlens: Tensor,
    k: Tensor | int,
    *,
    protected: Tensor | None = None,
    max_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The `k` best slots of each row in ascending order; ties keep the highest slot.

    scores: fp32 [R, S]; NaN counts as -inf. seqlens: int32 [R], valid prefix of each row.
    k: int, or int32 [R] for a quota per row. protected: bool [R, S], slots kept before any other;
    they count in k, and when they exceed it the highest protected slots stay.
    Returns index int32 [R, K] padded with -1 and count int32 [R] = min(k, seqlens, K), where K is
    k for an int, else S; `max_k` bounds K (larger quotas are cut to it), so that no host sync is
    needed to size the answer. Raises ValueError on wrong shapes, dtypes or a negative k.
    """
    return select_topk_reference(scores, seqlens, k, protected=protected, max_k=max_k)
