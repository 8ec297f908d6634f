"""What both top-k kernels are made of: ordered keys, a threshold by bisection, an ordered write.

A score becomes an int32 key of the same order: the bits of a float, those of negative numbers with
all but the sign flipped. NaN is mapped to -inf, -0.0 to 0.0, a protected slot to the largest int32,
a slot beyond the row to the smallest (both are no float's key).

The c-th largest key is found by bisection of the key range: a step is a compare and an add for each
key that the program holds in registers, and one reduction. (A radix pass with tl.histogram compiles
to 80 instructions a key for 256 bins, 38 for 32, on Triton 3.6: a ballot for each bit of a digit.)
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def row_quota(seqlens, k_rows, row, slots, width):
    """(n, quota): valid slots of a row, 0 where nothing is kept, and how many are kept."""
    n = tl.maximum(tl.minimum(tl.load(seqlens + row), slots), 0)
    quota = tl.minimum(n, width)
    if k_rows is not None:
        quota = tl.maximum(tl.minimum(quota, tl.load(k_rows + row)), 0)
    return tl.where(quota > 0, n, 0), quota


@triton.jit
def keys_at(scores, protected, offs, inside):
    """int32 keys [BLOCK] of the slots offs; LOWEST where the mask `inside` (or None) is false."""
    x = tl.load(scores + offs, mask=inside)  # [BLOCK]
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 and 0.0 are one value
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if protected is not None:
        kept = tl.load(protected + offs, mask=inside)
        key = tl.where(kept != 0, HIGHEST, key)  # above +inf, whose key is 0x7F800000
    if inside is not None:
        key = tl.where(inside, key, LOWEST)
    return key


@triton.jit
def block_keys(scores, protected, start, n, BLOCK: tl.constexpr):
    """int32 keys [BLOCK] of the slots from start on; those >= n are LOWEST."""
    offs = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask the loads are of four scores
        key = keys_at(scores, protected, offs, None)
    else:
        key = keys_at(scores, protected, offs, offs < n)
    return key


@triton.jit
def middle(low, high):
    """ceil((low + high) / 2) without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def bisect(key, rank, low, high, at_least):
    """(t, skip): the `rank` largest are the keys > t and all but the first `skip` keys == t.

    key: int32, any shape. The rank-th largest key lies in low..high; at_least keys are >= low.
    Stops as soon as exactly `rank` keys are >= t, so t need not be a key.
    """
    while (low < high) & (at_least > rank):
        mid = middle(low, high)
        found = tl.sum((key >= mid).to(tl.int32))
        enough = found >= rank
        at_least = tl.where(enough, found, at_least)
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return low, at_least - rank


@triton.jit
def threshold_of(key, n, rank):
    """`bisect` over all of the n keys that are not LOWEST."""
    low = tl.min(tl.where(key == LOWEST, HIGHEST, key))
    return bisect(key, rank, low, tl.maximum(low, tl.max(key)), n)


@triton.jit
def scatter(out, place, value):
    """out[place] = value where place >= 0; int32 [BLOCK].

    A scan wants neighbouring slots in a thread, a scattered store wants them in a warp. What is
    widened, the compiler moves before it is widened, so only the 4 bytes of `place` go from one
    layout to the other, not pointers and masks (two casts: one with two users would stay).
    """
    inside = place.to(tl.uint32, bitcast=True).to(tl.uint64) < 0x80000000
    tl.store(out + place.to(tl.int64), value, mask=inside)


@triton.jit
def write_kept(index, key, offs, threshold, skip, above, ties):
    """Writes the kept slots of a block in their order; (above, ties) behind the block.

    index: the row's answer. key, offs: int32 [BLOCK], BLOCK <= 2^14. above, ties: keys before the
    block that are > threshold and == threshold; where no tie is dropped, only their sum counts.
    """
    if skip == 0:
        kept = (key >= threshold).to(tl.int32)
        place = tl.where(kept != 0, above + ties + tl.cumsum(kept) - 1, -1)  # [BLOCK]
        above += tl.sum(kept)
    else:
        equal = key == threshold
        packed = (key > threshold).to(tl.int32) + (equal.to(tl.int32) << 16)
        rank = tl.cumsum(packed)  # [BLOCK] both counts in one scan
        tie = ties + (rank >> 16)  # [BLOCK] 1-based rank among the ties
        keep = (key > threshold) | (equal & (tie > skip))
        place = above + (rank & 0xFFFF) + tl.maximum(tie - skip, 0) - 1
        place = tl.where(keep, place, -1)
        total = tl.sum(packed)
        above += total & 0xFFFF
        ties += total >> 16
    scatter(index, place, offs)
    return above, ties


@triton.jit
def fill_tail(index, begin, end, BLOCK: tl.constexpr):
    """-1 in the columns begin..end of a row's answer."""
    for start in range(begin, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(index + offs, -1, mask=offs < end)


def tile_warps(tile: int) -> int:
    """Warps of a program that bisects `tile` keys: up to 16, eight keys a thread below that."""
    return min(16, max(4, tile // 256))
