"""Top-k of ragged rows: which slots stay when a budget is applied.

For row r with n = seqlens[r] valid scores x_0 .. x_{n-1} and quota c = min(k[r], n):

    i before j   iff   (y_i, i) > (y_j, j),   y = x, or above +inf where the slot is protected
    index[r]     =     the first c slots of that order, written in ascending slot order, then -1

So equal scores keep the highest slot, protected slots beat every score and one another by slot
alone, NaN counts as -inf and -0.0 equals 0.0. The order is total: nothing depends on scheduling.

Two ways, chosen by the shape alone (no host sync):

    S <= 16384   one program a row: its keys stay in registers, where the threshold is bisected
    longer       _topk_split: four launches of up to 64 programs a row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import ARCHS, AotRow, aot_row, check_dtype, check_shape, launch_options
from ._topk_parts import block_keys, fill_tail, row_quota, threshold_of, tile_warps, write_kept
from ._topk_split import split_rows, split_signatures

MAX_TILE = 16384  # slots of a row that one program holds: 32 registers a thread
MIN_TILE = 1024


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
    TILE: tl.constexpr,  # power of two >= S
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride_scores
    index += row * width
    if protected is not None:
        protected += row * stride_protected
    n, quota = row_quota(seqlens, k_rows, row, slots, width)
    tl.store(count + row, quota)
    key = block_keys(scores, protected, 0, n, TILE)  # [TILE]
    threshold, skip = threshold_of(key, n, quota)
    none = tl.full([], 0, tl.int32)
    write_kept(index, key, tl.arange(0, TILE), threshold, skip, none, none)
    fill_tail(index, quota, width, TILE)


def select_topk_triton(
    scores: Tensor,
    seqlens: Tensor,
    k: Tensor | int,
    *,
    protected: Tensor | None = None,
    max_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`select_topk` by one launch, or four where rows are long; no host sync, any strides."""
    _check(scores, seqlens, k, protected)
    rows, slots = scores.shape
    width = _width(scores, k, max_k)
    index = torch.empty((rows, width), dtype=torch.int32, device=scores.device)
    count = torch.empty(rows, dtype=torch.int32, device=scores.device)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    if protected is not None and protected.stride(1) != 1:
        protected = protected.contiguous()
    k_rows = k.contiguous() if isinstance(k, Tensor) else None
    run = _whole_rows if slots <= MAX_TILE else split_rows
    run(scores, seqlens.contiguous(), k_rows, protected, index, count)
    return index, count


def _whole_rows(
    scores: Tensor,
    seqlens: Tensor,
    k_rows: Tensor | None,
    protected: Tensor | None,
    index: Tensor,
    count: Tensor,
) -> None:
    """Fills index int32 [R, K] and count int32 [R]; scores and protected have unit stride in S."""
    rows, slots = scores.shape
    tile = max(MIN_TILE, triton.next_power_of_2(slots))
    _topk_kernel[(rows,)](
        scores,
        seqlens,
        k_rows,
        protected,
        index,
        count,
        scores.stride(0),
        0 if protected is None else protected.stride(0),
        slots,
        index.shape[1],
        TILE=tile,
        **launch_options(tile_warps(tile), 1),
    )


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
    rows = split_signatures()
    types = {"scores": "*fp32", "slots": "i32", "width": "i32"}
    types |= dict.fromkeys(("seqlens", "index", "count"), "*i32")
    for arch in ARCHS:
        for tile in (MIN_TILE, 4096, MAX_TILE):
            options = launch_options(tile_warps(tile), 1)
            for optional in ({}, {"protected": "*i1", "k_rows": "*i32"}):
                constants = {"TILE": tile}
                rows.append(aot_row(_topk_kernel, arch, types | optional, constants, options))
    return rows
