"""cut_scores, sum_scores and pin_slots: many layers at once, against token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels._cut_layers import PagedCuts
from sparsekv.kernels.cut_scores import cut_scores, sum_scores
from sparsekv.kernels.pin_slots import pin_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case:
    """Requests of which blocks must go, in layers with blocks in any order and garbage in others.

    requests: (tokens cached, first recent block before, and now) each.
    """

    def __init__(
        self, requests, *, layers=2, kv_heads=2, group=2, dim=16, size=16, rows=4, pinned=2,
        tokens_first=True, seed=0,
    ) -> None:  # fmt: skip
        self.gen = torch.Generator().manual_seed(seed)
        self.requests, self.pinned, self.size, self.rows = requests, pinned, size, rows
        self.group, self.dim, self.kv_heads = group, dim, kv_heads
        columns = max(-(-c // size) for c, _, _ in requests) + 1
        count = len(requests) * columns + 1
        self.caches, self.rings, self.sums, self.tables = [], [], [], []
        for _ in range(layers):
            shape = (size, kv_heads) if tokens_first else (kv_heads, size)
            cache = self._normal(count, *shape, 2 * dim)
            self.caches.append(cache.transpose(1, 2) if tokens_first else cache)
            self.rings.append(self._normal(len(requests) + 1, rows, kv_heads * group, dim))
            self.sums.append(torch.rand(count, kv_heads, size, generator=self.gen).to(DEVICE))
            table = torch.randperm(count - 1, generator=self.gen) + 1
            self.tables.append(table.view(len(requests), columns).int().to(DEVICE))
        self.slots = torch.randperm(len(requests) + 1, generator=self.gen)[: len(requests)]

    def _normal(self, *shape):
        return torch.randn(*shape, generator=self.gen).to(DEVICE)

    def cuts(self, others) -> PagedCuts:
        rows = np.arange(len(self.requests))
        numbers = np.array(self.requests).T
        requests = np.stack([rows, self.slots.numpy(), *numbers])
        return PagedCuts.of(self.caches, self.tables, others, requests, self.pinned)

    def places(self, layer: int, m: int) -> list[tuple[int, int]]:
        """(block, offset) of every slot held."""
        computed, before, _ = self.requests[m]
        columns = [*range(self.pinned), *range(before, -(-computed // self.size))]
        held = computed - (before - self.pinned) * self.size
        return [
            (int(self.tables[layer][m, columns[j // self.size]]), j % self.size)
            for j in range(held)
        ]

    def candidates(self, m: int) -> int:
        _, before, now = self.requests[m]
        return (self.pinned + now - before) * self.size

    def expected(self, layer: int, m: int, head: int, scale, softcap, reduction):
        where = self.places(layer, m)
        keys = torch.stack([self.caches[layer][b, head, o, : self.dim] for b, o in where]).double()
        computed, held = self.requests[m][0], len(where)
        shares = torch.zeros(self.group, held, dtype=torch.float64)
        for back in range(self.rows):
            ring = self.rings[layer][self.slots[m], (computed - 1 - back) % self.rows]
            q = ring[head * self.group : (head + 1) * self.group].double()
            x = q @ keys.T * scale
            x = x if softcap is None else softcap * (x / softcap).tanh()
            x[:, held - back :] = -torch.inf
            shares += x.softmax(-1).cpu()
        return {"mean": shares.mean(0), "max": shares.amax(0), "sum": shares.sum(0)}[reduction]


def some_requests(pinned: int, size: int, rows: int):
    """Requests whose blocks go for the first time, or again; all queries newer than candidates."""

    def request(numbers):
        before, going, rest = numbers
        now = before + going
        return (now * size + max(rest, rows), before, now)

    numbers = st.tuples(st.integers(pinned, pinned + 3), st.integers(1, 3), st.integers(1, 40))
    return st.lists(numbers.map(request), min_size=1, max_size=3)


@given(
    data=st.data(),
    rows=st.sampled_from([1, 3, 8, 32]),
    group=st.sampled_from([1, 3, 8]),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([16, 24, 64]),
    size=st.sampled_from([16, 32]),
    tokens_first=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    reduction=st.sampled_from(["mean", "max", "sum"]),
    seed=st.integers(0, 99),
)
def test_votes(
    data, rows, group, kv_heads, dim, size, tokens_first, softcap, reduction, seed
) -> None:
    requests = data.draw(some_requests(2, size, rows))
    case = Case(
        requests, kv_heads=kv_heads, group=group, dim=dim, size=size, rows=rows,
        tokens_first=tokens_first, seed=seed,
    )  # fmt: skip
    how = {"softmax_scale": dim**-0.5, "softcap": softcap, "reduction": reduction}
    found = cut_scores(case.cuts(case.rings), **how)
    for layer in range(len(case.caches)):
        for m in range(len(requests)):
            for head in range(kv_heads):
                wanted = case.expected(layer, m, head, dim**-0.5, softcap, reduction)
                c = case.candidates(m)
                got = found[layer, m, head, :c].double().cpu()
                torch.testing.assert_close(got, wanted[:c], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("reduction", ["mean", "max", "sum"])
def test_many_rows_in_tiles(reduction) -> None:
    """More rows than a tile has: the heads of a group come one after the other."""
    case = Case([(16 * 6 + 100, 2, 4)], group=3, rows=100, layers=1, kv_heads=1)
    found = cut_scores(case.cuts(case.rings), softmax_scale=0.25, reduction=reduction)
    wanted = case.expected(0, 0, 0, 0.25, None, reduction)[:64]
    torch.testing.assert_close(found[0, 0, 0, :64].double().cpu(), wanted, rtol=2e-5, atol=2e-6)


@given(
    data=st.data(),
    shared=st.booleans(),
    with_sums=st.booleans(),
    tokens_first=st.booleans(),
    dim=st.sampled_from([16, 24, 64]),
    seed=st.integers(0, 99),
)
def test_moves(data, shared, with_sums, tokens_first, dim, seed) -> None:
    """Chosen slots stand in order in the pinned blocks; nothing else has changed."""
    requests = data.draw(some_requests(3, 16, 1))
    case = Case(requests, dim=dim, pinned=3, tokens_first=tokens_first, seed=seed)
    keep, heads = 3 * 16, 1 if shared else 2
    index = torch.zeros(2, len(requests), heads, keep, dtype=torch.int32)
    for layer in range(2):
        for m in range(len(requests)):
            for head in range(heads):
                chosen = torch.randperm(case.candidates(m), generator=case.gen)[:keep]
                index[layer, m, head] = chosen.sort().values.int()
    before = [[t.clone() for t in tensors] for tensors in (case.caches, case.sums)]
    wanted = [[t.clone() for t in tensors] for tensors in before]
    for layer in range(2):
        for m in range(len(requests)):
            where = case.places(layer, m)
            for head in range(2):
                row = index[layer, m, 0 if shared else head].tolist()
                for (block, offset), slot in zip(where, row, strict=False):
                    b, o = where[slot]
                    for new, old in zip(wanted, before, strict=True):
                        new[layer][block, head, offset] = old[layer][b, head, o]
    pin_slots(case.cuts(case.sums), index.to(DEVICE), with_sums=with_sums)
    for layer in range(2):
        assert torch.equal(case.caches[layer], wanted[0][layer])
        assert torch.equal(case.sums[layer], (wanted if with_sums else before)[1][layer])


def test_sums_of_candidates() -> None:
    case = Case([(150, 2, 5), (300, 4, 5)])
    found = sum_scores(case.cuts(case.sums))
    for layer in range(2):
        for m in range(2):
            where = case.places(layer, m)[: case.candidates(m)]
            blocks, offsets = torch.tensor(where).T
            wanted = case.sums[layer][blocks, :, offsets].T
            assert torch.equal(found[layer, m, :, : len(where)], wanted)


def test_what_does_not_fit() -> None:
    case = Case([(150, 2, 5)])
    with pytest.raises(ValueError, match="caches of one layout"):
        case.caches[1] = case.caches[1].contiguous()
        case.cuts(case.rings)
    case = Case([(150, 2, 5)])
    with pytest.raises(ValueError, match="one a layer"):
        case.cuts(case.rings[:1])
    with pytest.raises(ValueError, match="16 bytes apart"):
        flat = torch.zeros(2, 2 * case.sums[0].numel(), device=DEVICE)
        ends = [flat[0], flat[1, 1:]]
        case.sums = [end[: case.sums[0].numel()].view(case.sums[0].shape) for end in ends]
        case.cuts(case.sums)
    case = Case([(40 * 16, 2, 5)], rows=129)
    with pytest.raises(ValueError, match="at most 128 voting queries"):
        cut_scores(case.cuts(case.rings), softmax_scale=1.0)
    with pytest.raises(ValueError, match="reduction"):
        small = Case([(150, 2, 5)])
        cut_scores(small.cuts(small.rings), softmax_scale=1.0, reduction="median")
    with pytest.raises(ValueError, match="index of shape"):
        pin_slots(case.cuts(case.rings), torch.zeros(2, 1, 2, 16, dtype=torch.int32))
