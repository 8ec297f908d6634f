"""Column sums of the softmax matrix with K and Q tiles fetched by the hardware (sm90).

The arithmetic of `column_scores.py` for what eviction mostly asks: statistic "sum" without weights,
group "mean" or "sum", 16-bit, no window, no softcap, no explicit positions. A tile is one hardware
copy, and the G heads of a KV head run through one pipelined loop, heads innermost, so that a short
observation window does not drain the pipeline at every head.

Rows of other sequences in a Q tile are masked; foreign keys of the K tile are columns of nobody.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._column_parts import row_zones
from ._common import LOG2E, AotRow, aot_row, arch_of, launch_options
from ._descriptors import Matrix, matrix_of


class Tiles(NamedTuple):
    """Keys and query rows of a tile; heads_first: all heads of a key block run side by side."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    heads_first: bool


# (arch, head_dim) -> (from this many rows on, tiles), ascending. Measured on an H200 (32/8 heads,
# 64, 256 and all rows of 4k, 16k and 32k): few rows want many small programs, all rows large tiles.
CONFIG: dict[tuple[str, int], list[tuple[int, Tiles]]] = {
    ("sm90", 128): [(0, Tiles(64, 64, 4, 2, True)), (512, Tiles(64, 128, 4, 3, True))],
    **{
        ("cpu", d): [(0, Tiles(16, 32, 4, 1, True)), (40, Tiles(32, 16, 4, 1, False))]
        for d in (16, 64, 128)
    },
}
_NO_LIMIT = 1 << 30  # larger row counts are clipped: sums stay in int32


@triton.jit
def _row_lse(
    lse, i, lo, first, nq, stride_lh, MASK: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr
):
    """log2-domain lse [BLOCK_M] of turn i; +inf makes probabilities 0: out of range, empty rows."""
    rows = lo + i // G * BLOCK_M + tl.arange(0, BLOCK_M)
    lse += tl.cast(i % G, tl.int64) * stride_lh
    if MASK:
        value = tl.load(lse + rows, mask=(rows >= first) & (rows < nq), other=float("inf"))
    else:
        value = tl.load(lse + rows)
    return tl.where(value == float("-inf"), float("inf"), value * LOG2E)


