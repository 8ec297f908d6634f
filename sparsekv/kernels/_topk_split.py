"""Top-k of long rows: several programs a row, four launches, no atomics and no host sync.

    bracket   two programs a row: of a sample of its keys, spread over the row, the keys lo <= hi a
              few standard deviations below and above the rank of the quota
    gather    each segment counts its keys > hi, >= hi, > lo, >= lo and lists those between the two
    select    one program a row: the counts say whether the threshold is hi, is lo or lies between;
              then the lists of the row, a few per cent of it, are bisected in registers
    write     each segment writes its kept slots, ascending, behind those of the segments before it

The sample decides the speed, never the answer: when the quota's key is outside of lo..hi, or more
keys lie between them than one program holds, `select` bisects the row itself, exactly but slowly.
For scores in random order the first takes 4.5 standard deviations; keys that many slots share are
lo or hi themselves and are only counted. The second is to be expected of rows of 512k, half kept.

A row is read three times, two of them from the L2 where it fits: 64 rows of 128k do.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._common import (
    ARCHS,
    PDL_ARCHS,
    AotRow,
    aot_row,
    arch_of,
    dependent_launch,
    has_dependent_launch,
    launch_options,
)
from ._topk_parts import (
    HIGHEST,
    LOWEST,
    block_keys,
    fill_tail,
    keys_at,
    row_quota,
    scatter,
    threshold_of,
    tile_warps,
    write_kept,
)
from ._topk_select import select_kernel


class Sizes(NamedTuple):
    """Blocks in slots, of one architecture."""

    block: int  # slots a step of gather and write
    num_warps: int  # of gather and write
    programs: int  # wanted for gather and write: eight for each of 128 multiprocessors
    segments: int  # a row at most
    sample: int  # keys of the bracket, for a row of up to 32 samples; longer rows take four times
    tile: int  # candidates that `select` holds at most
    chunk: int  # candidates it loads from one list at once
    margin: float  # of the bracket, in standard deviations of the sample's rank


_SIZES = dict.fromkeys(ARCHS, Sizes(1024, 4, 1024, 64, 4096, 16384, 64, 4.5)) | {
    "cpu": Sizes(32, 4, 20, 8, 64, 64, 8, 1.0)
}
_TYPES = dict.fromkeys(("slots", "width", "segments"), "i32") | dict.fromkeys(
    ("seqlens", "bracket", "count", "counts", "candidates", "threshold", "earlier", "index"), "*i32"
) | {"scores": "*fp32"}  # fmt: skip


class Plan(NamedTuple):
    """How rows of one shape are cut."""

    sizes: Sizes
    blocks: int  # steps a segment
    segments: int
    sample: int
    tile: int

    @property
    def segs(self) -> int:
        """Power of two >= segments, of which a scan and a gather can be made."""
        return max(16, triton.next_power_of_2(self.segments))


def plan_of(rows: int, slots: int, arch: str) -> Plan:
    """From shapes alone, so that it is the same for every step of a captured graph."""
    sizes = _SIZES[arch]
    blocks = max(
        1,
        triton.cdiv(rows * slots, sizes.programs * sizes.block),
        triton.cdiv(slots, sizes.segments * sizes.block),
    )
    segments = triton.cdiv(slots, blocks * sizes.block)
    sample = sizes.sample if slots <= 32 * sizes.sample else 4 * sizes.sample
    # Most keys lie between lo and hi when half of a row is kept; half a chunk of a list is air.
    between = 2 * sizes.margin * (0.5 * math.sqrt(sample) + 1) / sample * slots
    tile = triton.next_power_of_2(int(1.1 * between + segments * sizes.chunk / 2))
    tile = min(max(tile, 16 * sizes.chunk), sizes.tile)
    return Plan(sizes, blocks, segments, sample, tile)


@triton.jit(do_not_specialize=["slots", "width"])
def _bracket_kernel(
    scores,  # fp32 [R, S]
    seqlens,  # int32 [R]
    k_rows,  # int32 [R] or None
    protected,  # bool [R, S] or None
    bracket,  # int32 [R, 4], out: lo, hi; does either share its key
    count,  # int32 [R], out
    stride_scores,
    stride_protected,
    slots,
    width,
    SAMPLE: tl.constexpr,
    MARGIN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores += row * stride_scores
    if protected is not None:
        protected += row * stride_protected
    n, quota = row_quota(seqlens, k_rows, row, slots, width)

    m = tl.minimum(n, SAMPLE)
    share = quota / tl.maximum(n, 1)
    margin = MARGIN * (tl.sqrt(m * share * (1.0 - share)) + 1.0)
    reach = tl.where(side == 0, margin, -margin)
    rank = tl.where(n <= SAMPLE, quota, (m * share + reach).to(tl.int32))
    j = tl.arange(0, SAMPLE)
    # Slot j of n, or one slot of each of SAMPLE equal parts, by a fixed sequence spread evenly.
    jitter = (j.to(tl.uint32) * 2654435761).to(tl.int64)
    spread = (j.to(tl.int64) * n + ((jitter * n) >> 32)) // SAMPLE
    offs = tl.where(n <= SAMPLE, j, spread.to(tl.int32))
    key = keys_at(scores, protected, offs, j < m)  # [SAMPLE]
    bound, skip = threshold_of(key, m, tl.minimum(tl.maximum(rank, 1), m))
    tied = (skip > 0) | (rank < 1)  # protected slots are ties at HIGHEST
    # Only a bound that keys share is a class of its own: else lo itself is a candidate.
    bound = tl.where((side == 0) & (skip == 0), bound - 1, bound)
    bound = tl.where(rank > m, LOWEST, tl.where(rank < 1, HIGHEST, bound))
    tl.store(bracket + row * 4 + side, bound)
    tl.store(bracket + row * 4 + 2 + side, tied.to(tl.int32))
    if side == 0:
        tl.store(count + row, quota)


@triton.jit(do_not_specialize=["slots", "width"])
def _gather_kernel(
    scores,  # fp32 [R, S]
    seqlens,  # int32 [R]
    k_rows,  # int32 [R] or None
    protected,  # bool [R, S] or None
    bracket,  # int32 [R, 4]
    counts,  # int32 [R, SEG, 4], out: keys > hi, >= hi, > lo, >= lo
    candidates,  # int32 [R, SEG, BLOCKS * BLOCK], out: the keys between, then nothing
    stride_scores,
    stride_protected,
    slots,
    width,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores += row * stride_scores
    if protected is not None:
        protected += row * stride_protected
    n, _ = row_quota(seqlens, k_rows, row, slots, width)
    part = row * tl.num_programs(1) + segment
    candidates += part * (BLOCKS * BLOCK)
    begin = segment * (BLOCKS * BLOCK)
    if PDL:
        gdc_wait()
    lo, hi = tl.load(bracket + row * 4), tl.load(bracket + row * 4 + 1)
    tied = (tl.load(bracket + row * 4 + 2) | tl.load(bracket + row * 4 + 3)) != 0

    listed, from_hi, at_hi, at_lo = 0, 0, 0, 0
    for start in range(begin, tl.minimum(n, begin + BLOCKS * BLOCK), BLOCK):
        key = block_keys(scores, protected, start, n, BLOCK)  # [BLOCK]
        between = (key > lo) & (key < hi)
        packed = between.to(tl.int32) + ((key >= hi).to(tl.int32) << 16)
        place = listed + (tl.cumsum(packed) & 0xFFFF) - 1  # [BLOCK]
        scatter(candidates, tl.where(between, place, -1), key)
        total = tl.sum(packed)
        listed += total & 0xFFFF
        from_hi += total >> 16
        if tied:
            same = tl.sum((key == hi).to(tl.int32) + ((key == lo).to(tl.int32) << 16))
            at_hi += same & 0xFFFF
            at_lo += same >> 16
    above_hi = from_hi - at_hi
    above_lo = tl.where(lo < hi, from_hi + listed, above_hi)
    tl.store(counts + part * 4, above_hi)
    tl.store(counts + part * 4 + 1, from_hi)
    tl.store(counts + part * 4 + 2, above_lo)
    tl.store(counts + part * 4 + 3, above_lo + at_lo)


@triton.jit(do_not_specialize=["slots", "width"])
def _write_kernel(
    scores,  # fp32 [R, S]
    seqlens,  # int32 [R]
    k_rows,  # int32 [R] or None
    protected,  # bool [R, S] or None
    threshold,  # int32 [R, 2]
    earlier,  # int32 [R, SEG, 2]
    index,  # int32 [R, width], out
    stride_scores,
    stride_protected,
    slots,
    width,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    segments = tl.num_programs(1)
    scores += row * stride_scores
    index += row * width
    if protected is not None:
        protected += row * stride_protected
    n, quota = row_quota(seqlens, k_rows, row, slots, width)
    share = tl.cdiv(width, segments)
    tail = tl.minimum(width, (segment + 1) * share)
    fill_tail(index, tl.maximum(quota, segment * share), tail, BLOCK)
    if PDL:
        gdc_wait()
    t, skip = tl.load(threshold + row * 2), tl.load(threshold + row * 2 + 1)
    earlier += (row * segments + segment) * 2
    above, ties = tl.load(earlier), tl.load(earlier + 1)
    begin = segment * (BLOCKS * BLOCK)
    for start in range(begin, tl.minimum(n, begin + BLOCKS * BLOCK), BLOCK):
        key = block_keys(scores, protected, start, n, BLOCK)  # [BLOCK]
        offs = start + tl.arange(0, BLOCK)
        above, ties = write_kept(index, key, offs, t, skip, above, ties)


def split_rows(
    scores: Tensor,
    seqlens: Tensor,
    k_rows: Tensor | None,
    protected: Tensor | None,
    index: Tensor,
    count: Tensor,
) -> None:
    """Fills index int32 [R, K] and count int32 [R]; scores and protected have unit stride in S."""
    rows, slots = scores.shape
    plan = plan_of(rows, slots, arch_of(scores.device))
    empty = partial(torch.empty, dtype=torch.int32, device=scores.device)
    bracket, threshold = empty(rows, 4), empty(rows, 2)
    counts, earlier = empty(rows, plan.segments, 4), empty(rows, plan.segments, 2)
    candidates = empty(rows, plan.segments, plan.blocks * plan.sizes.block)
    inputs = (scores, seqlens, k_rows, protected)
    strides = (scores.stride(0), 0 if protected is None else protected.stride(0))
    limits = (slots, index.shape[1])

    device = scores.device
    first = launch_options(tile_warps(plan.sample), 1) | {"PDL": has_dependent_launch(device)}
    parts = dependent_launch(device, plan.sizes.num_warps)
    merge = dependent_launch(device, tile_warps(plan.tile))
    cut = {"BLOCKS": plan.blocks, "BLOCK": plan.sizes.block}
    _bracket_kernel[(rows, 2)](
        *inputs, bracket, count, *strides, *limits,
        SAMPLE=plan.sample, MARGIN=plan.sizes.margin, **first,
    )  # fmt: skip
    grid = (rows, plan.segments)
    _gather_kernel[grid](*inputs, bracket, counts, candidates, *strides, *limits, **cut, **parts)
    select_kernel[(rows,)](
        *inputs, bracket, counts, candidates, threshold, earlier, *strides, *limits, plan.segments,
        SEGS=plan.segs, TILE=plan.tile, CHUNK=plan.sizes.chunk,
        **cut, **merge,
    )  # fmt: skip
    _write_kernel[grid](*inputs, threshold, earlier, index, *strides, *limits, **cut, **parts)


def split_signatures() -> list[AotRow]:
    """Rows of `aot_signatures` for the four kernels: rows of 32k, 128k and 256k slots."""
    rows: list[AotRow] = []
    for arch in ARCHS:
        for count, slots in ((8, 32768), (8, 131072), (64, 131072), (8, 262144)):
            plan = plan_of(count, slots, arch)
            cut = {"BLOCKS": plan.blocks, "BLOCK": plan.sizes.block}
            tiles = {"SEGS": plan.segs, "TILE": plan.tile}
            tiles |= {"CHUNK": plan.sizes.chunk} | cut
            sample: dict[str, Any] = {"SAMPLE": plan.sample, "MARGIN": plan.sizes.margin}
            warps = plan.sizes.num_warps
            for optional in ({}, {"protected": "*i1", "k_rows": "*i32"}):
                for kernel, constexprs, num_warps in (
                    (_bracket_kernel, sample, tile_warps(plan.sample)),
                    (_gather_kernel, cut, warps),
                    (select_kernel, tiles, tile_warps(plan.tile)),
                    (_write_kernel, cut, warps),
                ):
                    types = {n: t for n, t in (_TYPES | optional).items() if n in kernel.arg_names}
                    constants = constexprs | {"PDL": arch in PDL_ARCHS}
                    options = launch_options(num_warps, 1)
                    rows.append(aot_row(kernel, arch, types, constants, options))
    return rows
