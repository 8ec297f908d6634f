"""Third launch of top-k over long rows: the threshold of a row from what its segments counted.

Of each segment the keys > hi, >= hi, > lo and >= lo are known, and those between lo and hi are
listed. With c keys to keep, the sums over the segments leave four cases:

    > hi   <= c <= >= hi   the threshold is hi; some slots that share it may be dropped
    > lo    < c <= >= lo   it is lo
    >= hi   < c <= > lo    it is between: the lists are bisected in registers, if they fit
    else                   the sample misjudged the row: the row itself is bisected

A list is loaded in chunks, so that lists of any lengths fill one tile: a key that rises along the
row has all of its candidates in one segment.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._topk_parts import HIGHEST, LOWEST, bisect, keys_at, middle, row_quota


@triton.jit
def _before(parts):
    """Sum of the parts before each one, [SEGS]."""
    return tl.cumsum(parts) - parts


@triton.jit
def _select_listed(
    candidates,
    listed,
    rank,
    total,
    lo,
    hi,
    segments,
    SEGS: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(t, skip, above [SEGS], equal [SEGS]) among the `total` listed keys, `rank` of them kept.

    listed: int32 [SEGS], keys of each list. above, equal: keys > t and == t in the lists before.
    """
    s = tl.arange(0, SEGS)
    chunks = tl.cdiv(listed, CHUNK)  # [SEGS]
    first = tl.cumsum(chunks) - chunks
    c = tl.arange(0, TILE // CHUNK)
    begun = (first[None, :] <= c[:, None]) & (s < segments)[None, :]  # [TILE / CHUNK, SEGS]
    owner = tl.sum(begun.to(tl.int32), 1) - 1  # [TILE / CHUNK] the list of each chunk
    skipped = (c - tl.gather(first, owner, 0)) * CHUNK
    left = tl.gather(listed, owner, 0) - skipped
    offs = tl.arange(0, CHUNK)
    place = (owner * LENGTH + skipped)[:, None] + offs[None, :]  # [TILE / CHUNK, CHUNK]
    key = tl.load(candidates + place, mask=offs[None, :] < left[:, None], other=LOWEST)
    t, skip = bisect(key, rank, lo + 1, hi - 1, total)
    packed = (key > t).to(tl.int32) + ((key == t).to(tl.int32) << 16)
    upto = tl.cumsum(tl.sum(packed, 1))  # [TILE / CHUNK]
    both = tl.where(first > 0, tl.gather(upto, tl.maximum(first - 1, 0), 0), 0)  # [SEGS]
    return t, skip, both & 0xFFFF, both >> 16


@triton.jit
def _select_row(
    scores,
    protected,
    n,
    quota,
    SEGS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(t, skip, above [SEGS], equal [SEGS]) from the row itself, read up to 33 times.

    above, equal: keys > t and == t of the segments before.
    """
    offs = tl.arange(0, BLOCK)
    low, high, at_least = LOWEST + 1, HIGHEST + 0, n
    while (low < high) & (at_least > quota):
        mid = middle(low, high)
        hits = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, n, BLOCK, loop_unroll_factor=8):  # loads in flight
            key = keys_at(scores, protected, start + offs, start + offs < n)
            hits += (key >= mid).to(tl.int32)
        found = tl.sum(hits)
        enough = found >= quota
        at_least = tl.where(enough, found, at_least)
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    s = tl.arange(0, SEGS)
    above = tl.zeros([SEGS], tl.int32)
    equal = tl.zeros([SEGS], tl.int32)
    for start in range(0, n, BLOCK):
        key = keys_at(scores, protected, start + offs, start + offs < n)
        here = s == start // LENGTH
        above += tl.where(here, tl.sum((key > low).to(tl.int32)), 0)
        equal += tl.where(here, tl.sum((key == low).to(tl.int32)), 0)
    return low, at_least - quota, _before(above), _before(equal)


@triton.jit(do_not_specialize=["slots", "width", "segments"])
def select_kernel(
    scores,  # fp32 [R, S]
    seqlens,  # int32 [R]
    k_rows,  # int32 [R] or None
    protected,  # bool [R, S] or None
    bracket,  # int32 [R, 4]
    counts,  # int32 [R, SEG, 4]
    candidates,  # int32 [R, SEG, BLOCKS * BLOCK]
    threshold,  # int32 [R, 2], out: t and the ties to skip
    earlier,  # int32 [R, SEG, 2], out: keys > t and == t of the segments before
    stride_scores,
    stride_protected,
    slots,
    width,
    segments,  # SEG
    SEGS: tl.constexpr,  # power of two >= SEG
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride_scores
    if protected is not None:
        protected += row * stride_protected
    n, quota = row_quota(seqlens, k_rows, row, slots, width)
    s = tl.arange(0, SEGS)
    parts = counts + (row * segments + s) * 4
    candidates += row * segments * (BLOCKS * BLOCK)
    if PDL:
        gdc_wait()
    lo, hi = tl.load(bracket + row * 4), tl.load(bracket + row * 4 + 1)
    gt_hi = tl.load(parts, mask=s < segments, other=0)  # [SEGS]
    ge_hi = tl.load(parts + 1, mask=s < segments, other=0)
    gt_lo = tl.load(parts + 2, mask=s < segments, other=0)
    ge_lo = tl.load(parts + 3, mask=s < segments, other=0)
    n_gt_hi, n_ge_hi, n_gt_lo, n_ge_lo = tl.sum(gt_hi), tl.sum(ge_hi), tl.sum(gt_lo), tl.sum(ge_lo)
    listed = tl.maximum(gt_lo - ge_hi, 0)  # lo = hi: nothing is between
    fits = tl.sum(tl.cdiv(listed, CHUNK)) <= TILE // CHUNK

    if (quota >= n_gt_hi) & (quota <= n_ge_hi):
        t, skip = hi, n_ge_hi - quota
        above, equal = _before(gt_hi), _before(ge_hi - gt_hi)
    elif (quota > n_gt_lo) & (quota <= n_ge_lo):
        t, skip = lo, n_ge_lo - quota
        above, equal = _before(gt_lo), _before(ge_lo - gt_lo)
    elif (quota > n_ge_hi) & (quota <= n_gt_lo) & fits:
        t, skip, above, equal = _select_listed(
            candidates, listed, quota - n_ge_hi, n_gt_lo - n_ge_hi, lo, hi, segments,
            SEGS, BLOCKS * BLOCK, TILE, CHUNK,
        )  # fmt: skip
        above += _before(ge_hi)
    else:
        t, skip, above, equal = _select_row(
            scores, protected, n, quota, SEGS, BLOCKS * BLOCK, BLOCK
        )
    tl.store(threshold + row * 2, t)
    tl.store(threshold + row * 2 + 1, skip)
    earlier += (row * segments + s) * 2
    tl.store(earlier, above, mask=s < segments)
    tl.store(earlier + 1, equal, mask=s < segments)
