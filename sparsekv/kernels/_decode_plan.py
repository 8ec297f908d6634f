"""Tile sizes and grids of paged decode: from shapes and the device only, never from lengths."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ._common import ARCHS, lookup
from ._quant import KVFormat, format_of

HEAD_DIMS = (16, 32, 64, 128, 256)

# (arch, padded head_dim) -> (BLOCK_N keys a tile, num_warps, num_stages). Three stages are two
# buffers of K and V: 64 KB for 64 x 128 in 16 bits, three programs on an sm90 multiprocessor.
CONFIG = {(arch, d): (64, 4, 3) for arch in ARCHS for d in HEAD_DIMS}
CONFIG |= {(arch, d): (32, 4, 3) for arch in ARCHS for d in (16, 256)}  # 16 x 64 keys spills
CONFIG |= {(arch, 128): (32, 4, 3) for arch in ("sm89", "sm120")}  # 99 KB of shared memory
CONFIG |= {(arch, 256): (16, 4, 3) for arch in ("sm89", "sm120")}
CONFIG |= {("gfx942", d): (16 if d == 256 else 32, 4, 2) for d in HEAD_DIMS}  # 64 KB of LDS
CONFIG |= {("fp32", d): (32 if d <= 64 else 16, 4, 2) for d in HEAD_DIMS}


def shrunk(row: tuple[int, int, int], form: KVFormat | None) -> tuple[int, int, int]:
    """A row of CONFIG for pages of that format: int4 unpacks tiles, 64 keys of them spill."""
    block_n, num_warps, num_stages = row
    return min(block_n, 32) if form and form.packed else block_n, num_warps, num_stages


class Plan(NamedTuple):
    chunk: int
    block_n: int
    num_warps: int
    num_stages: int
    chunks: int
    capacity: int

    @property
    def tiles(self) -> int:
        return -(-self.capacity // self.block_n)


def default_chunk_size(heads: int, capacity: int) -> int:
    """Slots per program for `heads` = B * HK heads of `capacity` slots; from shapes only.

    The largest size whose whole chunks occupy the device: two programs a multiprocessor, or one if
    they are short (best or within 4 % of the best at eight shapes on an H200).
    """
    for chunk, programs in ((2048, 256), (1024, 256), (512, 256), (256, 128), (128, 128)):
        if heads * max(1, capacity // chunk) >= programs:
            return chunk
    return 64


def make_plan(q: Tensor, k_pages: Tensor, block_table: Tensor, chunk: int | None) -> Plan:
    block_n, num_warps, num_stages = shrunk(lookup(CONFIG, q), format_of(k_pages))
    B, HK, max_pages = block_table.shape
    capacity = max_pages * k_pages.shape[1]
    chunk = default_chunk_size(B * HK, capacity) if chunk is None else chunk
    if chunk < 16 or chunk % 16:
        raise ValueError(f"expected chunk_size to be a positive multiple of 16, got {chunk}")
    while chunk % block_n:
        block_n //= 2
    chunks = max(1, -(-capacity // chunk))
    if chunks == 1 and B * HK >= 512:  # many short heads: more of them share a multiprocessor
        block_n = min(block_n, 32)
    return Plan(chunk, block_n, num_warps, num_stages, chunks, capacity)
