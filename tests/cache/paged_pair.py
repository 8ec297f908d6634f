"""A paged cache and its readable oracle, driven together."""

from __future__ import annotations

import copy

import numpy as np
import torch

from sparsekv.cache.dense import DenseKVCache, Slot
from sparsekv.cache.paged import PagedKVCache
from sparsekv.cache.pages import PagePool
from sparsekv.kernels._quant import KV_FORMATS, dequantise, quantise, raw

L, HK, D = 2, 2, 8
Counts = list[list[int]]  # [row][head]


class Pair:
    """The two caches side by side: every verb does the same to both.

    A quantised pool stands beside an oracle that is given what the format can hold.
    """

    def __init__(self, batch: int, page_size: int = 16, kv_dtype: str | None = None) -> None:
        self.dim, self.form = D if kv_dtype is None else 16, KV_FORMATS.get(kv_dtype)
        self.pool = PagePool(torch.device("cpu"), torch.float32, self.dim, page_size, kv_dtype)
        self.paged = PagedKVCache(self.pool, L, batch, HK)
        self.dense = DenseKVCache(L, batch, HK)
        self.snapshots: list = []  # (Snapshot, the oracle's layer at that moment)
        self.column = 0

    @property
    def batch(self) -> int:
        return self.paged.batch

    def uniform(self, count: int) -> Counts:
        return [[count] * HK for _ in range(self.batch)]

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] as the pool gives it back."""
        return x if self.form is None else dequantise(*quantise(x, self.form), x.dtype)

    def append(self, layer: int, counts: Counts) -> None:
        """counts[row][head] new tokens; heads with fewer skip the first columns, like padding."""
        tokens = max(max(row) for row in counts)
        k, v = torch.randn(2, self.batch, HK, tokens, self.dim)
        scores = torch.randn(self.batch, HK, tokens)
        count = torch.tensor(counts)[..., None]
        rank = torch.arange(tokens) - (tokens - count)  # [B, HK, T]
        lens = self.paged.seqlens[layer]
        slots = torch.where(rank >= 0, lens[..., None] + rank, -1).int()
        columns = torch.arange(self.column, self.column + tokens, dtype=torch.int32)
        self.column += tokens

        new = np.array(counts, dtype=np.int32)
        self.paged.ensure(np.array([layer]), new[None], np.array([False]))
        self.poison()  # fresh pages hold garbage until written
        self.paged.append(layer, k, v, slots, columns.expand(slots.shape), token_scores=scores)
        self.paged.set_lens(layer, lens + count[..., 0].int(), self.paged.lens[layer] + new)
        for row, head, t in (rank >= 0).nonzero().tolist():
            where = (row, head, t)
            kv = self.held(k[where]), self.held(v[where])
            slot = Slot(*kv, int(columns[t]), float(scores[where]))
            self.dense.heads[layer][row][head].append(slot)

    def replace(self, layer: int, victims: Counts) -> None:
        """A new token takes slot victims[row][head] modulo the length; empty heads skip it."""
        k, v = torch.randn(2, self.batch, HK, 1, self.dim)
        self.rewrite(layer)
        lens, positions = self.paged.seqlens[layer], self.paged.view(layer, "positions")
        slots = torch.tensor(victims).int() % lens.clamp_min(1)
        slots = torch.where(lens > 0, slots, -1)
        column = torch.full((self.batch, HK, 1), self.column, dtype=torch.int32)
        for row, head in (slots >= 0).nonzero().tolist():
            old = int(positions[row, head, slots[row, head]])
            kv = self.held(k[row, head, 0]), self.held(v[row, head, 0])
            slot = Slot(*kv, self.column, 0.0)
            heads = self.dense.heads[layer][row]
            heads[head] = [s for s in heads[head] if s.position != old] + [slot]
        self.paged.append(layer, k, v, slots[..., None], column)
        self.column += 1

    def keep(
        self, layer: int, kept: list[list[set[int]]], counted: bool = True, trim: bool = True
    ) -> None:
        """Keep the tokens at columns kept[row][head]. counted: the host knows the new lengths."""
        self.rewrite(layer)
        positions = self.paged.view(layer, "positions")
        keep = torch.zeros(positions.shape, dtype=torch.bool)
        for row in range(self.batch):
            for head in range(HK):
                columns = torch.tensor(sorted(kept[row][head]))
                # Beyond the length stand stale positions too; compaction has to ignore them.
                keep[row, head] = torch.isin(positions[row, head], columns)
        self.dense.keep(layer, kept)
        host = np.array([[len(head) for head in row] for row in self.dense.heads[layer]])
        self.paged.compact(layer, keep, host.astype(np.int32) if counted else None)
        if trim:
            self.paged.trim(layer)

    def add_to_scores(self, layer: int, amount: float) -> None:
        """What a stateful policy does in every step."""
        self.rewrite(layer)
        self.paged.store_scores(layer, self.paged.view(layer, "scores") + amount)
        for row in self.dense.heads[layer]:
            for head, slots in enumerate(row):
                added = [np.float32(s.score) + np.float32(amount) for s in slots]
                row[head] = [
                    Slot(s.k, s.v, s.position, float(x)) for s, x in zip(slots, added, strict=True)
                ]

    def rewrite(self, layer: int) -> None:
        """Announce that slots which exist will be written."""
        none = np.zeros((1, self.batch, HK), dtype=np.int32)
        self.paged.ensure(np.array([layer]), none, np.array([True]))

    def select_rows(self, rows: list[int]) -> None:
        self.paged.select_rows(np.array(rows))
        self.dense.select_rows(rows)

    def snapshot(self, layer: int) -> None:
        before = copy.deepcopy(self.dense.heads[layer])
        self.snapshots.append((self.paged.snapshot(layer), before))

    def restore(self, index: int) -> None:
        snapshot, before = self.snapshots.pop(index)
        self.paged.restore(snapshot)
        self.dense.heads[snapshot.layer] = before

    def drop(self, index: int) -> None:
        self.paged.drop(self.snapshots.pop(index)[0])

    def free(self) -> None:
        self.paged.free()
        self.dense = DenseKVCache(L, self.batch, HK)

    def poison(self) -> None:
        """NaN into every slot that no table and no snapshot holds."""
        size = self.pool.page_size
        used = np.zeros((self.pool.num_pages + 1, size), dtype=bool)
        tables = [(s.table, s.lens) for s, _ in self.snapshots]
        for table, lens in [(self.paged.table, self.paged.lens), *tables]:
            slot = np.arange(table.shape[-1] * size)
            page = np.repeat(table, size, axis=-1)
            inside = slot < lens[..., None]
            used[page[inside], np.broadcast_to(slot % size, page.shape)[inside]] = True
        unused = torch.from_numpy(~used)
        for name, pages in self.pool.slot_tensors.items():
            if name != "positions":
                raw(pages)[unused] = torch.nan if raw(pages).is_floating_point() else 0x7F

    def check(self) -> None:
        """Invariants of the store, and every head's (k, v, position, score) records."""
        self.paged.validate(tuple(snapshot for snapshot, _ in self.snapshots))
        for layer in range(L):
            slots = torch.arange(self.paged.width(layer) * self.pool.page_size)
            k, v = self.paged.gather(layer, slots.expand(self.batch, HK, -1))
            positions = self.paged.view(layer, "positions")
            scores = self.paged.view(layer, "scores")
            for row in range(self.batch):
                for head in range(HK):
                    n = self.paged.lens[layer, row, head]
                    order = positions[row, head, :n].argsort()
                    got = [x[row, head, order] for x in (k, v, positions, scores)]
                    want = self.dense.gather(layer, row, head)
                    assert got[2].tolist() == want[2], (layer, row, head)
                    by_position = sorted(
                        self.dense.heads[layer][row][head], key=lambda s: s.position
                    )
                    assert got[3].tolist() == [s.score for s in by_position], (layer, row, head)
                    if n:
                        assert torch.equal(got[0], want[0]), (layer, row, head)
                        assert torch.equal(got[1], want[1]), (layer, row, head)
