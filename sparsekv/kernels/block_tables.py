"""What a step needs of vLLM's block tables, written where a captured graph reads it.

shorten_tables: row b holds blocks 0 .. P-1, then those from f_b on; what lies between is gone. The
tables of L groups of layers, which differ in their blocks alone, are written by one launch.

    out[l][b, j]  =  tables[l][b, j] if j < P else tables[l][b, j + f_b - P]

store_queries: the newest queries of each request go into its ring of R, by position. With T_b
tokens of row b in the step, the last of them at position lengths[b] - 1:

    ring[slots[b], p mod R]  =  the query at position p        for the last min(T_b, R) positions

Both have fixed shapes and read all that differs between steps from tensors. Rows of slot -1 or
without a token, padding, store nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    ARCHS,
    AotRow,
    aot_row,
    check_alike,
    check_dtype,
    check_shape,
    distances,
    launch_options,
    send,
)

_TABLE_BLOCK, _QUERY_BLOCK, _WARPS = 1024, 1024, 4


@triton.jit(do_not_specialize=["columns"])
def _shorten_kernel(
    table,  # int32 [B, M] of the first group
    out,  # int32 [>= B, >= M] of the first group
    offsets,  # int64 [2, L]: numbers from the first group's to each group's
    first,  # int32 [B]
    stride_tb,
    stride_ob,
    columns,
    pinned,
    BLOCK: tl.constexpr,
):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    group = tl.program_id(2)
    table += tl.load(offsets + group) + row * stride_tb
    out += tl.load(offsets + tl.num_programs(2) + group) + row * stride_ob
    offs = start + tl.arange(0, BLOCK)
    source = tl.where(offs < pinned, offs, offs + tl.load(first + row) - pinned)
    block = tl.load(table + source, mask=source < columns, other=0)
    tl.store(out + offs, block, mask=offs < columns)


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


@dataclass(frozen=True)
class Tables:
    """Tables of L groups and where they are shortened to, at places that stay from step to step.

    tables: int32 [B, M] each; out: int32 [>= B, >= M] each. offsets: int64 [2, L], on their device.
    """

    tables: Sequence[Tensor]
    out: Sequence[Tensor]
    offsets: Tensor

    @classmethod
    def of(cls, tables: Sequence[Tensor], out: Sequence[Tensor]) -> Tables:
        """Their offsets go to the device, unawaited. ValueError unless they are alike, and fit."""
        check_alike("tables", tables, len(out))
        check_alike("out", out, len(tables))
        for name, x in (("tables", tables[0]), ("out", out[0])):
            check_dtype(name, x, torch.int32)
            if x.stride(-1) != 1:
                raise ValueError(f"expected {name}.stride(-1) == 1, got strides {x.stride()}")
        (rows, columns), room = tables[0].shape, out[0].shape
        if room[0] < rows or room[1] < columns:
            raise ValueError(f"expected room for {rows} rows of {columns} blocks, got {list(room)}")
        found = [distances(tables, 4), distances(out, 4)]
        return cls(tables, out, send(torch.tensor(found), tables[0].device))

    def are(self, tables: Sequence[Tensor], out: Sequence[Tensor]) -> bool:
        """Whether those tables are these: of the same shape, at the same places."""
        every = zip((*self.tables, *self.out), (*tables, *out), strict=True)
        return all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in every)


def shorten_tables_triton(tables: Tables, first: Tensor, *, pinned: int) -> None:
    """`shorten_tables` in one launch."""
    table, out = tables.tables[0], tables.out[0]
    rows, columns = table.shape
    grid = (rows, triton.cdiv(columns, _TABLE_BLOCK), len(tables.tables))
    _shorten_kernel[grid](
        table, out, tables.offsets, first, table.stride(0), out.stride(0), columns, pinned,
        BLOCK=_TABLE_BLOCK, **launch_options(_WARPS, 1),
    )  # fmt: skip


def shorten_tables_reference(tables: Tables, first: Tensor, *, pinned: int) -> None:
    """`shorten_tables` in plain torch."""
    rows, columns = tables.tables[0].shape
    place = torch.arange(columns, device=first.device)
    source = torch.where(place < pinned, place, place + (first - pinned)[:, None])  # [B, M]
    for table, out in zip(tables.tables, tables.out, strict=True):
        found = table.gather(1, source.clamp(max=columns - 1))
        out[:rows, :columns] = found.masked_fill(source >= columns, 0)


def shorten_tables(tables: Tables, first: Tensor, *, pinned: int) -> None:
    """Tables of what is held, in place; see the module's formula.

    first int32 [B], at least `pinned`. Rows and columns beyond B and M are left alone; entries that
    have moved up are followed by 0. Raises ValueError for a `first` that does not fit.
    """
    check_shape("first", first, (tables.tables[0].shape[0],))
    check_dtype("first", first, torch.int32)
    run = shorten_tables_triton if first.is_cuda else shorten_tables_reference
    run(tables, first, pinned=pinned)


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
    tables = dict.fromkeys(("table", "out", "first"), "*i32") | {"offsets": "*i64"}
    tables |= dict.fromkeys(("columns", "pinned"), "i32")
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
