"""Launcher of the warp-specialised prefill kernel of Hopper (`_prefill_gluon_kernel.py`).

For what a prompt usually is: 16-bit, head_dim 64 or 128, no window, no softcap, no explicit
positions, strides that a descriptor can express.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._common import LOG2E, AotRow, aot_row, arch_of
from ._descriptors import Matrix, matrix_of
from ._prefill_gluon_kernel import BLOCK_M, WG_ROWS, prefill_gluon_kernel


class Tiles(NamedTuple):
    """Keys a tile, tiles of K and of V in shared memory."""

    block_n: int
    stages: int


class Order(NamedTuple):
    """persistent: one program a multiprocessor, else one a block. kv_heads: KV heads whose query
    heads run side by side; 0: all."""

    persistent: bool
    kv_heads: int


# head_dim -> tiles. 128: measured on an H200; 64 keys a tile take 16 to 24 % more time. 64: not
# measured.
TILES: dict[int, Tiles] = {64: Tiles(128, 4), 128: Tiles(128, 2)}
# (from this many rows a sequence, from this many sequences on, order), the last match counts;
# fastest on an H200 at 1 and 4 sequences of 4k, 16k and 32k tokens, 32/8 heads, head_dim 128; what
# lies between counts as the nearer of them.
ORDERS: list[tuple[int, int, Order]] = [
    (0, 1, Order(True, 0)),
    (0, 2, Order(True, 1)),
    (8192, 2, Order(False, 0)),
    (24576, 1, Order(False, 0)),
    (24576, 2, Order(True, 2)),
]
_REGISTERS = {"CONSUMER_REGS": 240, "PRODUCER_REGS": 24}  # 2 * 128 * 240 + 128 * 24 = 63 K of 64 K
_OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}


def matrices(q: Tensor, k: Tensor, v: Tensor) -> tuple[Matrix, Matrix, Matrix] | None:
    """q, k, v as the kernel reads them; None where it cannot: device, dtype, head_dim, strides."""
    if arch_of(q.device) != "sm90" or q.shape[2] not in TILES:
        return None
    found = (matrix_of(q), matrix_of(k), matrix_of(v))
    return None if None in found else found  # type: ignore[return-value]


def launch(
    q: Tensor, k: Tensor, v: Tensor, views: tuple[Matrix, Matrix, Matrix], sinks: Tensor | None,
    out: Tensor, lse: Tensor, lengths: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    max_seqlen_q: int, softmax_scale: float, causal: bool, align_right: bool,
) -> None:  # fmt: skip
    """Write every row of contiguous out [Tq, HQ, D] and lse [HQ, Tq].

    lengths: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k as in prefill_attention.
    """
    (num_q, heads, head_dim), kv_heads = q.shape, k.shape[1]
    sequences, tiles = len(lengths[0]) - 1, TILES[head_dim]
    order = [o for rows, n, o in ORDERS if max_seqlen_q >= rows and sequences >= n][-1]
    group = heads // kv_heads
    side_by_side = order.kv_heads if order.kv_heads and kv_heads % order.kv_heads == 0 else kv_heads
    blocks = triton.cdiv(max_seqlen_q, BLOCK_M.value)
    count = blocks * heads * sequences
    boxes = (WG_ROWS.value, tiles.block_n, tiles.block_n)
    steps = [step for view in views for step in (view.head_row, view.head_col)]
    prefill_gluon_kernel[(min(count, _processors(q.device)) if order.persistent else count,)](
        *map(_descriptor, (q, k, v), views, boxes), sinks, out, lse, *lengths, *steps,
        num_q, count, blocks, sequences, float(softmax_scale) * LOG2E.value,
        CAUSAL=causal, ALIGN_RIGHT=align_right, G=group, NUM_HEADS=heads,
        HEADS_X=side_by_side * group, HEAD_DIM=head_dim, BLOCK_N=tiles.block_n,
        STAGES=tiles.stages, **_REGISTERS, **_OPTIONS,
    )  # fmt: skip


@lru_cache(maxsize=32)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=32)
def _layout(rows: int, head_dim: int, dtype: torch.dtype) -> Any:
    """Shared memory as wgmma reads it: rows of 128 bytes, swizzled."""
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, head_dim], kind)


def _descriptor(x: Tensor, view: Matrix, rows: int) -> TensorDescriptor:
    layout = _layout(rows, x.shape[2], x.dtype)
    return TensorDescriptor(x, view.shape, view.strides, [rows, x.shape[2]], layout)


def aot_rows() -> list[AotRow]:
    """Rows for aot_signatures: every tile choice, lengths given; without; not causal with sinks."""
    rows = []
    for head_dim in TILES:
        used = {"seqused_q": "*i32", "seqused_k": "*i32"}
        rows.append(_aot_row(head_dim, used, causal=True))
        if head_dim == 128:
            rows.append(_aot_row(head_dim, {}, causal=True))
            rows.append(_aot_row(head_dim, used | {"sinks": "*fp32"}, causal=False))
    return rows


def _aot_row(head_dim: int, options: dict[str, str], causal: bool) -> AotRow:
    tiles = TILES[head_dim]

    def box(rows: int) -> str:
        layout = _layout(rows, head_dim, torch.bfloat16)
        return f"tensordesc<bf16[{rows}, {head_dim}],{layout!r}>"

    types = {"q_desc": box(WG_ROWS.value), "out": "*bf16", "lse": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("k_desc", "v_desc"), box(tiles.block_n))
    types |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "*i32")
    types |= dict.fromkeys(("num_q", "tiles", "blocks", "sequences"), "i32")
    types |= {f"{name}_head_{step}": "i32" for name in "qkv" for step in ("row", "col")}
    constexprs = {"CAUSAL": causal, "ALIGN_RIGHT": True, "G": 4, "NUM_HEADS": 32, "HEADS_X": 32}
    constexprs |= {"HEAD_DIM": head_dim, "BLOCK_N": tiles.block_n, "STAGES": tiles.stages}
    return aot_row(prefill_gluon_kernel, "sm90", types | options, constexprs | _REGISTERS, _OPTIONS)
