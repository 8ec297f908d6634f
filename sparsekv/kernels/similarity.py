"""How redundant a key is: cosine similarity among the keys of a head, without an n x n matrix.

    k^_i  = k_i / |k_i|,  cos_ij = k^_i . k^_j          (0 for a key that is 0)
    j*_i  = the last j != i with cos_ij > threshold      -1 where there is none
    m_j   = 1/n sum_{i != j, j*_i != j} cos_ij           column means without those entries
          = 1/n (k^_j . sum_i k^_i - 1 - sum_{i : j*_i = j} cos_ij)
    R     = softmax of m over the n keys

R-KV (arXiv 2505.24133): old members of a cluster collect a high R, the most recent one is exempt.
Its code zeroes entry 0 of a row without a near-duplicate; here such a row loses nothing.

One program owns BLOCK_M rows i and walks the keys from the last to the first, until each of its
rows has met one: with duplicates about, that is soon. The sums over i take one pass over the keys;
what is scattered is added as integers, in whatever order with the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    DTYPES,
    AotRow,
    aot_row,
    check_dtype,
    check_last_contiguous,
    check_shape,
    launch_options,
    lookup,
    padded_head_dim,
)


class _Tiles(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int


# (arch, padded head_dim) -> tiles: rows of a program, keys of a step.
_UP_TO_128 = (16, 32, 64, 128)
_16_BIT = ("sm80", "sm89", "sm90", "sm100", "sm120", "gfx942")
_CONFIG: dict[tuple[str, int], _Tiles] = {
    **{(a, d): _Tiles(64, 64, 4) for a in _16_BIT for d in _UP_TO_128},
    **{(a, 256): _Tiles(64, 32, 4) for a in _16_BIT},
    **{("fp32", d): _Tiles(16, 16, 4) for d in (*_UP_TO_128, 256)},
    **{("cpu", d): _Tiles(16, 32, 4) for d in (*_UP_TO_128, 256)},
}
_CHUNK_ELEMENTS = 1 << 21  # numbers of a tile, of which three exist at a time: 24 MB in fp32
_FIXED_POINT = 2.0**40  # cosines of up to 2^22 rows add up in int64


@triton.jit(do_not_specialize=["slots"])
def _nearest_duplicate_kernel(
    k, inverse, lengths, offsets, last, cosine, stride_kb, stride_kh, stride_kt,
    slots, threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = row * tl.num_programs(1) + head
    n = tl.load(lengths + group)
    k += row * stride_kb + head * stride_kh
    inverse += group * slots
    if offsets is not None:
        first = tl.load(offsets + row).to(tl.int64)
        k += first * stride_kt
        inverse += first
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    row_ok, dim_ok = offs_m < n, offs_d < HEAD_DIM
    row_ptrs = k + offs_m.to(tl.int64)[:, None] * stride_kt + offs_d[None, :]
    my_inverse = tl.load(inverse + offs_m, mask=row_ok, other=0.0)

    best = tl.where(row_ok, -1, 0)  # rows out of range wait for nothing
    best_cos = tl.zeros([BLOCK_M], tl.float32)
    start = (tl.cdiv(n, BLOCK_N) - 1) * BLOCK_N
    while (start >= 0) & (tl.min(best, 0) < 0):
        # Loaded again each time: fp32 rows held over the loop would not fit the registers.
        mine = tl.load(row_ptrs, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)  # [BM, BD]
        j = start + offs_n
        key_ok = j < n
        kt_ptrs = k + j.to(tl.int64)[None, :] * stride_kt + offs_d[:, None]
        kt = tl.load(kt_ptrs, mask=key_ok[None, :] & dim_ok[:, None], other=0.0)  # [BD, BN]
        scale = tl.load(inverse + j, mask=key_ok, other=0.0)
        cos = tl.dot(mine, kt, input_precision="ieee") * my_inverse[:, None] * scale[None, :]
        near = (cos > threshold) & (offs_m[:, None] != j[None, :]) & key_ok[None, :]
        found = tl.max(tl.where(near, j[None, :], -1), 1)  # [BLOCK_M]
        found_cos = tl.sum(tl.where(j[None, :] == found[:, None], cos, 0.0), 1)
        best_cos = tl.where(best < 0, found_cos, best_cos)
        best = tl.where(best < 0, found, best)
        start -= BLOCK_N

    found = row_ok & (best >= 0)
    out = group * slots + offs_m
    tl.store(last + out, tl.where(found, best, -1), mask=offs_m < slots)
    tl.store(cosine + out, tl.where(found, best_cos, 0.0), mask=offs_m < slots)


def nearest_duplicate_triton(
    k: Tensor, lengths: Tensor, threshold: float, *, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`nearest_duplicate` in one launch after the norms; no host sync."""
    _check(k, lengths, threshold, offsets)
    batch, heads, slots, dim = k.shape
    last = torch.empty((batch, heads, slots), dtype=torch.int32, device=k.device)
    cosine = torch.empty(last.shape, dtype=torch.float32, device=k.device)
    if last.numel():
        tiles = lookup(_CONFIG, k)
        _nearest_duplicate_kernel[triton.cdiv(slots, tiles.block_m), heads, batch](
            k, _inverse_norms(k), lengths.contiguous(), offsets, last, cosine, *k.stride()[:3],
            slots, float(threshold), HEAD_DIM=dim, BLOCK_D=padded_head_dim(dim),
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, **launch_options(tiles.num_warps, 1),
        )  # fmt: skip
    return last, cosine


