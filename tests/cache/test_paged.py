"""PagedKVCache against DenseKVCache, its readable oracle.

Every slot that no table owns is poisoned with NaN after every step, so whatever reads one fails.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

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
from paged_pair import HK, D, L, Pair

from sparsekv.cache.pages import PagePool
from sparsekv.kernels._quant import KV_FORMATS
from sparsekv.kernels.decode import paged_decode_attention


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class PagedAgainstDense(RuleBasedStateMachine):
    """Any order of the verbs that the runtime uses."""

    @initialize(
        batch=st.integers(1, 3),
        page_size=st.sampled_from([16, 32]),
        kv_dtype=st.sampled_from([None, *KV_FORMATS]),
    )
    def start(self, batch: int, page_size: int, kv_dtype: str | None) -> None:
        torch.manual_seed(0)
        self.pair = Pair(batch, page_size, kv_dtype)

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


PagedAgainstDense.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
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


@pytest.mark.parametrize("page_size", [0, 8, 24, 128, 16.0, True, "16"])
def test_page_size_is_checked(page_size: Any) -> None:
    with pytest.raises(
        ValueError, match=f"expected page_size to be 16, 32 or 64, got {page_size!r}"
    ):
        PagePool(torch.device("cpu"), torch.float32, D, page_size)
