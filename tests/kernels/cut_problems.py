"""Requests of which blocks must go, for the tests of cut_scores and pin_slots."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from sparsekv.kernels._cut_layers import PagedCuts

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
        rows, numbers = torch.arange(len(self.requests)), torch.tensor(self.requests).T
        requests = torch.stack([rows, self.slots, *numbers])
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