def nearest_duplicate_reference(
    k: Tensor, lengths: Tensor, threshold: float, *, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`nearest_duplicate` in plain torch; float64 keys give float64 cosines."""
    _check(k, lengths, threshold, offsets)
    batch, heads, slots, dim = k.shape
    slot = torch.arange(slots, device=k.device)
    if offsets is not None:
        source = (slot + offsets[:, None]).clamp(max=slots - 1)
        k = k.gather(2, source[:, None, :, None].expand(-1, heads, -1, dim))
    held = slot < lengths[..., None]
    unit = k.masked_fill(~held[..., None], 0.0)
    unit = unit if unit.dtype == torch.float64 else unit.float()
    length = unit.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, unit / length, 0.0)
    last = torch.full((batch, heads, slots), -1, dtype=torch.int32, device=k.device)
    cosine = unit.new_zeros(last.shape)
    step = max(16, _CHUNK_ELEMENTS // max(1, batch * heads * slots))
    for start in range(0, slots, step):
        rows = slice(start, start + step)
        cos = unit[:, :, rows] @ unit.transpose(2, 3)  # [B, HK, r, S]
        near = (cos > threshold) & held[:, :, None] & (slot != slot[rows, None])
        found = torch.where(near, slot, -1).amax(-1)
        found = torch.where(held[:, :, rows], found, -1)
        last[:, :, rows] = found
        at = cos.gather(-1, found.clamp_min(0)[..., None])[..., 0]
        cosine[:, :, rows] = torch.where(found >= 0, at, 0.0)
    return last, cosine


def nearest_duplicate(
    k: Tensor, lengths: Tensor, threshold: float, *, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The last other key that is more similar than `threshold`: (j* int32, cosine fp32) [B, HK, S].

    k: [B, HK, S, D], any strides but 1 in D. lengths: int32 [B, HK]; offsets: int32 [B], where the
    first key of a row lies (None: at 0). So key j of a head is k[b, h, offsets[b] + j], j < length.
    Keys without a duplicate, and slots at or beyond a length, get -1 and 0. threshold: in [-1, 1].
    Raises ValueError when shapes, dtypes or strides do not fit.
    """
    run = nearest_duplicate_triton if k.is_cuda else nearest_duplicate_reference
    return run(k, lengths, threshold, offsets=offsets)


def key_similarity(
    k: Tensor, lengths: Tensor, threshold: float, *, offsets: Tensor | None = None
) -> Tensor:
    """R of the module's formula, fp32 [B, HK, S]; 0 at or beyond a length.

    Arguments as in `nearest_duplicate`. Holds 24 MB at a time beside a few numbers a key.
    """
    last, cosine = nearest_duplicate(k, lengths, threshold, offsets=offsets)
    slot = torch.arange(k.shape[2], device=k.device)
    first = torch.zeros_like(lengths[:, 0]) if offsets is None else offsets
    rank = slot - first[:, None, None]  # which key of its row a token is
    inverse = torch.where((rank >= 0) & (rank < lengths[..., None]), _inverse_norms(k), 0.0)
    total = _similarity_to_all(k, inverse)
    source = (slot + first[:, None]).clamp(max=max(0, k.shape[2] - 1))
    source = source[:, None].expand_as(last)
    total, itself = total.gather(-1, source), inverse.gather(-1, source) > 0
    fixed = torch.where(last >= 0, cosine * _FIXED_POINT, 0.0).round().long()
    exempt = torch.zeros_like(fixed).scatter_add_(-1, last.clamp_min(0).long(), fixed)
    mean = (total - itself.float() - exempt.float() / _FIXED_POINT) / lengths[..., None]
    held = slot < lengths[..., None]
    return torch.softmax(mean.masked_fill(~held, -torch.inf), -1).masked_fill(~held, 0.0)


def _inverse_norms(k: Tensor) -> Tensor:
    """1 / |k| fp32 [B, HK, S], contiguous whatever k is; 0 for 0."""
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(k, dim=-1, dtype=wide).float()
    return torch.where(norm > 0, 1.0 / norm, 0.0).contiguous()


def _similarity_to_all(k: Tensor, inverse: Tensor) -> Tensor:
    """k^_j . sum_i k^_i, fp32 [B, HK, S]. inverse [B, HK, S]: 0 for what is no key."""
    step = max(16, _CHUNK_ELEMENTS // max(1, k[:, :, :1].numel()))
    total = torch.zeros_like(inverse)
    anchor = k.new_zeros((*k.shape[:2], 1, k.shape[3]), dtype=torch.float32)
    chunks = [slice(start, start + step) for start in range(0, k.shape[2], step)]
    for i in chunks:
        anchor += _unit(k[:, :, i], inverse[:, :, i]).sum(2, keepdim=True)
    for i in chunks:
        total[:, :, i] = (_unit(k[:, :, i], inverse[:, :, i]) * anchor).sum(-1)
    return total


def _unit(k: Tensor, inverse: Tensor) -> Tensor:
    """k^ fp32; what is no key may be NaN and gives 0."""
    return torch.where(inverse[..., None] > 0, k.float() * inverse[..., None], 0.0)


def _check(k: Tensor, lengths: Tensor, threshold: float, offsets: Tensor | None) -> None:
    check_shape("k", k, [None, None, None, None])
    padded_head_dim(k.shape[3])
    check_dtype("k", k, *DTYPES, *(() if k.is_cuda else (torch.float64,)))
    check_last_contiguous("k", k)
    check_shape("lengths", lengths, k.shape[:2])
    check_dtype("lengths", lengths, torch.int32)
    if offsets is not None:
        check_shape("offsets", offsets, k.shape[:1])
        check_dtype("offsets", offsets, torch.int32)
        check_last_contiguous("offsets", offsets)
    if not -1.0 <= threshold <= 1.0:
        raise ValueError(f"expected threshold in [-1, 1], got {threshold}")


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of every shipped configuration."""
    rows = []
    for (arch, d), tiles in _CONFIG.items():
        if arch not in ARCHS or d < 64:  # smaller head_dims share the tiles of 64
            continue
        for kind, (block_m, block_n, warps) in (("*bf16", tiles), ("*fp32", _CONFIG["fp32", d])):
            types = dict.fromkeys(("lengths", "last"), "*i32") | {"k": kind, "slots": "i32"}
            types |= {"inverse": "*fp32", "cosine": "*fp32", "threshold": "fp32"}
            if kind == "*bf16":
                types["offsets"] = "*i32"
            constants = {"HEAD_DIM": d, "BLOCK_D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
            options = launch_options(warps, 1)
            rows.append(aot_row(_nearest_duplicate_kernel, arch, types, constants, options))
    return rows
