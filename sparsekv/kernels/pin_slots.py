"""Into the pinned blocks: the slots that were chosen where blocks must go, in many layers at once.

See `_cut_layers` for what is held. Chosen slots ascend, so the k-th stands at k or later: copied in
that order, nothing is overwritten before it is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import ARCHS, AotRow, aot_row, check_dtype, check_shape, launch_options
from ._cut_layers import UNIT, PagedCuts, block_of, cache_strides, check_sums, cut_request

_VALUES = 8192  # numbers that a step of a program moves
_WARPS = 8


@triton.jit
def _pin_kernel(
    cache,  # [N, HK, P, 2 D] of the first layer, in place
    sums,  # fp32 [N, HK, P] of the first layer, in place, or None
    table,  # int32 [B, columns] of the first layer
    offsets,  # int64 [3, L]
    requests,  # int64 [5, M]
    index,  # int32 [L, M, IH, pinned P]: chosen slots, ascending; IH = HK, or 1 for all heads
    stride_cn,
    stride_ch,
    stride_cp,
    stride_tb,
    pinned,
    D: tl.constexpr,  # numbers of a token, keys and values
    P: tl.constexpr,
    UNIT: tl.constexpr,
    SHARED: tl.constexpr,  # one choice for all heads
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head, heads = tl.program_id(0), tl.num_programs(0)
    row, _, _, gap, _, at_cache, at_table, at_sums = cut_request(requests, offsets, P, pinned)
    cache += at_cache * UNIT + head * stride_ch
    table += at_table * 4 + row * stride_tb
    if sums is not None:
        sums += at_sums * 4
    choice = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if not SHARED:
        choice = choice * heads + head
    keep = pinned * P
    index += choice.to(tl.int64) * keep
    offs_d = tl.arange(0, BLOCK_D)
    for start in range(0, keep, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        todo = place < keep
        slot = tl.load(index + place, mask=todo, other=0)
        source = block_of(table, slot, todo, pinned, gap, P)
        target = tl.load(table + place // P, mask=todo, other=0).to(tl.int64)
        inside = todo[:, None] & (offs_d < D)[None, :]
        rows = source * stride_cn + (slot % P) * stride_cp
        token = tl.load(cache + rows[:, None] + offs_d[None, :], mask=inside)
        if sums is not None:
            value = tl.load(sums + (source * heads + head) * P + slot % P, mask=todo)
        tl.debug_barrier()  # another thread's target may be this one's source
        rows = target * stride_cn + (place % P) * stride_cp
        tl.store(cache + rows[:, None] + offs_d[None, :], token, mask=inside)
        if sums is not None:
            tl.store(sums + (target * heads + head) * P + place % P, value, mask=todo)


def pin_slots_triton(cuts: PagedCuts, index: Tensor, *, with_sums: bool = False) -> None:
    """`pin_slots` in one launch for all layers."""
    cache, size = cuts.caches[0], cuts.caches[0].shape[2]
    block_d = triton.next_power_of_2(cache.shape[3])
    _pin_kernel[cuts.grid](
        cache, cuts.others[0] if with_sums else None, cuts.tables[0], cuts.offsets, cuts.requests,
        index.contiguous(), *cache_strides(cache), cuts.tables[0].stride(0), cuts.pinned,
        D=cache.shape[3], P=size, UNIT=UNIT // cache.element_size(), SHARED=index.shape[2] == 1,
        BLOCK_K=max(16, _VALUES // block_d), BLOCK_D=block_d, **launch_options(_WARPS, 1),
    )  # fmt: skip


def pin_slots_reference(cuts: PagedCuts, index: Tensor, *, with_sums: bool = False) -> None:
    """`pin_slots` in plain torch, request by request."""
    heads, requests, layers = cuts.grid
    head = torch.arange(heads, device=index.device)[:, None]
    for layer in range(layers):
        tensors = [cuts.caches[layer], *([cuts.others[layer]] if with_sums else [])]
        for m in range(requests):
            blocks, offsets = cuts.held(layer, m)
            chosen = index[layer, m].long().expand(heads, -1)  # [HK, K]
            keep = chosen.shape[1]
            for tensor in tensors:
                kept = tensor[blocks[chosen], head, offsets[chosen]]
                tensor[blocks[:keep], head, offsets[:keep]] = kept


def pin_slots(cuts: PagedCuts, index: Tensor, *, with_sums: bool = False) -> None:
    """Copy slots `index` int32 [L, M, HK or 1, pinned P], ascending, into the pinned blocks.

    with_sums: `cuts.others` are running sums that move along. Raises ValueError on shapes.
    """
    cache = cuts.caches[0]
    heads, requests, layers = cuts.grid
    choices = 1 if index.shape[2] == 1 else heads
    check_shape("index", index, (layers, requests, choices, cuts.pinned * cache.shape[2]))
    check_dtype("index", index, torch.int32)
    if with_sums:
        check_sums(cuts.others[0], cache)
    run = pin_slots_triton if cache.is_cuda else pin_slots_reference
    run(cuts, index, with_sums=with_sums)


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of every shipped configuration."""
    types = {"offsets": "*i64", "requests": "*i64", "table": "*i32", "pinned": "i32"}
    types |= {"cache": "*bf16", "index": "*i32"}
    rows = []
    for arch in ARCHS:
        for values in (32, 64, 128, 256, 512):
            sizes = {"D": values, "P": 32, "UNIT": 8, "SHARED": False, "BLOCK_D": values}
            sizes |= {"BLOCK_K": max(16, _VALUES // values)}
            for optional in ({}, {"sums": "*fp32"}):
                options = launch_options(_WARPS, 1)
                rows.append(aot_row(_pin_kernel, arch, types | optional, sizes, options))
    return rows