@triton.jit
def _accumulate(
    column, kt, qd, lse, q_row, q_col, head_row, head_col, stride_lh, lo, tiles, first, nq,
    first_seen, log2_scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Fold `tiles` tiles of query rows from lo on, of G heads each, into `column` [BLOCK_N].

    kt [BLOCK_N, D]; row 0 of head 0 is at [q_row, q_col] of qd and at lse; key n of the block is
    seen by the rows from first_seen[n] on. Rows outside first .. nq count for nothing.
    """
    count = tiles * G
    if count > 0:
        row_lse = _row_lse(lse, 0, lo, first, nq, stride_lh, MASK, G, BLOCK_M)
    else:
        row_lse = tl.zeros([BLOCK_M], tl.float32)
    for i in tl.range(0, count):
        g = i % G
        start = lo + i // G * BLOCK_M
        qt = qd.load([q_row + g * head_row + start, q_col + g * head_col])  # [BLOCK_M, D]
        x = tl.dot(kt, qt.T)  # [BLOCK_N, BLOCK_M]
        later = tl.minimum(i + 1, count - 1)
        ahead = _row_lse(lse, later, lo, first, nq, stride_lh, MASK, G, BLOCK_M)
        log_p = x * log2_scale - row_lse[None, :]
        if MASK:
            rows = start + tl.arange(0, BLOCK_M)
            seen = ((rows >= first) & (rows < nq))[None, :]
            if CAUSAL:
                seen &= rows[None, :] >= first_seen[:, None]
            log_p = tl.where(seen, log_p, float("-inf"))
        column += tl.sum(tl.exp2(log_p), 1)
        row_lse = ahead
    return column


@triton.jit(do_not_specialize=["stride_lh", "stride_s", "last_rows"])
def column_scores_tma_kernel(
    qd, kd, lse, scores, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    q_head_row, q_head_col, k_head_row, k_head_col, stride_lh, stride_s, softmax_scale, last_rows,
    MEAN: tl.constexpr, CAUSAL: tl.constexpr, ALIGN_RIGHT: tl.constexpr, G: tl.constexpr,
    HEADS_FIRST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Early key blocks have the most rows: they come first, of all heads or of one head in a row.
    if HEADS_FIRST:
        head, block, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    else:
        head, block, kv_heads = tl.program_id(1), tl.program_id(0), tl.num_programs(1)
    n = tl.program_id(2)
    start_q = tl.load(cu_seqlens_q + n)
    start_k = tl.load(cu_seqlens_k + n)
    nq = tl.load(cu_seqlens_q + n + 1) - start_q
    nk = tl.load(cu_seqlens_k + n + 1) - start_k
    if seqused_q is not None:
        nq = tl.load(seqused_q + n)
    if seqused_k is not None:
        nk = tl.load(seqused_k + n)

    n0 = block * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    kt = kd.load([start_k + head * k_head_row + n0, head * k_head_col])  # [BLOCK_N, D]
    first = tl.maximum(0, nq - last_rows)
    rows_end = tl.where(n0 < nk, nq, 0)
    shift = nk - nq if ALIGN_RIGHT else 0
    lo, full_lo, full_hi, _ = row_zones(
        n0, n0, first, rows_end, shift, None, CAUSAL, BLOCK_N, BLOCK_M
    )  # fmt: skip
    lse += tl.cast(head, tl.int64) * G * stride_lh + start_q
    q_row = start_q + head * G * q_head_row
    q_col = head * G * q_head_col
    column = tl.zeros([BLOCK_N], tl.float32)
    column = _accumulate(
        column, kt, qd, lse, q_row, q_col, q_head_row, q_head_col, stride_lh,
        lo, (full_lo - lo) // BLOCK_M, first, nq, offs_n - shift, softmax_scale * LOG2E,
        True, CAUSAL, G, BLOCK_M,
    )  # fmt: skip
    column = _accumulate(
        column, kt, qd, lse, q_row, q_col, q_head_row, q_head_col, stride_lh,
        full_lo, (full_hi - full_lo) // BLOCK_M, first, nq, offs_n - shift, softmax_scale * LOG2E,
        False, CAUSAL, G, BLOCK_M,
    )  # fmt: skip
    if MEAN:
        column = column / G
    s_ptrs = scores + (tl.cast(n, tl.int64) * kv_heads + head) * stride_s + offs_n
    tl.store(s_ptrs, tl.where(offs_n < nk, column, 0.0), mask=offs_n < stride_s)


def matrices(q: Tensor, k: Tensor) -> tuple[Matrix, Matrix] | None:
    """q and k as the kernel reads them; None where it cannot: device, dtype, head_dim, strides."""
    if (arch_of(q.device), q.shape[2]) not in CONFIG:
        return None
    views = matrix_of(q), matrix_of(k)
    return None if None in views else views  # type: ignore[return-value]


def launch(
    q: Tensor, k: Tensor, views: tuple[Matrix, Matrix], lse: Tensor, scores: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor | None, Tensor | None], max_seqlen_q: int,
    rows: int | None, softmax_scale: float, mean: bool, **masking: bool,
) -> None:  # fmt: skip
    """Write scores [N, HK, S]; lengths: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
    masking: the constants CAUSAL and ALIGN_RIGHT."""
    (sequences, kv_heads, slots), group = scores.shape, q.shape[1] // k.shape[1]
    reach = max_seqlen_q if rows is None else min(rows, max_seqlen_q)
    choices = CONFIG[arch_of(q.device), q.shape[2]]
    tiles = [t for least, t in choices if reach >= least][-1]
    blocks = triton.cdiv(slots, tiles.block_n)
    pair = (kv_heads, blocks) if tiles.heads_first else (blocks, kv_heads)
    boxes = ([tiles.block_m, q.shape[2]], [tiles.block_n, q.shape[2]])
    column_scores_tma_kernel[(*pair, sequences)](
        TensorDescriptor(q, views[0].shape, views[0].strides, boxes[0]),
        TensorDescriptor(k, views[1].shape, views[1].strides, boxes[1]),
        lse, scores, *lengths, *views[0][2:], *views[1][2:], lse.stride(0), slots,
        float(softmax_scale), min(rows or _NO_LIMIT, _NO_LIMIT), MEAN=mean,
        **masking, G=group, HEADS_FIRST=tiles.heads_first, BLOCK_N=tiles.block_n,
        BLOCK_M=tiles.block_m, **launch_options(tiles.num_warps, tiles.num_stages),
    )  # fmt: skip


def aot_rows() -> list[AotRow]:
    """Rows for aot_signatures: every shipped tile choice, bf16, causal, lengths given."""
    rows = []
    for (arch, head_dim), choices in CONFIG.items():
        for _, tiles in choices if arch != "cpu" else []:
            types = {"qd": f"tensordesc<bf16[{tiles.block_m}, {head_dim}]>", "lse": "*fp32"}
            types |= {"kd": f"tensordesc<bf16[{tiles.block_n}, {head_dim}]>", "scores": "*fp32"}
            names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
            types |= dict.fromkeys(names, "*i32")
            types |= {f"{name}_head_{step}": "i32" for name in "qk" for step in ("row", "col")}
            types |= {"softmax_scale": "fp32", "last_rows": "i32"}
            constexprs = {"MEAN": True, "CAUSAL": True, "ALIGN_RIGHT": True, "G": 4}
            constexprs |= {"HEADS_FIRST": tiles.heads_first}
            constexprs |= {"BLOCK_N": tiles.block_n, "BLOCK_M": tiles.block_m}
            launch_with = launch_options(tiles.num_warps, tiles.num_stages)
            rows.append(aot_row(column_scores_tma_kernel, arch, types, constexprs, launch_with))
    return rows
