"""The perturbed softmax of a decode step, from the probabilities that attention gives out.

    p'_hj = softmax_j( (ln p_hj + zeta_hj) / tau_b )        over the slots j < n of a KV head
    c_j   = mean, max or sum of p'_hj over the G query heads h of the KV head
    tau_b = tau_start + min(itr, steps) / steps (tau_end - tau_start),  itr = t - prompt + 1

A softmax does not see what is added to all of its logits: ln p is as good as the logit, and p'
is what `perturbed_columns` has for this row. zeta is that of (seed, layer, h, position of the
query, position of the key). Slots with p = 0 (out of a window, below fp16) keep 0.

Two launches, one after the other: the normaliser of each query head, then the columns. Shapes and
grids depend on capacities only: a captured step does this for any length.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    AotRow,
    aot_row,
    check_dtype,
    check_heads,
    check_last_contiguous,
    check_shape,
    launch_options,
)
from ._noise import fold, fold_reference, gumbel2, gumbel_reference, stream

Noise = Literal["gumbel", "none"]
RowGroup = Literal["mean", "max", "sum"]

# Slots a step and warps: of the normaliser, of the columns. The same on every arch.
_CONFIG = ((1024, 4), (256, 4))


@triton.jit
def _inverse_tau(q_positions, prompt_lengths, row, tau_start, tau_end, steps):
    """1 / tau of a row; the first token after the prompt is step 1, prompt tokens are step 0."""
    turn = tl.load(q_positions + row) - tl.load(prompt_lengths + row) + 1
    turn = tl.minimum(tl.maximum(turn, 0), steps).to(tl.float32)
    return 1.0 / (tau_start + turn / steps * (tau_end - tau_start))


@triton.jit
def _tempered(p, held, noise, positions, inverse_tau, GUMBEL: tl.constexpr):
    """log2(e) (ln p + zeta) / tau, -inf for p = 0 and what is not held."""
    some = held & (p > 0.0)
    y = tl.log2(tl.where(some, p, 1.0))
    if GUMBEL:
        y += gumbel2(fold(noise, positions))
    return tl.where(some, y * inverse_tau, float("-inf"))


@triton.jit(do_not_specialize=["key", "steps"])
def _row_lse_kernel(
    probs, positions, seqlens, q_positions, prompt_lengths, lse,
    stride_pb, stride_ph, stride_kb, stride_kh, key, tau_start, tau_end, steps,
    GUMBEL: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Grid (HQ, B); lse in base 2.
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    n = tl.load(seqlens + row * (heads // G) + head // G)
    probs += row * stride_pb + head * stride_ph
    positions += row * stride_kb + head // G * stride_kh
    inverse_tau = _inverse_tau(q_positions, prompt_lengths, row, tau_start, tau_end, steps)
    noise = fold(fold(tl.cast(key, tl.uint32), head), tl.load(q_positions + row))
    m = tl.full([BLOCK], float("-inf"), tl.float32)  # of each lane: one merge, at the end
    l = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        held = offs < n
        p = tl.load(probs + offs, mask=held, other=0.0)
        pos = tl.load(positions + offs, mask=held, other=0)
        y = _tempered(p, held, noise, pos, inverse_tau, GUMBEL)
        m_new = tl.maximum(m, y)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
        l = l * tl.exp2(m - base) + tl.exp2(y - base)
        m = m_new
    top = tl.max(m, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(l * tl.exp2(m - base), 0)
    # A head that attends nothing: +inf makes its probabilities 0.
    row_lse = tl.where(total > 0.0, base + tl.log2(tl.where(total > 0.0, total, 1.0)), float("inf"))
    tl.store(lse + row * heads + head, row_lse)


@triton.jit(do_not_specialize=["key", "steps", "slots"])
def _row_columns_kernel(
    probs, positions, seqlens, q_positions, prompt_lengths, lse, columns,
    stride_pb, stride_ph, stride_kb, stride_kh, key, tau_start, tau_end, steps, slots,
    GROUP: tl.constexpr, GUMBEL: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Grid (blocks of slots, HK, B).
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = row * tl.num_programs(1) + head
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = offs < tl.load(seqlens + group)
    pos = tl.load(positions + row * stride_kb + head * stride_kh + offs, mask=held, other=0)
    inverse_tau = _inverse_tau(q_positions, prompt_lengths, row, tau_start, tau_end, steps)
    q_pos = tl.load(q_positions + row)
    total = tl.zeros([BLOCK], tl.float32)
    for g in range(G):
        p_ptrs = probs + row * stride_pb + (head * G + g) * stride_ph + offs
        p = tl.load(p_ptrs, mask=held, other=0.0)
        noise = fold(fold(tl.cast(key, tl.uint32), head * G + g), q_pos)
        y = _tempered(p, held, noise, pos, inverse_tau, GUMBEL)
        column = tl.exp2(y - tl.load(lse + group * G + g))
        total = tl.maximum(total, column) if GROUP == "max" else total + column
    if GROUP == "mean":
        total = total / G
    tl.store(columns + group * slots + offs, total, mask=offs < slots)


def perturbed_row_triton(
    probs: Tensor, positions: Tensor, seqlens: Tensor, q_positions: Tensor, prompt_lengths: Tensor,
    *, seed: int, layer: int, tau_start: float, tau_end: float, tau_steps: int,
    noise: Noise = "gumbel", group: RowGroup = "mean",
) -> Tensor:  # fmt: skip
    """`perturbed_row` in two Triton launches; no host sync, fixed shapes."""
    tensors = (probs, positions, seqlens, q_positions, prompt_lengths)
    _check(*tensors, seed, layer, (tau_start, tau_end, tau_steps), noise, group)
    (batch, kv_heads, slots), heads = positions.shape, probs.shape[1]
    columns = torch.empty(positions.shape, dtype=torch.float32, device=probs.device)
    if not columns.numel():
        return columns
    lse = torch.empty((batch, heads), dtype=torch.float32, device=probs.device)
    strides = (*probs.stride()[:2], *positions.stride()[:2])
    scalars = (stream(seed, layer), float(tau_start), float(tau_end), tau_steps)
    rest = {"GUMBEL": noise == "gumbel", "G": heads // kv_heads}
    (block, warps), (block_s, warps_s) = _CONFIG
    _row_lse_kernel[heads, batch](
        *tensors, lse, *strides, *scalars, **rest,
        BLOCK=min(block, max(128, triton.next_power_of_2(slots))), **launch_options(warps, 1),
    )  # fmt: skip
    _row_columns_kernel[triton.cdiv(slots, block_s), kv_heads, batch](
        *tensors, lse, columns, *strides, *scalars, slots, **rest,
        GROUP=group, BLOCK=block_s, **launch_options(warps_s, 1),
    )  # fmt: skip
    return columns


def perturbed_row_reference(
    probs: Tensor, positions: Tensor, seqlens: Tensor, q_positions: Tensor, prompt_lengths: Tensor,
    *, seed: int, layer: int, tau_start: float, tau_end: float, tau_steps: int,
    noise: Noise = "gumbel", group: RowGroup = "mean",
) -> Tensor:  # fmt: skip
    """`perturbed_row` in plain torch."""
    tensors = (probs, positions, seqlens, q_positions, prompt_lengths)
    _check(*tensors, seed, layer, (tau_start, tau_end, tau_steps), noise, group)
    (_, kv_heads, slots), heads = positions.shape, probs.shape[1]
    turn = (q_positions - prompt_lengths + 1).clamp(0, tau_steps)
    tau = tau_start + turn.float() / tau_steps * (tau_end - tau_start)  # [B]
    logits = probs[..., :slots].log().unflatten(1, (kv_heads, -1))  # [B, HK, G, S]
    if noise == "gumbel":
        head = torch.arange(heads, dtype=torch.int32, device=probs.device).view(kv_heads, -1)
        row = fold_reference(fold_reference(stream(seed, layer), head), q_positions[:, None, None])
        logits = logits + gumbel_reference(fold_reference(row[..., None], positions[:, :, None]))
    held = torch.arange(slots, device=probs.device) < seqlens[..., None]
    logits = (logits / tau[:, None, None, None]).masked_fill(~held[:, :, None], -torch.inf)
    p = torch.softmax(logits, -1).nan_to_num(0.0)  # NaN: attends nothing
    return reduce_group(p, group)


def reduce_group(x: Tensor, group: str) -> Tensor:
    """[.., .., G, S] -> [.., .., S]."""
    if group == "max":
        return x.amax(2)
    return x.mean(2) if group == "mean" else x.sum(2)


def perturbed_row(
    probs: Tensor, positions: Tensor, seqlens: Tensor, q_positions: Tensor, prompt_lengths: Tensor,
    *, seed: int, layer: int, tau_start: float, tau_end: float, tau_steps: int,
    noise: Noise = "gumbel", group: RowGroup = "mean",
) -> Tensor:  # fmt: skip
    """A decode step's perturbed probabilities by slot: fp32 [B, HK, S], 0 beyond a length.

    probs: fp32 [B, HQ, >= S], what `paged_decode_attention(probs="none")` returns. positions: int32
    [B, HK, S], of the key in each slot. seqlens: int32 [B, HK], slots in use. q_positions, int32
    [B]: of the step's token. prompt_lengths, int32 [B]: tokens of the prompt, where step 0 ends.
    tau: from tau_start to tau_end in tau_steps decode steps, then constant. noise="none": no zeta.
    Raises ValueError when shapes, dtypes or options do not fit together.
    """
    run = perturbed_row_triton if probs.is_cuda else perturbed_row_reference
    return run(
        probs, positions, seqlens, q_positions, prompt_lengths, seed=seed, layer=layer,
        tau_start=tau_start, tau_end=tau_end, tau_steps=tau_steps, noise=noise, group=group,
    )  # fmt: skip


def check_noise(seed: int, layer: int, noise: str) -> None:
    """Raise ValueError unless these name a stream of noise."""
    if noise not in get_args(Noise):
        raise ValueError(f"expected noise in {get_args(Noise)}, got {noise!r}")
    for name, value in (("seed", seed), ("layer", layer)):
        if not 0 <= value < 1 << 32:
            raise ValueError(f"expected {name} in 0 .. 2^32 - 1, got {value}")


def _check(
    probs, positions, seqlens, q_positions, prompt_lengths, seed, layer, tau, noise, group
) -> None:
    check_noise(seed, layer, noise)
    check_shape("positions", positions, (None, None, None))
    check_shape("probs", probs, (positions.shape[0], None, None))
    check_heads(probs.shape[1], positions.shape[1])
    if probs.shape[2] < positions.shape[2]:
        raise ValueError(f"expected probs of >= {positions.shape[2]} slots, got {probs.shape[2]}")
    check_shape("seqlens", seqlens, positions.shape[:2])
    if not seqlens.is_contiguous():  # an expanded view would be read beyond its end
        raise ValueError(f"expected contiguous seqlens, got strides {seqlens.stride()}")
    rows = {"q_positions": q_positions, "prompt_lengths": prompt_lengths}
    for name, x in rows.items():
        check_shape(name, x, positions.shape[:1])
    for name, x in (rows | {"positions": positions, "seqlens": seqlens}).items():
        check_dtype(name, x, torch.int32)
        check_last_contiguous(name, x)
    check_dtype("probs", probs, torch.float32)
    check_last_contiguous("probs", probs)
    if not (tau[0] > 0 and tau[1] > 0 and tau[2] >= 1):
        raise ValueError(f"expected tau_start, tau_end > 0 and tau_steps >= 1, got {tau}")
    if group not in get_args(RowGroup):
        raise ValueError(f"expected group in {get_args(RowGroup)}, got {group!r}")


def row_signatures() -> list[AotRow]:
    """aot_signatures() of the two kernels."""
    ints = ("positions", "seqlens", "q_positions", "prompt_lengths")
    types = dict.fromkeys(ints, "*i32") | dict.fromkeys(("probs", "lse", "columns"), "*fp32")
    types |= {"key": "i32", "steps": "i32", "slots": "i32", "tau_start": "fp32", "tau_end": "fp32"}
    (block, warps), (block_s, warps_s) = _CONFIG
    rows = []
    for arch in ARCHS:
        lse = {"GUMBEL": True, "G": 4, "BLOCK": block}
        columns = lse | {"BLOCK": block_s, "GROUP": "mean"}
        rows.append(aot_row(_row_lse_kernel, arch, types, lse, launch_options(warps, 1)))
        options = launch_options(warps_s, 1)
        rows.append(aot_row(_row_columns_kernel, arch, types, columns, options))
    return rows
