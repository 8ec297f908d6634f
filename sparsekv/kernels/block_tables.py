"""What a step needs of vLLM's block tables, written where a captured graph reads it.

shorten_tables: row b holds blocks 0 .. P-1, then those from f_b on; what lies between is gone.

    out_table[b, j]  =  table[b, j] if j < P else table[b, j + f_b - P]
    out_lengths[b]   =  lengths[b] - (f_b - P) * block_size

store_queries: the newest queries of each request go into its ring of R, by position. With T_b
tokens of row b in the step, the last of them at position lengths[b] - 1:

    ring[slots[b], p mod R]  =  the query at position p        for the last min(T_b, R) positions

Both have fixed shapes and read all that differs between steps from tensors. Rows of slot -1 or
without a token, padding, store nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import ARCHS, AotRow, aot_row, check_dtype, check_shape, launch_options

_TABLE_BLOCK, _QUERY_BLOCK, _WARPS = 1024, 1024, 4


@triton.jit(do_not_specialize=["columns"])
def _shorten_kernel(
    table, lengths, first, out_table, out_lengths, stride_tb, stride_ob, columns, pinned,
    block_size, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    gap = tl.load(first + row) - pinned
    offs = start + tl.arange(0, BLOCK)
    source = tl.where(offs < pinned, offs, offs + gap)
    block = tl.load(table + row * stride_tb + source, mask=source < columns, other=0)
    tl.store(out_table + row * stride_ob + offs, block, mask=offs < columns)
    if start == 0:
        tl.store(out_lengths + row, tl.load(lengths + row) - gap * block_size)


@triton.jit(do_not_specialize=["ring_rows"])
def _store_kernel(
    query, ring, query_start, lengths, slots, stride_qt, stride_rs, stride_rr, ring_rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, back = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + row + 1) - 1 - back
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (token >= tl.load(query_start + row)):
        place = (tl.load(lengths + row) - 1 - back) % ring_rows
        source = query + token.to(tl.int64) * stride_qt
        target = ring + slot * stride_rs + place * stride_rr
        for start in range(0, SIZE, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            tl.store(target + offs, tl.load(source + offs, offs < SIZE), offs < SIZE)


def shorten_tables_triton(
    table: Tensor, lengths: Tensor, first: Tensor, out_table: Tensor, out_lengths: Tensor, *,
    pinned: int, block_size: int,
) -> None:  # fmt: skip
    """`shorten_tables` in one launch."""
    rows, columns = table.shape
    grid = (rows, triton.cdiv(columns, _TABLE_BLOCK))
    _shorten_kernel[grid](
        table, lengths, first, out_table, out_lengths, table.stride(0), out_table.stride(0),
        columns, pinned, block_size, BLOCK=_TABLE_BLOCK, **launch_options(_WARPS, 1),
    )  # fmt: skip


def shorten_tables_reference(
    table: Tensor, lengths: Tensor, first: Tensor, out_table: Tensor, out_lengths: Tensor, *,
    pinned: int, block_size: int,
) -> None:  # fmt: skip
    """`shorten_tables` in plain torch."""
    rows, columns = table.shape
    place = torch.arange(columns, device=table.device)
    gap = (first - pinned)[:, None]
    source = torch.where(place < pinned, place, place + gap)  # [B, M]
    found = table.gather(1, source.clamp(max=columns - 1))
    out_table[:rows, :columns] = found.masked_fill(source >= columns, 0)
    out_lengths[:rows] = lengths - gap[:, 0] * block_size


def shorten_tables(
    table: Tensor, lengths: Tensor, first: Tensor, out_table: Tensor, out_lengths: Tensor, *,
    pinned: int, block_size: int,
) -> None:  # fmt: skip
    """Tables and lengths of what is held, in place; see the module's formulas.

    table int32 [B, M], lengths and first int32 [B], with pinned <= first; out_table int32
    [>= B, >= M], out_lengths int32 [>= B]: rows and columns beyond B and M are left alone, entries
    that have moved up are followed by 0. Raises ValueError on shapes or dtypes that do not fit.
    """
    rows, columns = table.shape
    for name, x in (("lengths", lengths), ("first", first)):
        check_shape(name, x, (rows,))
    for name, x in (
        ("table", table), ("lengths", lengths), ("first", first), ("out_table", out_table),
        ("out_lengths", out_lengths),
    ):  # fmt: skip
        check_dtype(name, x, torch.int32)
        if x.stride(-1) != 1:
            raise ValueError(f"expected {name}.stride(-1) == 1, got strides {x.stride()}")
    if out_table.shape[0] < rows or out_table.shape[1] < columns or len(out_lengths) < rows:
        raise ValueError(
            f"expected room for {rows} rows of {columns} blocks, got {list(out_table.shape)} and "
            f"{len(out_lengths)} lengths"
        )
    run = shorten_tables_triton if table.is_cuda else shorten_tables_reference
    run(table, lengths, first, out_table, out_lengths, pinned=pinned, block_size=block_size)


def store_queries_triton(
    query: Tensor, ring: Tensor, query_start: Tensor, lengths: Tensor, slots: Tensor, *,
    max_query_len: int,
) -> None:  # fmt: skip
    """`store_queries` in one launch."""
    ring_rows, heads, dim = ring.shape[1:]
    grid = (len(slots), min(ring_rows, max_query_len))
    size = heads * dim
    _store_kernel[grid](
        query, ring, query_start, lengths, slots, query.stride(0), ring.stride(0), ring.stride(1),
        ring_rows, SIZE=size, BLOCK=min(_QUERY_BLOCK, triton.next_power_of_2(size)),
        **launch_options(_WARPS, 1),
    )  # fmt: skip


def store_queries_reference(
    query: Tensor, ring: Tensor, query_start: Tensor, lengths: Tensor, slots: Tensor, *,
    max_query_len: int,
) -> None:  # fmt: skip
    """`store_queries` in plain torch, row by row."""
    rows = ring.shape[1]
    starts = query_start.tolist()
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        end = starts[row + 1]
        kept = min(end - starts[row], rows)
        if slot >= 0 and kept > 0:
            places = torch.arange(length - kept, length, device=ring.device) % rows
            ring[slot, places] = query[end - kept : end]


def store_queries(
    query: Tensor, ring: Tensor, query_start: Tensor, lengths: Tensor, slots: Tensor, *,
    max_query_len: int,
) -> None:  # fmt: skip
    """Keep the newest queries of each request in its ring, in place; see the module's formulas.

    query [>= tokens, HQ, D] with heads side by side; ring [S, R, HQ, D] of its dtype, contiguous;
    query_start int32 [B + 1], lengths (all tokens of a request, this step's included) and slots
    int32 [B]. max_query_len: the most tokens of a row. ValueError if they do not fit together.
    """
    batch = len(slots)
    check_shape("ring", ring, (None, None, *query.shape[1:]))
    check_dtype("ring", ring, query.dtype)
    check_shape("query_start", query_start, (batch + 1,))
    check_shape("lengths", lengths, (batch,))
    for name, x in (("query_start", query_start), ("lengths", lengths), ("slots", slots)):
        check_dtype(name, x, torch.int32)
    if query.stride(2) != 1 or (query.shape[1] > 1 and query.stride(1) != query.shape[2]):
        raise ValueError(f"expected heads side by side, got query strides {query.stride()}")
    if not ring.is_contiguous():
        raise ValueError(f"expected a contiguous ring, got strides {ring.stride()}")
    run = store_queries_triton if query.is_cuda else store_queries_reference
    run(query, ring, query_start, lengths, slots, max_query_len=max_query_len)


def aot_signatures() -> list[AotRow]:
    """(kernel, signature, constexprs, launch options, arch) of both kernels, HQ = 32, D = 128."""
    tables = dict.fromkeys(("table", "lengths", "first", "out_table", "out_lengths"), "*i32")
    tables |= dict.fromkeys(("columns", "pinned", "block_size"), "i32")
    queries = dict.fromkeys(("query_start", "lengths", "slots"), "*i32")
    queries |= {"query": "*bf16", "ring": "*bf16", "ring_rows": "i32"}
    options = launch_options(_WARPS, 1)
    sizes = {"SIZE": 32 * 128, "BLOCK": _QUERY_BLOCK}
    return [
        row
        for arch in ARCHS
        for row in (
            aot_row(_shorten_kernel, arch, tables, {"BLOCK": _TABLE_BLOCK}, options),
            aot_row(_store_kernel, arch, queries, sizes, options),
        )
    ]
