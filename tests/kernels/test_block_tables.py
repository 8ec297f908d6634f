"""block_tables: the kernels against their references, and the references against the formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels.block_tables import (
    Tables,
    shorten_tables,
    shorten_tables_reference,
    shorten_tables_triton,
    store_queries,
    store_queries_reference,
    store_queries_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@given(
    groups=st.integers(1, 3), rows=st.integers(1, 4), columns=st.integers(2, 1100),
    pinned=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_tables(groups: int, rows: int, columns: int, pinned: int, data) -> None:
    pinned = min(pinned, columns)
    first = [data.draw(st.integers(pinned, columns)) for _ in range(rows)]
    like = {"dtype": torch.int32, "device": DEVICE}
    tables = [torch.randint(1, 9999, (rows, columns), **like) for _ in range(groups)]
    found = []
    for run in (shorten_tables_triton, shorten_tables_reference):
        out = [torch.full((rows + 1, columns + 3), -7, **like) for _ in range(groups)]
        run(Tables.of(tables, out), torch.tensor(first, **like), pinned=pinned)
        found.append([x.tolist() for x in out])
    assert found[0] == found[1]
    for table, out in zip(tables, found[0], strict=True):
        for b in range(rows):
            held = table[b, :pinned].tolist() + table[b, first[b] :].tolist()
            assert out[b] == held + [0] * (columns - len(held)) + [-7] * 3
        assert set(out[rows]) == {-7}


def test_tables_are_known_by_their_places_and_shapes() -> None:
    table, out = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(4, 5, dtype=torch.int32)
    tables = Tables.of([table[:3]], [out])
    assert tables.are([table[:3]], [out])
    for other in (table[1:], table[:2], table.clone()[:3]):
        assert not tables.are([other], [out])


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
        Tables.of([table], [table[:, :4]])
    with pytest.raises(ValueError, match="2 tables, got 1"):
        Tables.of([table], [table, table])
    with pytest.raises(ValueError, match="tables of one layout"):
        Tables.of([table, table[:, :4]], [table, table])
    with pytest.raises(ValueError, match="dtype"):
        Tables.of([table.long()], [table])
    with pytest.raises(ValueError, match="first"):
        shorten_tables(Tables.of([table], [table]), ints.long(), pinned=1)
    query, ring = torch.zeros(3, 2, 8), torch.zeros(2, 4, 2, 8)
    start = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="side by side"):
        swapped = torch.zeros(3, 8, 2).mT
        store_queries(swapped, ring, start, ints, ints, max_query_len=1)
    with pytest.raises(ValueError, match="ring"):
        store_queries(query, ring.half(), start, ints, ints, max_query_len=1)
