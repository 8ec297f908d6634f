"""How much a value can move the attention output: its length after the output projection.

    u_j = mean_{h in group} sum_m | sum_d v_jd W_O[m, h D + d] |        |v_j W_O^(h)|_1, fp32

v [B, HK, T, D], w_o [D_model, HQ * D] as nn.Linear keeps it; query head h reads KV head h // G.
CriticalKV (arXiv 2502.03805) weighs attention by it.

One program owns BLOCK_T values of one KV head and streams the rows of w_o that belong to its G
query heads; |.| is summed in registers, so that T x D_model never exists. As many FLOPs as the
output projection of the T tokens: 2 T D D_model HQ. Sums run in one order: no atomics.
Not supported: a bias (it does not depend on the value), quantised weights.
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
    block_t: int
    block_n: int
    num_warps: int
    num_stages: int


# (arch, padded head_dim) -> tiles: values a program holds, rows of w_o a step.
_UP_TO_128 = (16, 32, 64, 128)
_SMALL, _LARGE = ("sm80", "sm89", "sm120"), ("sm90", "sm100")
_CONFIG: dict[tuple[str, int], _Tiles] = {
    **{(a, d): _Tiles(128, 64, 4, 3) for a in _SMALL for d in _UP_TO_128},
    **{(a, 256): _Tiles(64, 32, 4, 2) for a in _SMALL},
    **{(a, d): _Tiles(128, 128, 8, 3) for a in _LARGE for d in _UP_TO_128},
    **{(a, 256): _Tiles(128, 64, 8, 3) for a in _LARGE},
    **{("gfx942", d): _Tiles(128, 64, 4, 1) for d in _UP_TO_128},
    ("gfx942", 256): _Tiles(64, 32, 4, 1),
    **{("fp32", d): _Tiles(16, 16, 4, 1) for d in (*_UP_TO_128, 256)},
    **{("cpu", d): _Tiles(16, 32, 4, 1) for d in (*_UP_TO_128, 256)},
}
_CHUNK_ELEMENTS = 1 << 22  # projected numbers the reference holds at a time: 16 MB in fp32


@triton.jit(do_not_specialize=["tokens"])
def _projected_norm_kernel(
    v, w_o, norms, stride_vb, stride_vh, stride_vt, stride_w, tokens, model_dim,
    G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid (token blocks, HK, B): the programs of a head follow one another, its w_o stays in L2.
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    v_ptrs = v + row * stride_vb + head * stride_vh + offs_t[:, None] * stride_vt + offs_d[None, :]
    v_load = (offs_t[:, None] < tokens) & (offs_d[None, :] < HEAD_DIM)
    vt = tl.load(v_ptrs, mask=v_load, other=0.0)  # [BLOCK_T, BLOCK_D]
    w_o += head * (G * HEAD_DIM)
    total = tl.zeros([BLOCK_T], tl.float32)
    blocks = tl.cdiv(model_dim, BLOCK_N)
    for turn in tl.range(0, blocks * G):  # the rows of one query head, then those of the next
        n = turn % blocks * BLOCK_N + offs_n
        w_ptrs = w_o + turn // blocks * HEAD_DIM + n.to(tl.int64)[None, :] * stride_w
        w_load = (n[None, :] < model_dim) & (offs_d[:, None] < HEAD_DIM)
        wt = tl.load(w_ptrs + offs_d[:, None], mask=w_load, other=0.0)  # [BLOCK_D, BLOCK_N]
        total += tl.sum(tl.abs(tl.dot(vt, wt, input_precision="ieee")), 1)
    out = norms + (row * heads + head) * tokens + offs_t
    tl.store(out, total / G, mask=offs_t < tokens)


def projected_norm_triton(v: Tensor, w_o: Tensor) -> Tensor:
    """`projected_norm` in one Triton launch; CPU tensors need the interpreter."""
    group = _check(v, w_o)
    batch, heads, tokens, dim = v.shape
    norms = torch.empty((batch, heads, tokens), dtype=torch.float32, device=v.device)
    if norms.numel():
        tiles = lookup(_CONFIG, v)
        _projected_norm_kernel[triton.cdiv(tokens, tiles.block_t), heads, batch](
            v, w_o, norms, *v.stride()[:3], w_o.stride(0), tokens, w_o.shape[0],
            G=group, HEAD_DIM=dim, BLOCK_D=padded_head_dim(dim), BLOCK_T=tiles.block_t,
            BLOCK_N=tiles.block_n, **launch_options(tiles.num_warps, tiles.num_stages),
        )  # fmt: skip
    return norms


def projected_norm_reference(v: Tensor, w_o: Tensor) -> Tensor:
    """`projected_norm` in plain torch; float64 inputs are computed and returned in float64."""
    group = _check(v, w_o)
    batch, heads, tokens, _ = v.shape
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    weights = w_o.unflatten(1, (heads, group, -1))  # [D_model, HK, G, D]
    norms = torch.zeros((batch, heads, tokens), dtype=wide, device=v.device)
    step = max(16, _CHUNK_ELEMENTS // max(1, batch * heads * w_o.shape[0]))
    for start in range(0, tokens, step):
        chunk = v[:, :, start : start + step].to(wide)
        for g in range(group):
            projected = torch.einsum("bhtd,mhd->bhtm", chunk, weights[:, :, g].to(wide))
            norms[:, :, start : start + step] += projected.abs_().sum(-1)
    return norms / group


def _check(v: Tensor, w_o: Tensor) -> int:
    """G; ValueError unless v [B, HK, T, D] and w_o [D_model, HQ * D] fit."""
    check_shape("v", v, [None, None, None, None])
    check_shape("w_o", w_o, [None, None])
    heads, dim = v.shape[1], v.shape[3]
    padded_head_dim(dim)
    if not heads or not w_o.shape[1] or w_o.shape[1] % (heads * dim):
        raise ValueError(
            f"expected w_o with a multiple of HK * D = {heads} * {dim} columns, got {w_o.shape[1]}"
        )
    check_dtype("v", v, *DTYPES, *(() if v.is_cuda else (torch.float64,)))
    check_dtype("w_o", w_o, v.dtype)
    check_last_contiguous("v", v)
    check_last_contiguous("w_o", w_o)
    return w_o.shape[1] // (heads * dim)


def projected_norm(v: Tensor, w_o: Tensor) -> Tensor:
    """Mean over a KV head's query heads of |v_j W_O^(h)|_1: fp32 [B, HK, T].

    v: [B, HK, T, D], any strides but 1 in D. w_o: [D_model, HQ * D] in v's dtype, the weight of the
    output projection; under tensor parallelism the columns of this process's heads.
    Raises ValueError when shapes, dtypes or strides do not fit.
    """
    run = projected_norm_triton if v.is_cuda else projected_norm_reference
    return run(v, w_o)


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of every shipped configuration."""
    rows = []
    for (arch, d), tiles in _CONFIG.items():
        if arch not in ARCHS or d < 64:  # smaller head_dims share the tiles of 64
            continue
        for kind, (block_t, block_n, warps, stages) in (
            ("*bf16", tiles), ("*fp32", _CONFIG["fp32", d]),
        ):  # fmt: skip
            types = {"v": kind, "w_o": kind, "norms": "*fp32", "tokens": "i32", "model_dim": "i32"}
            constants = {"G": 4, "BLOCK_D": d, "BLOCK_T": block_t, "BLOCK_N": block_n}
            constants["HEAD_DIM"] = d - 16 if kind == "*fp32" else d
            options = launch_options(warps, stages)
            rows.append(aot_row(_projected_norm_kernel, arch, types, constants, options))
    return rows
