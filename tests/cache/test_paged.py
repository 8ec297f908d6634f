"""PagedKVCache against DenseKVCache, its readable oracle.

Every slot that no table owns is poisoned with NaN after every step, so whatever reads one fails.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sparsekv.cache.dense import DenseKVCache, Slot
from sparsekv.cache.paged import PagedKVCache
from sparsekv.cache.pages import PagePool
from sparsekv.kernels.decode import paged_decode_attention

L, HK, D = 2, 2, 8
Counts = list[list[int]]  # [row][head]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Pair:
    """The two caches side by side: every verb does the same to both."""

    def __init__(self, batch: int, page_size: int = 16) -> None:
        self.pool = PagePool(torch.device("cpu"), torch.float32, D, page_size)
        self.paged = PagedKVCache(self.pool, L, batch, HK)
        self.dense = DenseKVCache(L, batch, HK)
        self.snapshots: list = []  # (Snapshot, the oracle's layer at that moment)
        self.column = 0

    @property
    def batch(self) -> int:
        return self.paged.batch

    def uniform(self, count: int) -> Counts:
        return [[count] * HK for _ in range(self.batch)]

    def append(self, layer: int, counts: Counts) -> None:
        """counts[row][head] new tokens; heads with fewer skip the first columns, like padding."""
        tokens = max(max(row) for row in counts)
        k, v = torch.randn(2, self.batch, HK, tokens, D)
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
            slot = Slot(k[where], v[where], int(columns[t]), float(scores[where]))
            self.dense.heads[layer][row][head].append(slot)

    def replace(self, layer: int, victims: Counts) -> None:
        """A new token takes slot victims[row][head] modulo the length; empty heads skip it."""
        k, v = torch.randn(2, self.batch, HK, 1, D)
        self.rewrite(layer)
        lens, positions = self.paged.seqlens[layer], self.paged.view(layer, "positions")
        slots = torch.tensor(victims).int() % lens.clamp_min(1)
        slots = torch.where(lens > 0, slots, -1)
        column = torch.full((self.batch, HK, 1), self.column, dtype=torch.int32)
        for row, head in (slots >= 0).nonzero().tolist():
            old = int(positions[row, head, slots[row, head]])
            slot = Slot(k[row, head, 0], v[row, head, 0], self.column, 0.0)
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
        for pages in (self.pool.k_pages, self.pool.v_pages, self.pool.scores):
            pages[unused] = torch.nan

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


class PagedAgainstDense(RuleBasedStateMachine):
    """Any order of the verbs that the runtime uses."""

    @initialize(batch=st.integers(1, 3), page_size=st.sampled_from([16, 32]))
    def start(self, batch: int, page_size: int) -> None:
        torch.manual_seed(0)
        self.pair = Pair(batch, page_size)

    def _grid(self, data: st.DataObject, values: st.SearchStrategy) -> list:
        heads = st.lists(values, min_size=HK, max_size=HK)
        return data.draw(st.lists(heads, min_size=self.pair.batch, max_size=self.pair.batch))

    @rule(layer=st.integers(0, L - 1), data=st.data())
    def append_chunk(self, layer: int, data: st.DataObject) -> None:
        self.pair.append(layer, self._grid(data, st.integers(0, 40)))

    @rule(layer=st.integers(0, L - 1))
    def append_token(self, layer: int) -> None:
        self.pair.append(layer, self.pair.uniform(1))

    @rule(layer=st.integers(0, L - 1), data=st.data())
    def replace(self, layer: int, data: st.DataObject) -> None:
        self.pair.replace(layer, self._grid(data, st.integers(0, 100)))

    @rule(
        layer=st.integers(0, L - 1),
        fraction=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
        counted=st.booleans(),
        trim=st.booleans(),
        rng=st.randoms(use_true_random=False),
    )
    def compact(
        self, layer: int, fraction: float, counted: bool, trim: bool, rng: random.Random
    ) -> None:
        heads = self.pair.dense.heads[layer]
        kept = [
            [{s.position for s in slots if rng.random() < fraction} for slots in row]
            for row in heads
        ]
        self.pair.keep(layer, kept, counted, trim)

    @rule(layer=st.integers(0, L - 1))
    def score(self, layer: int) -> None:
        self.pair.add_to_scores(layer, 0.5)

    @precondition(lambda self: not self.pair.snapshots)  # rows of a snapshot cannot be forked
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = st.integers(0, self.pair.batch - 1)
        self.pair.select_rows(data.draw(st.lists(source, min_size=1, max_size=3)))

    @precondition(lambda self: len(self.pair.snapshots) < 3)
    @rule(layer=st.integers(0, L - 1))
    def snapshot(self, layer: int) -> None:
        self.pair.snapshot(layer)

    @precondition(lambda self: self.pair.snapshots)
    @rule(index=st.integers(0, 2))
    def restore(self, index: int) -> None:
        self.pair.restore(index % len(self.pair.snapshots))

    @precondition(lambda self: self.pair.snapshots)
    @rule(index=st.integers(0, 2))
    def drop(self, index: int) -> None:
        self.pair.drop(index % len(self.pair.snapshots))

    @rule()
    def free(self) -> None:
        self.pair.free()

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()
            self.pair.poison()

    def teardown(self) -> None:
        """Nothing leaks: without owners every page is free."""
        if hasattr(self, "pair"):
            self.pair.free()
            while self.pair.snapshots:
                self.pair.drop(0)
            self.pair.check()
            assert self.pair.pool.pages_free == self.pair.pool.num_pages


PagedAgainstDense.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestPagedAgainstDense = PagedAgainstDense.TestCase


def test_pages_return_after_every_request() -> None:
    """B72: a hundred requests leave the pool as the largest one made it."""
    pair, rng = Pair(2), random.Random(0)
    sizes = [[[rng.randint(0, 40) for _ in range(HK)] for _ in range(2)] for _ in range(L)]
    for _ in range(100):
        for layer in range(L):
            pair.append(layer, sizes[layer])
        pair.select_rows([1, 1])
        pair.select_rows([0, 1])
        pair.append(0, pair.uniform(1))
        pair.keep(0, [[{s.position for s in h[::3]} for h in row] for row in pair.dense.heads[0]])
        pair.free()
        pair.paged.validate()
        assert pair.pool.pages_free == pair.pool.num_pages
    pages = sum(-(-n // 16) for layer in sizes for row in layer for n in row)
    assert pair.pool.num_pages <= 2 * pages + 2 * L * HK  # no growth from round to round


@pytest.mark.parametrize("kept", [15, 16, 17, 31, 32, 33])
def test_page_boundary(kept: int) -> None:
    """B77: keep page-1, page, page+1 tokens, append, and attend: as dense attention does."""
    torch.manual_seed(kept)
    pair = Pair(2)
    pair.append(0, pair.uniform(50))
    columns = [[set(random.Random(h).sample(range(50), kept)) for h in range(HK)] for _ in range(2)]
    pair.keep(0, columns)
    assert (pair.paged.pages[0] == -(-kept // 16)).all()
    for step in range(3):
        pair.append(0, pair.uniform(1))
        assert (pair.paged.lens[0] == kept + step + 1).all()
        pair.poison()
        pair.check()
        q = torch.randn(2, 2 * HK, D)
        out, _, _ = paged_decode_attention(
            q, pair.pool.k_pages, pair.pool.v_pages, pair.paged.block_table[0],
            pair.paged.seqlens[0], softmax_scale=0.5,
        )  # fmt: skip
        for row in range(2):
            for head in range(2 * HK):
                k, v, _ = pair.dense.gather(0, row, head // 2)
                want = (0.5 * k @ q[row, head]).softmax(-1) @ v
                torch.testing.assert_close(out[row, head], want, atol=1e-5, rtol=1e-5)


def test_every_other_token_evicted() -> None:
    """B78: ceil(kept / page) pages stay, and what is freed serves the next allocation at once."""
    pair = Pair(3)
    pair.append(0, pair.uniform(100))
    used = pair.pool.pages_used
    pair.keep(0, [[set(range(0, 100, 2)) for _ in range(HK)] for _ in range(3)])
    pair.check()
    assert (pair.paged.pages[0] == 4).all()  # ceil(50 / 16) of 7
    assert pair.pool.pages_used == 3 * HK * 4
    existing = pair.pool.num_pages
    pair.append(1, pair.uniform(48))
    pair.check()
    assert pair.pool.pages_used == used and pair.pool.num_pages == existing


@pytest.mark.parametrize("verb", ["append", "replace", "compact", "scores"])
def test_copy_on_write(verb: str) -> None:
    """B79: what one row of a fork writes, the other never sees; untouched pages stay shared."""
    pair = Pair(1)
    pair.append(0, pair.uniform(40))
    pair.select_rows([0, 0])
    assert pair.pool.pages_used == 3 * HK, "a fork copies nothing"
    if verb == "append":
        pair.append(0, [[1] * HK, [0] * HK])
        # The full pages stay shared; the page at the end belongs to both rows and is copied.
        shared = pair.pool.refcount[pair.paged.table[0, 0, :, :2]]
        assert (shared == 2).all()
    elif verb == "replace":
        pair.replace(0, [[3] * HK, [39] * HK])
    elif verb == "compact":
        pair.keep(0, [[set(range(0, 40, 2))] * HK, [set(range(20, 40))] * HK])
    else:
        pair.add_to_scores(0, 1.0)
        pair.keep(0, [[set(range(40))] * HK, [{7}] * HK])
    pair.poison()
    pair.check()
    assert (pair.pool.refcount[1:] <= 2).all()


def test_snapshot_survives_everything() -> None:
    """A layer written, evicted, freed and grown comes back as it was."""
    pair = Pair(2)
    pair.append(1, [[5, 50], [0, 16]])
    kept = [[set(range(50)), set(range(20, 50))], [set()] * HK]
    pair.keep(1, kept, trim=False)  # pages that hold nothing belong to a snapshot too
    pair.snapshot(1)
    pair.replace(1, pair.uniform(0))
    pair.keep(1, [[set()] * HK] * 2)
    pair.free()
    pair.append(1, pair.uniform(200))  # widens the tables
    pair.poison()
    pair.check()
    pair.restore(0)
    pair.check()
    assert pair.paged.lens[1].tolist() == [[5, 30], [0, 0]]
    assert pair.paged.pages[1].tolist() == [[1, 4], [0, 1]]


def test_growth_keeps_contents_and_size_is_measured() -> None:
    """B29: K/V bytes that exist are pages x page bytes, for lengths that differ per head."""
    pair = Pair(2)
    pair.append(0, [[1, 17], [64, 0]])
    pages = 1 + 2 + 4
    assert pair.pool.num_pages == pages
    assert pair.pool.kv_bytes == (pages + 1) * 16 * D * 2 * 4  # and the null page
    pair.append(1, pair.uniform(16))
    pair.poison()
    pair.check()


@pytest.mark.parametrize("page_size", [0, 8, 24, 128])
def test_page_size_is_checked(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"expected page_size to be 16, 32 or 64, got {page_size}"):
        PagePool(torch.device("cpu"), torch.float32, D, page_size)
