"""Top-k of ragged rows: which slots stay when a budget is applied.

For row r with n = seqlens[r] valid scores x_0 .. x_{n-1} and quota c = min(k[r], n):

    i before j   iff   (y_i, i) > (y_j, j),   y = x, or above +inf where the slot is protected
    index[r]     =     the first c slots of that order, written in ascending slot order, then -1

So equal scores keep the highest slot, protected slots beat every score and one another by slot
alone, NaN counts as -inf and -0.0 equals 0.0. The order is total: nothing depends on scheduling.

Kernel: one program a row. Scores become uint32 keys of the same order; up to four passes, each a
256-bin histogram of the next 8 bits of the keys that share the threshold's prefix, fix the c-th
largest key t, most significant digit first (a pass that leaves no tie to drop is the last). One
ordered pass then writes every slot with key > t and the last of those with key == t.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import ARCHS, AotRow, arch_of, check_dtype, check_shape, launch_options

# arch -> (BLOCK slots a step, num_warps)
_CONFIG = dict.fromkeys(ARCHS, (4096, 16)) | {"cpu": (256, 4)}
_BINS = tl.constexpr(256)


@triton.jit
def _keys(scores, protected, offs, n):
    """uint32 keys [BLOCK] of the slots offs < n, in the order of y."""
    x = tl.load(scores + offs, mask=offs < n, other=0.0)  # [BLOCK]
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 and 0.0 are one value
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    if protected is not None:
        kept = tl.load(protected + offs, mask=offs < n, other=0)
        key = tl.where(kept != 0, 0xFFFFFFFF, key)  # above +inf, whose key is 0xFF800000
    return key


@triton.jit
def _threshold(scores, protected, n, quota, BLOCK: tl.constexpr):
    """(t, skip): the quota largest are the keys > t and all but the first `skip` keys == t."""
    bins = tl.arange(0, _BINS)
    threshold = tl.full([], 0, tl.uint32)
    skip = n - quota
    remaining = quota
    shift = 24
    while (shift >= 0) & (skip > 0):
        hist = tl.zeros([_BINS], tl.int32)
        for start in range(0, n, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            key = _keys(scores, protected, offs, n)  # [BLOCK]
            same = (offs < n) & ((key >> shift) >> 8 == (threshold >> shift) >> 8)
            hist += tl.histogram(((key >> shift) & 255).to(tl.int32), _BINS, mask=same)
        at_least = tl.cumsum(hist, reverse=True)  # [BINS] keys whose digit is >= bin
        digit = tl.sum((at_least >= remaining).to(tl.int32)) - 1
        here = tl.sum(tl.where(bins == digit, hist, 0))
        remaining -= tl.sum(tl.where(bins == digit, at_least - hist, 0))
        threshold = threshold | (digit.to(tl.uint32) << shift)
        skip = here - remaining
        shift -= 8
    return threshold, skip


@triton.jit(do_not_specialize=["slots", "width"])
def _topk_kernel(
    scores,  # fp32 [R, S]
    seqlens,  # int32 [R]
    k_rows,  # int32 [R] or None
    protected,  # bool [R, S] or None
    index,  # int32 [R, width], out
    count,  # int32 [R], out
    stride_scores,
    stride_protected,
    slots,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride_scores
    index += row * width
    if protected is not None:
        protected += row * stride_protected
    n = tl.maximum(tl.minimum(tl.load(seqlens + row), slots), 0)
    quota = tl.minimum(n, width)
    if k_rows is not None:
        quota = tl.maximum(tl.minimum(quota, tl.load(k_rows + row)), 0)
    tl.store(count + row, quota)
    n = tl.where(quota > 0, n, 0)
    threshold, skip = _threshold(scores, protected, n, quota, BLOCK)

    taken = 0  # slots written
    ties = 0  # keys == threshold met
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        key = _keys(scores, protected, offs, n)  # [BLOCK]
        equal = ((offs < n) & (key == threshold)).to(tl.int32)
        tie = ties + tl.cumsum(equal)  # [BLOCK] 1-based rank among the ties
        keep = ((offs < n) & (key > threshold)) | ((equal != 0) & (tie > skip))
        place = taken + tl.cumsum(keep.to(tl.int32)) - 1
        tl.store(index + place, offs, mask=keep)
        taken += tl.sum(keep.to(tl.int32))
        ties += tl.sum(equal)
    for start in range(quota, width, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(index + offs, -1, mask=offs < width)


def select_topk_triton(
    scores: Tensor,
    seqlens: Tensor,
    k: Tensor | int,
    *,
    protected: Tensor | None = None,
    max_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`select_topk` as one Triton launch, one program a row; no host sync, any strides."""
    _check(scores, seqlens, k, protected)
    rows, slots = scores.shape
    width = _width(scores, k, max_k)
    index = torch.empty((rows, width), dtype=torch.int32, device=scores.device)
    count = torch.empty(rows, dtype=torch.int32, device=scores.device)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    if protected is not None and protected.stride(1) != 1:
        protected = protected.contiguous()
    block, num_warps = _CONFIG[arch_of(scores.device)]
    _topk_kernel[(rows,)](
        scores,
        seqlens.contiguous(),
        k.contiguous() if isinstance(k, Tensor) else None,
        protected,
        index,
        count,
        scores.stride(0),
        0 if protected is None else protected.stride(0),
        slots,
        width,
        BLOCK=block,
        **launch_options(num_warps, 1),
    )
    return index, count


def _check(scores: Tensor, seqlens: Tensor, k: Tensor | int, protected: Tensor | None) -> None:
    check_shape("scores", scores, (None, None))
    check_dtype("scores", scores, torch.float32)
    for name, x in (("seqlens", seqlens), ("k", k)):
        if isinstance(x, Tensor):
            check_shape(name, x, scores.shape[:1])
            check_dtype(name, x, torch.int32)
        elif x < 0:
            raise ValueError(f"expected {name} >= 0, got {x}")
    if protected is not None:
        check_shape("protected", protected, scores.shape)
        check_dtype("protected", protected, torch.bool)


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
    value = torch.where(scores.isnan(), -torch.inf, scores)
    value = (value if protected is None else value.masked_fill(protected, torch.inf)).flip(1)
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
    run = select_topk_triton if scores.is_cuda else select_topk_reference
    return run(scores, seqlens, k, protected=protected, max_k=max_k)


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of every shipped configuration."""
    rows = []
    for arch in ARCHS:
        block, num_warps = _CONFIG[arch]
        for protected, k_rows in ((None, None), ("*i1", "*i32")):
            signature = {"scores": "*fp32", "seqlens": "*i32", "k_rows": k_rows or "constexpr"}
            signature |= {"protected": protected or "constexpr", "index": "*i32", "count": "*i32"}
            signature |= {"stride_scores": "i32", "stride_protected": "i32"}
            signature |= {"slots": "i32", "width": "i32", "BLOCK": "constexpr"}
            constexprs: dict[str, Any] = {"BLOCK": block}
            constexprs |= {"k_rows": None} if k_rows is None else {}
            constexprs |= {"protected": None} if protected is None else {}
            rows.append((_topk_kernel, signature, constexprs, launch_options(num_warps, 1), arch))
    return rows
