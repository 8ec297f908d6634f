"""The slot a decode step gives up: fold in the step's probabilities, find the victim, make room.

Per row b and KV head h with n = cache_seqlens slots in use, in one pass over them:

    s_j    <- decay * s_j + p_j                                          (if probs are given)
    victim  = argmin over slots with sinks <= pos_j <= current - recent
              of (s_j, pos_j), or of pos_j alone (by="position"); NaN counts as -inf

    action "observe"   nothing else
    action "replace"   slot = victim if n >= budget else n;  n <- max(n, slot + 1)
    action "drop"      if n > budget: the last slot moves into the victim's place;  n <- n - 1

budget, sinks and recent may differ from head to head; a head that keeps all has a huge budget.
One program a head, so nothing races and no atomics are needed; the order is total (positions of a
head are distinct), so nothing depends on scheduling. Lengths stay on the device: a captured step
does the same work whether or not the budget is in use.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    AotRow,
    aot_row,
    check_dtype,
    check_last_contiguous,
    check_shape,
    launch_options,
    padded_head_dim,
)
from ._pool import check_pool
from ._quant import check_scales, raw

Action = Literal["observe", "replace", "drop"]
By = Literal["score", "position"]

_ACTIONS = ("observe", "replace", "drop")
# Slots a step and warps, the same on every arch: the pass is bound by latency, not by width.
_CONFIG = (1024, 4)
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _evict_kernel(
    k_pages, v_pages, positions, scores, block_table, seqlens, probs, slots,
    current, budget, sinks, recent, decay, k_scales, v_scales,
    stride_kn, stride_kp, stride_vn, stride_vp, stride_tb, stride_th, stride_pb, stride_ph,
    ACTION: tl.constexpr, BY_SCORE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = row * tl.num_programs(0) + head
    table = block_table + row * stride_tb + head * stride_th
    n = tl.load(seqlens + group)
    oldest = tl.load(sinks + group)
    newest = tl.load(current + row) - tl.load(recent + group)
    best, best_pos, best_slot = float("inf"), _LAST, -1
    for start in range(0, n, BLOCK_S):
        offs = start + tl.arange(0, BLOCK_S)
        held = offs < n
        page = tl.load(table + offs // P, mask=held, other=0).to(tl.int64)
        at = page * P + offs % P  # [BLOCK_S]
        key = tl.zeros([BLOCK_S], tl.float32)
        if BY_SCORE or probs is not None:
            key = tl.load(scores + at, mask=held, other=0.0)
        if probs is not None:
            p = tl.load(probs + row * stride_pb + head * stride_ph + offs, mask=held, other=0.0)
            key = key * decay + p
            tl.store(scores + at, key, mask=held)
        if ACTION != "observe":
            pos = tl.load(positions + at, mask=held, other=0)
            candidate = held & (pos >= oldest) & (pos <= newest)
            if BY_SCORE:
                key = tl.where(key == key, key, float("-inf"))
            else:
                key = tl.zeros([BLOCK_S], tl.float32)
            key = tl.where(candidate, key, float("inf"))
            low = tl.min(key, 0)
            tie = candidate & (key == low)
            low_pos = tl.min(tl.where(tie, pos, _LAST), 0)
            low_slot = tl.max(tl.where(tie & (pos == low_pos), offs, -1), 0)
            better = (low < best) | ((low == best) & (low_pos < best_pos))
            best = tl.where(better, low, best)
            best_pos = tl.where(better, low_pos, best_pos)
            best_slot = tl.where(better, low_slot, best_slot)
    if ACTION == "replace":
        slot = tl.where(n >= tl.load(budget + group), tl.maximum(best_slot, 0), n)
        tl.store(slots + group, slot)
        tl.store(seqlens + group, tl.maximum(n, slot + 1))
    if ACTION == "drop":  # noqa: SIM102, the compiler must see this condition by itself
        if (n > tl.load(budget + group)) & (best_slot >= 0):
            tl.debug_barrier()  # scores written above are read below by other threads
            last = n - 1
            source = tl.load(table + last // P).to(tl.int64)
            target = tl.load(table + best_slot // P).to(tl.int64)
            offs_d = tl.arange(0, BLOCK_D)
            k = tl.load(k_pages + source * stride_kn + last % P * stride_kp + offs_d, offs_d < D)
            v = tl.load(v_pages + source * stride_vn + last % P * stride_vp + offs_d, offs_d < D)
            pos = tl.load(positions + source * P + last % P)
            score = tl.load(scores + source * P + last % P)
            at = best_slot % P
            tl.store(k_pages + target * stride_kn + at * stride_kp + offs_d, k, offs_d < D)
            tl.store(v_pages + target * stride_vn + at * stride_vp + offs_d, v, offs_d < D)
            tl.store(positions + target * P + at, pos)
            tl.store(scores + target * P + at, score)
            if k_scales is not None:
                k_scale = tl.load(k_scales + source * P + last % P)
                v_scale = tl.load(v_scales + source * P + last % P)
                tl.store(k_scales + target * P + at, k_scale)
                tl.store(v_scales + target * P + at, v_scale)
            tl.store(seqlens + group, last)


def evict_slot_triton(
    k_pages: Tensor, v_pages: Tensor, positions: Tensor, scores: Tensor, block_table: Tensor,
    cache_seqlens: Tensor, *, action: Action, by: By, current: Tensor, budget: Tensor,
    sinks: Tensor, recent: Tensor, probs: Tensor | None = None, decay: float = 1.0,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """`evict_slot` in one Triton launch on a grid of heads; no host sync."""
    batch, heads = cache_seqlens.shape
    limits = (current, budget, sinks, recent)
    _check(k_pages, v_pages, positions, scores, block_table, cache_seqlens, action, probs, limits)
    check_scales(k_pages, k_scales, v_scales)
    slots = torch.empty_like(cache_seqlens) if action == "replace" else None
    block, warps = _CONFIG
    size, dim = k_pages.shape[1:]
    capacity = block_table.shape[2] * size
    _evict_kernel[heads, batch](
        raw(k_pages), raw(v_pages), positions, scores, block_table, cache_seqlens, probs, slots,
        *limits, float(decay), k_scales, v_scales,
        *k_pages.stride()[:2], *v_pages.stride()[:2], *block_table.stride()[:2],
        *((0, 0) if probs is None else probs.stride()[:2]),
        ACTION=action, BY_SCORE=by == "score", D=dim, BLOCK_D=padded_head_dim(dim), P=size,
        BLOCK_S=min(block, max(16, triton.next_power_of_2(capacity))),
        **launch_options(warps, 1),
    )  # fmt: skip
    return slots


def evict_slot_reference(
    k_pages: Tensor, v_pages: Tensor, positions: Tensor, scores: Tensor, block_table: Tensor,
    cache_seqlens: Tensor, *, action: Action, by: By, current: Tensor, budget: Tensor,
    sinks: Tensor, recent: Tensor, probs: Tensor | None = None, decay: float = 1.0,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """`evict_slot` in plain torch."""
    limits = (current, budget, sinks, recent)
    _check(k_pages, v_pages, positions, scores, block_table, cache_seqlens, action, probs, limits)
    check_scales(k_pages, k_scales, v_scales)
    size, n = k_pages.shape[1], cache_seqlens.clone()
    slot = torch.arange(block_table.shape[2] * size, device=n.device)
    page = block_table.long().repeat_interleave(size, dim=2)  # [B, HK, S]
    offset = (slot % size).expand_as(page)
    held = slot < n[..., None]
    if probs is not None:
        new = scores[page, offset] * decay + probs[..., : len(slot)]
        scores[page[held], offset[held]] = new[held]
    if action == "observe":
        return None
    pos = positions[page, offset]
    candidate = held & (pos >= sinks[..., None])
    candidate &= pos <= (current[:, None] - recent)[..., None]
    key = scores[page, offset].float() if by == "score" else torch.zeros_like(pos).float()
    key = torch.where(key.isnan(), -torch.inf, key).masked_fill(~candidate, torch.inf)
    tie = candidate & (key == key.amin(-1, keepdim=True))
    victim = torch.where(tie, pos, _LAST.value).argmin(-1)
    if action == "replace":
        slots = torch.where(n >= budget, victim, n).int()
        cache_seqlens.copy_(torch.maximum(n, slots + 1))
        return slots
    over = (n > budget) & candidate.any(-1)
    for b, h in over.nonzero().tolist():
        last, place = int(n[b, h]) - 1, int(victim[b, h])
        source = (page[b, h, last], offset[b, h, last])
        target = (page[b, h, place], offset[b, h, place])
        for pages in (raw(k_pages), raw(v_pages), positions, scores, k_scales, v_scales):
            if pages is not None:
                pages[target] = pages[source].clone()
    cache_seqlens.copy_(n - over.int())
    return None


def _check(k_pages, v_pages, positions, scores, block_table, seqlens, action, probs, limits):
    check_pool(k_pages, v_pages, positions, scores)
    check_shape("cache_seqlens", seqlens, (None, None))
    check_shape("block_table", block_table, (*seqlens.shape, None))
    check_last_contiguous("block_table", block_table)
    tensors = {"block_table": block_table, "cache_seqlens": seqlens}
    tensors |= dict(zip(("current", "budget", "sinks", "recent"), limits, strict=True))
    for name, x in tensors.items():
        check_dtype(name, x, torch.int32)
    check_shape("current", limits[0], seqlens.shape[:1])
    check_last_contiguous("current", limits[0])
    for x, name in zip(limits[1:], ("budget", "sinks", "recent"), strict=True):
        check_shape(name, x, seqlens.shape)
        if not x.is_contiguous():  # the kernel knows one stride
            raise ValueError(f"expected contiguous {name}, got strides {x.stride()}")
    if action not in _ACTIONS:
        raise ValueError(f"expected action to be one of {_ACTIONS}, got {action!r}")
    if not seqlens.is_contiguous():  # written in place: a copy would be lost
        raise ValueError(f"expected contiguous cache_seqlens, got strides {seqlens.stride()}")
    if probs is not None:
        check_shape("probs", probs, (*seqlens.shape, None))
        check_dtype("probs", probs, torch.float32)
        check_last_contiguous("probs", probs)


def evict_slot(
    k_pages: Tensor, v_pages: Tensor, positions: Tensor, scores: Tensor, block_table: Tensor,
    cache_seqlens: Tensor, *, action: Action, by: By, current: Tensor, budget: Tensor,
    sinks: Tensor, recent: Tensor, probs: Tensor | None = None, decay: float = 1.0,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Update scores, then make room for a token or drop one; in place. See the module's formulas.

    k_pages, v_pages [N,P,D]; positions int32 [N,P]; scores fp32 [N,P]; block_table int32
    [B,HK,maxP]; cache_seqlens int32 [B,HK], updated in place. current: int32 [B], position of
    the step's token; budget, sinks, recent: int32 [B,HK], contiguous. probs fp32
    [B,HK,>= maxP * P] by slot. k_scales, v_scales: fp32 [N,P] of quantised pages, they move with a
    slot. Returns the slot to write, int32 [B,HK], for "replace", else None. No page may belong to
    two heads. Raises ValueError on shapes, dtypes or actions that do not fit.
    """
    run = evict_slot_triton if k_pages.is_cuda else evict_slot_reference
    return run(
        k_pages, v_pages, positions, scores, block_table, cache_seqlens, action=action, by=by,
        current=current, budget=budget, sinks=sinks, recent=recent, probs=probs, decay=decay,
        k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) with P = 16, D = 128."""
    ints = ("positions", "block_table", "seqlens", "current", "budget", "sinks", "recent")
    types = dict.fromkeys(ints, "*i32") | dict.fromkeys(("k_pages", "v_pages"), "*bf16")
    types |= {"scores": "*fp32", "decay": "fp32"}
    shape = {"D": 128, "BLOCK_D": 128, "P": 16, "BLOCK_S": _CONFIG[0]}
    quantised = {"k_pages": "*u8", "v_pages": "*u8", "k_scales": "*fp32", "v_scales": "*fp32"}
    cases = [
        ({"probs": "*fp32"}, {"ACTION": "drop", "BY_SCORE": True}),
        ({"probs": "*fp32"}, {"ACTION": "observe", "BY_SCORE": True}),
        ({"slots": "*i32"}, {"ACTION": "replace", "BY_SCORE": True}),
        ({"slots": "*i32"}, {"ACTION": "replace", "BY_SCORE": False}),
        ({"probs": "*fp32"} | quantised, {"ACTION": "drop", "BY_SCORE": True}),
    ]
    return [
        aot_row(_evict_kernel, arch, types | more, shape | constants, launch_options(_CONFIG[1], 1))
        for arch in ARCHS
        for more, constants in cases
    ]
