"""block_tables: the kernels against their references, and the references against the formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels.block_tables import (
    shorten_tables,
    shorten_tables_reference,
    shorten_tables_triton,
    store_queries,
    store_queries_reference,
    store_queries_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@given(
    rows=st.integers(1, 4), columns=st.integers(2, 1100), pinned=st.integers(1, 3), data=st.data()
)
def test_tables(rows: int, columns: int, pinned: int, data) -> None:
    pinned = min(pinned, columns)
    first = [data.draw(st.integers(pinned, columns)) for _ in range(rows)]
    table = torch.randint(1, 9999, (rows, columns), dtype=torch.int32, device=DEVICE)
    lengths = torch.randint(columns * 16, (rows,), dtype=torch.int32, device=DEVICE)
    f = torch.tensor(first, dtype=torch.int32, device=DEVICE)
    found = []
    for run in (shorten_tables_triton, shorten_tables_reference):
        out = torch.full((rows + 1, columns + 3), -7, dtype=torch.int32, device=DEVICE)
        out_lengths = torch.full((rows + 2,), -7, dtype=torch.int32, device=DEVICE)
        run(table, lengths, f, out, out_lengths, pinned=pinned, block_size=16)
        found.append((out.tolist(), out_lengths.tolist()))
    assert found[0] == found[1]
    out, out_lengths = found[0]
    for b in range(rows):
        held = table[b, :pinned].tolist() + table[b, first[b] :].tolist()
        assert out[b] == held + [0] * (columns - len(held)) + [-7] * 3
        assert out_lengths[b] == int(lengths[b]) - (first[b] - pinned) * 16
    assert set(out[rows]) == {-7} and out_lengths[rows:] == [-7, -7]


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    ring_rows=st.integers(1, 6),
    heads=st.integers(1, 3),
    data=st.data(),
)
def test_queries(counts: list[int], ring_rows: int, heads: int, data) -> None:
    batch, dim, total = len(counts), 8, sum(counts)
    before = [data.draw(st.integers(0, 20)) for _ in counts]
    slots = data.draw(st.permutations(range(batch + 1)))[:batch]
    slots[0] = data.draw(st.sampled_from([slots[0], -1]))
    # As vLLM has it: a part of the projection of queries, keys and values, and padding.
    query = torch.randn(total + 2, (heads + 2) * dim, device=DEVICE)[:, : heads * dim]
    query = query.unflatten(1, (heads, dim))
    start = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    lengths = torch.tensor([b + c for b, c in zip(before, counts, strict=True)])
    lengths = lengths.int().to(DEVICE)
    at = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    rings = []
    for run in (store_queries_triton, store_queries_reference):
        ring = torch.zeros(batch + 1, ring_rows, heads, dim, device=DEVICE)
        run(query, ring, start, lengths, at, max_query_len=max(counts) or 1)
        rings.append(ring)
    assert torch.equal(*rings)
    wanted = torch.zeros_like(rings[0])
    for b, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        for i in range(max(0, count - ring_rows), count):
            if slot >= 0:
                wanted[slot, (before[b] + i) % ring_rows] = query[int(start[b]) + i]
    assert torch.equal(rings[0], wanted)


def test_what_does_not_fit_is_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="room for 2 rows of 5"):
        shorten_tables(table, ints, ints, table[:, :4], ints, pinned=1, block_size=16)
    with pytest.raises(ValueError, match="first"):
        shorten_tables(table, ints, ints.long(), table, ints, pinned=1, block_size=16)
    query, ring = torch.zeros(3, 2, 8), torch.zeros(2, 4, 2, 8)
    start = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="side by side"):
        swapped = torch.zeros(3, 8, 2).mT
        store_queries(swapped, ring, start, ints, ints, max_query_len=1)
    with pytest.raises(ValueError, match="ring"):
        store_queries(query, ring.half(), start, ints, ints, max_query_len=1)
